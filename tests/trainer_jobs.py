"""Small training jobs that the trainer's tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE: dict[str, dict[str, Any]] = {
    "run": {"steps": 4, "process_timeout_s": 60.0, "device": "cpu"},
    "model": {"dim": 32, "num_layers": 2, "num_heads": 4},
    "data": {"seq_len": 32, "global_batch": 8},
    "checkpoint": {"every": 2, "mode": "sync"},
}


def config_tree(root: Path, **tables: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with some keys of its tables replaced."""
    tree = {name: dict(table) for name, table in BASE.items()}
    tree["run"]["root"] = str(root)
    for name, table in tables.items():
        tree.setdefault(name, {}).update(table)
    return tree


def fsdp1(**options: Any) -> dict[str, Any]:
    return {"parallel": {"strategy": "fsdp1", **options}}


# Every way to spread a model over four ranks that runs on CPU.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2": {},
    "hsdp": {"parallel": {"dp_replicate": 2}},
    "tp": {"parallel": {"tp": 2}},
    "hsdp-tp": {"parallel": {"dp_replicate": 2, "tp": 2}},
    "ddp": {"parallel": {"strategy": "ddp"}},
    "fsdp1": fsdp1(),
    "fsdp1-transformer": fsdp1(fsdp1_wrap="transformer"),
    "fsdp1-size": fsdp1(fsdp1_wrap="size", fsdp1_min_unit_params=5000),
    "fsdp1-shard-grad-op": fsdp1(fsdp1_sharding="SHARD_GRAD_OP"),
    "fsdp1-no-shard": fsdp1(fsdp1_sharding="NO_SHARD"),
    "fsdp1-hybrid": fsdp1(fsdp1_sharding="HYBRID_SHARD", dp_replicate=2),
    "fsdp1-tp": fsdp1(tp=2),
}

# What changes how a step is computed, and must change neither names nor (much) numbers.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "unit-layer": {"parallel": {"unit": "layer"}},
    "unit-root": {"parallel": {"unit": "root"}},
    "accumulate": {"data": {"micro_batch": 1}},
    "fsdp1-accumulate": {"data": {"micro_batch": 1}, **fsdp1()},
    "recompute": {"memory": {"activation_checkpointing": "full"}},
    "recompute-selective": {"memory": {"activation_checkpointing": "selective"}},
    "fsdp1-recompute": {
        "memory": {"activation_checkpointing": "full"},
        **fsdp1(fsdp1_wrap="transformer"),
    },
    "compile": {"memory": {"compile": True, "compile_backend": "aot_eager"}},
    "fsdp1-compile": {"memory": {"compile": True, "compile_backend": "aot_eager"}, **fsdp1()},
    "tp-compile": {
        "memory": {"compile": True, "compile_backend": "aot_eager"},
        "parallel": {"tp": 2},
    },
    "tp-recompute": {
        "memory": {"activation_checkpointing": "selective"},
        "parallel": {"tp": 2},
    },
    "tied": {"model": {"tied": True}},
    "tp-tied": {"model": {"tied": True}, "parallel": {"tp": 2}},
    "mixed": {"precision": {"mode": "mixed"}},
    "bf16": {"precision": {"mode": "bf16"}},
    "fp16": {"precision": {"mode": "fp16"}},
    "fsdp1-mixed": {"precision": {"mode": "mixed"}, **fsdp1()},
    "fsdp1-fp16": {"precision": {"mode": "fp16"}, **fsdp1()},
    "ddp-mixed": {"precision": {"mode": "mixed"}, "parallel": {"strategy": "ddp"}},
}
