"""One rank of bench_layouts: trains its group's layouts one after the other."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.config_file import make_config
from trainer.flops import flops_per_token, peak_flops
from trainer.model import Transformer, complete_model_config
from trainer.process import leave_at_once, pick_device
from trainer.train import train

SMALL: dict[str, dict[str, Any]] = {
    "model": {"dim": 1024, "num_layers": 8, "num_heads": 16},
    "data": {"seq_len": 512, "global_batch": 16},
    "run": {"steps": 8, "deterministic": True, "process_timeout_s": 90.0, "step_timeout_s": 120.0},
    "precision": {"mode": "mixed"},
    "checkpoint": {"every": 4},
}
LARGE: dict[str, dict[str, Any]] = {
    "model": {"dim": 2560, "num_layers": 24, "num_heads": 20, "vocab_size": 32000},
    "data": {"seq_len": 2048, "global_batch": 16},
    "run": {"steps": 40, "log_every": 10, "process_timeout_s": 180.0},
    "precision": {"mode": "mixed"},
    "memory": {"compile": True},
    "checkpoint": {"every": 0, "final": False},
}
TINY = {
    "model": {"dim": 32, "num_layers": 2, "num_heads": 4},
    "data": {"seq_len": 32, "global_batch": 8},
    "precision": {"mode": "fp32"},
}
Tables = dict[str, dict[str, Any]]


def fsdp1(**options: Any) -> Tables:
    return {"parallel": {"strategy": "fsdp1", **options}}


FSDP2: dict[str, Tables] = {
    "fsdp2": {},
    "fsdp2 fp32": {"precision": {"mode": "fp32"}},
    "fsdp2 bf16": {"precision": {"mode": "bf16"}},
    "fsdp2 fp16": {"precision": {"mode": "fp16"}},
    "fsdp2 kept gathered": {"parallel": {"reshard_after_forward": False}},
    "fsdp2 compile": {"memory": {"compile": True}},
    "fsdp2 recompute": {"memory": {"activation_checkpointing": "full"}},
    "fsdp2 recompute selective": {"memory": {"activation_checkpointing": "selective"}},
    "fsdp2 cpu offload": {"memory": {"cpu_offload": True}},
    "fsdp2 accumulate 4": {"data": {"micro_batch": 2}},
    "hsdp 2x1": {"parallel": {"dp_replicate": 2, "dp_shard": 1}},
    "tp 2": {"parallel": {"tp": 2}},
    "tp 2 compile": {"parallel": {"tp": 2}, "memory": {"compile": True}},
    "ddp": {"parallel": {"strategy": "ddp"}},
}
FSDP1: dict[str, Tables] = {
    "fsdp1 block": fsdp1(),
    "fsdp1 transformer policy": fsdp1(fsdp1_wrap="transformer"),
    "fsdp1 size policy": fsdp1(fsdp1_wrap="size", fsdp1_min_unit_params=5_000_000),
    "fsdp1 SHARD_GRAD_OP": fsdp1(fsdp1_sharding="SHARD_GRAD_OP"),
    "fsdp1 NO_SHARD": fsdp1(fsdp1_sharding="NO_SHARD"),
    "fsdp1 HYBRID_SHARD 1x2": fsdp1(fsdp1_sharding="HYBRID_SHARD"),
    "fsdp1 fp16": {"precision": {"mode": "fp16"}, **fsdp1()},
    "fsdp1 cpu offload": {"memory": {"cpu_offload": True}, **fsdp1()},
    "fsdp1 recompute": {"memory": {"activation_checkpointing": "full"}, **fsdp1()},
    "fsdp1 compile": {"memory": {"compile": True}, **fsdp1()},
}


class Bench:
    """The rank's own facts, and where rows go."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ["RANK"])
        self.device = pick_device(options.device)
        self.tiny = options.device == "cpu"

    def tree(self, base: Tables, root: Path, tables: Tables) -> Tables:
        tree = {name: dict(table) for name, table in base.items()}
        for extra in (tables, TINY if self.tiny else {}):
            for name, table in extra.items():
                tree.setdefault(name, {}).update(table)
        tree["run"].update(root=str(root), device=self.device.type)
        return tree

    def write(self, row: dict[str, Any]) -> None:
        if self.rank:
            return
        gpu = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor()
        facts = {"torch": torch.__version__, "device": gpu, "time": time.strftime("%FT%TZ")}
        line = {"group": self.options.group, **row, **facts}
        with Path(self.options.out).open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def each(self, rows: dict[str, Callable[[], dict[str, Any]]]) -> None:
        """Run and write every row; what fails on all ranks alike is a row too."""
        for name, call in rows.items():
            if self.options.only not in name:
                continue
            try:
                row = call()
            except Exception as error:
                traceback.print_exc()
                row = {"error": f"{type(error).__name__}: {error}"[:300]}
            self.write({"name": name, **row})
            self.clean()

    def clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.compiler.reset()
            torch.use_deterministic_algorithms(False)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def train_and_resume(bench: Bench, name: str, tables: Tables) -> dict[str, Any]:
    """Eight steps with a save in the middle; then the last four again, from there."""
    root = Path(bench.options.work, name.replace(" ", "-"))
    if bench.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    before = bench.allocated()
    config = make_config(bench.tree(SMALL, root, tables))
    train(config)
    first = list(events(root))
    whole = losses(first)
    dist.barrier()
    bench.clean()
    if bench.rank == 0:
        shutil.rmtree(root / "step-00000008")
        (root / "metrics.jsonl").unlink()
    dist.barrier()
    train(config)
    second = list(events(root))
    again = losses(second)
    memory = next(row for row in first if row["event"] == "memory")
    steps = [row for row in first if row["event"] == "step"]
    saves = [row for row in first if row["event"] == "save"]
    row = {
        "loss": whole[8],
        "resumed": "bits" if again == {k: whole[k] for k in range(5, 9)} else _gap(whole, again),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps[2:]),
        "steady": memory["steady"] - before,
        "estimated_steady": memory["estimated_steady"],
        "peak": memory["peak"] - before if memory["peak"] else None,
        "estimated_peak": memory["estimated_peak"],
        "save_s": saves[-1]["seconds"] if saves else None,
        "stall_s": saves[-1]["stall_s"] if saves else None,
        "save_bytes": saves[-1]["num_bytes"] if saves else None,
    }
    dist.barrier()
    if bench.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    return row


