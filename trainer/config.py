"""Turns a TOML file and ``--set a.b=value`` overrides into one frozen Config.

Every key has a default, so an empty file is a valid configuration. A key that is not known is
an error that names the nearest one. Sizes that say 0 are derived (``model.ffn_dim`` from the
model's width, ``parallel.dp_shard`` from the world size).
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptool.errors import UnsupportedError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "MemoryConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "load_config",
    "make_config",
]


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how long it goes; ``root`` is any fsspec URL."""

    root: str = "runs/default"
    steps: int = 100
    seed: int = 0
    device: str = "auto"
    deterministic: bool = False
    resume: bool = True
    step_timeout_s: float = 600.0
    process_timeout_s: float = 300.0
    log_every: int = 1


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer; ``vocab_size`` 0 is the tokenizer's, ``ffn_dim`` 0 is 8/3 dim."""

    vocab_size: int = 0
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 0
    ffn_dim: int = 0
    max_seq_len: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False

    @property
    def num_parameters(self) -> int:
        """Of a completed configuration; a tied embedding counts once."""
        kv_dim = self.dim // self.num_heads * self.num_kv_heads
        attention = 2 * self.dim * (self.dim + kv_dim)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied else 2)
        return self.num_layers * block + embeddings + self.dim


@dataclass(frozen=True)
class DataConfig:
    """Text files to train on; no ``paths`` is Python's own standard library."""

    paths: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".py", ".txt", ".md")
    tokenizer: str = "byte"
    bpe_vocab_size: int = 2048
    seq_len: int = 128
    global_batch: int = 16
    micro_batch: int = 0
    cache_dir: str = ""
    allow_other_corpus: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a warm-up and a cosine; ``clip_norm`` 0 clips nothing."""

    lr: float = 3e-3
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    warmup_steps: int = 10
    min_lr_ratio: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread; ``dp_shard`` 0 takes the ranks that the other axes leave."""

    strategy: str = "fsdp2"
    dp_replicate: int = 1
    dp_shard: int = 0
    tp: int = 1
    pp: int = 1
    unit: str = "block"
    reshard_after_forward: bool = True
    fsdp1_sharding: str = "FULL_SHARD"
    fsdp1_wrap: str = "block"
    fsdp1_min_unit_params: int = 100_000
    use_orig_params: bool = True


@dataclass(frozen=True)
class PrecisionConfig:
    """``fp32``, ``mixed`` (fp32 masters, bf16 products), ``bf16`` (all bf16) or ``fp16``."""

    mode: str = "fp32"
    reduce_dtype: str = "float32"
    fp16_initial_scale: float = 65536.0
    fp16_growth_steps: int = 2000


@dataclass(frozen=True)
class MemoryConfig:
    """What trades time for memory, and per-block compilation."""

    activation_checkpointing: str = "none"
    cpu_offload: bool = False
    compile: bool = False
    compile_backend: str = "inductor"


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep; ``keep_last`` 0 keeps all.

    ``import_full`` and ``export_full`` are one torch file of the whole model, read and written
    by rank 0: the legacy way, for hand-over from and to programs that know nothing else.
    """

    every: int = 20
    keep_last: int = 0
    keep_every: int = 0
    final: bool = True
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "async"
    import_full: str = ""
    export_full: str = ""


@dataclass(frozen=True)
class MetricsConfig:
    """``dir`` empty is the run's own folder where that is local, else ``metrics/<run name>``."""

    dir: str = ""
    tensorboard: bool = False
    peak_flops: float = 0.0


@dataclass(frozen=True)
class Config:
    """Everything that a run is told."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


CHOICES: dict[str, tuple[str, ...]] = {
    "run.device": ("auto", "cpu", "cuda"),
    "data.tokenizer": ("byte", "bpe"),
    "parallel.strategy": ("fsdp2", "fsdp1", "ddp", "single"),
    "parallel.unit": ("block", "layer", "root"),
    "parallel.fsdp1_sharding": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"),
    "parallel.fsdp1_wrap": ("block", "transformer", "size"),
    "checkpoint.mode": ("async", "sync"),
    "precision.mode": ("fp32", "mixed", "bf16", "fp16"),
    "precision.reduce_dtype": ("float32", "bfloat16"),
    "memory.activation_checkpointing": ("none", "full", "selective"),
}


def load_config(path: str | None, *, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: only defaults) and apply ``key=value`` overrides on top."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read the config {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    return make_config(tree)


def make_config(tree: Mapping[str, Any]) -> Config:
    """A Config of nested mappings, checked; raises UsageError naming the key."""
    config = typing.cast("Config", _build(Config, tree, prefix=""))
    _check(config)
    return config


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set takes key=value, not {override!r}", hint="e.g. --set run.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UsageError(f"--set {key}: {parent} is a value, not a table")
    tree[leaf] = value


def _build(kind: type, tree: Mapping[str, Any], *, prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    unknown = [name for name in tree if name not in names]
    if unknown:
        raise UsageError(f"unknown config key {prefix}{unknown[0]}", hint=_nearest(unknown[0]))
    return kind(**{name: _value(hints[name], tree[name], key=prefix + name) for name in tree})


def _nearest(name: str) -> str:
    known = [
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(typing.get_type_hints(Config)[section.name])
    ]
    sections = [item.name for item in dataclasses.fields(Config)]
    close = difflib.get_close_matches(name, sections, 1, 0.75)
    leaves = {key.split(".")[1]: key for key in reversed(known)}
    close += [leaves[leaf] for leaf in difflib.get_close_matches(name, leaves, 1, 0.5)]
    return f"did you mean {close[0]}?" if close else f"the tables are {', '.join(sections)}"


def _value(kind: Any, value: Any, *, key: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise UsageError(f"config key {key} is a table, not {value!r}")
        return _build(typing.cast("type", kind), value, prefix=f"{key}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UsageError(f"config key {key} takes a list of strings, not {value!r}")
    if typing.get_origin(kind) is not None:
        if isinstance(value, Mapping):
            return dict(value)
        raise UsageError(f"config key {key} is a table, not {value!r}")
    if type(value) is not kind:
        raise UsageError(f"config key {key} takes {kind.__name__}, not {value!r}")
    choices = CHOICES.get(key)
    if choices and value not in choices:
        raise UsageError(f"config key {key} is one of {', '.join(choices)}, not {value!r}")
    return value


def _check(config: Config) -> None:
    parallel = config.parallel
    if parallel.pp != 1:
        raise UnsupportedError(
            "pipeline parallel (parallel.pp) is not implemented in the trainer",
            hint="use parallel.tp and parallel.dp_shard; ckptool reads pipeline checkpoints",
        )
    if parallel.strategy == "fsdp1" and not parallel.use_orig_params:
        raise UsageError(
            "FSDP1 without use_orig_params=True flattens the parameters and loses their names",
            hint="leave parallel.use_orig_params at true",
        )
    for key, value, least in (
        ("run.steps", config.run.steps, 1),
        ("run.log_every", config.run.log_every, 1),
        ("data.seq_len", config.data.seq_len, 2),
        ("data.global_batch", config.data.global_batch, 1),
        ("data.bpe_vocab_size", config.data.bpe_vocab_size, 257),
        ("model.num_layers", config.model.num_layers, 1),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("parallel.tp", parallel.tp, 1),
        ("parallel.dp_replicate", parallel.dp_replicate, 1),
        ("parallel.dp_shard", parallel.dp_shard, 0),
    ):
        if value < least:
            raise UsageError(f"config key {key} is at least {least}, not {value}")
    if (
        config.model.dim % config.model.num_heads
        or (config.model.dim // config.model.num_heads) % 2
    ):
        raise UsageError("model.dim must be an even multiple of model.num_heads")