def _gap(whole: dict[int, float], again: dict[int, float]) -> str:
    if set(again) != set(range(5, 9)):
        return "no resume"
    return f"{max(abs(again[step] - whole[step]) for step in again):.1e}"


def events(root: Path) -> Iterator[dict[str, Any]]:
    for line in (root / "metrics.jsonl").read_text().splitlines():
        yield json.loads(line)


def losses(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows if row["event"] == "step"}


def run_trainer(bench: Bench) -> dict[str, Any]:
    """The trainer on the large model, without saves."""
    root = Path(bench.options.work, "large")
    if bench.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    before = bench.allocated()
    train(make_config(bench.tree(LARGE, root, {})))
    rows = list(events(root))
    steps = [row for row in rows if row["event"] == "step"]
    memory = next(row for row in rows if row["event"] == "memory")
    return {
        "loss": steps[-1]["loss"],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps[10:]),
        "mfu": steps[-1]["mfu"] and statistics.median(row["mfu"] for row in steps[10:]),
        "steady": memory["steady"] - before,
        "estimated_steady": memory["estimated_steady"],
        "peak": memory["peak"] - before if memory["peak"] else None,
        "estimated_peak": memory["estimated_peak"],
    }


def run_bare(bench: Bench) -> dict[str, Any]:
    """The same model in a loop of plain torch: no data, no metrics, no checks, no saves."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config = make_config(bench.tree(LARGE, Path("unused"), {}))
    sizes = complete_model_config(config.model, config.data, tokenizer_vocab_size=256)
    with torch.device("meta"):
        model = Transformer(sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {} if bench.tiny else {"mp_policy": policy}
    for block in model.model.layers:
        if config.memory.compile and not bench.tiny:
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=bench.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.model.rotary.reset_buffers(bench.device)
    fused = True if bench.device.type == "cuda" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    rows = config.data.global_batch // dist.get_world_size()
    shape = (rows, config.data.seq_len)
    tokens = torch.randint(0, 256, shape, device=bench.device)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(10):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append((time.perf_counter() - started) / 10)
    rate = config.data.global_batch * config.data.seq_len / statistics.median(seconds[1:])
    flops = flops_per_token(sizes, num_parameters=sizes.num_parameters, seq_len=config.data.seq_len)
    peak = peak_flops(bench.device)
    mfu = rate * flops / (peak * dist.get_world_size()) if peak else None
    return {"tokens_per_s": rate, "mfu": mfu, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("group")
    for name in ("--out", "--work", "--device", "--only"):
        parser.add_argument(name, default="")
    bench = Bench(parser.parse_args())
    level = logging.INFO if bench.rank == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    backend = "gloo"
    if bench.device.type == "cuda":
        torch.cuda.set_device(bench.device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=180))
    if bench.options.group == "mfu":
        turns = ("bare loop, 1st", "trainer, 1st", "bare loop, 2nd", "trainer, 2nd")
        bench.each({turn: _large(bench, turn) for turn in turns})
    else:
        layouts = FSDP2 if bench.options.group == "fsdp2" else FSDP1
        bench.each({name: _small(bench, name, tables) for name, tables in layouts.items()})
    dist.destroy_process_group()
    leave_at_once(0)


def _small(bench: Bench, name: str, tables: Tables) -> Callable[[], dict[str, Any]]:
    return lambda: train_and_resume(bench, name, tables)


def _large(bench: Bench, turn: str) -> Callable[[], dict[str, Any]]:
    return lambda: run_bare(bench) if turn.startswith("bare") else run_trainer(bench)


if __name__ == "__main__":
    main()
