"""Everything that a run can be told, as frozen dataclasses: one for each table of the file.

Every key has a default, so an empty file is a valid configuration. Sizes that say 0 are derived
(``model.ffn_dim`` from the model's width, ``parallel.dp_shard`` from the world size).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CHOICES",
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

    ``mode`` async saves beside the training, sync stops it. ``on_failure`` raise ends the run
    when a save fails, warn goes on to the next save. ``compress`` zstd compresses the tensors
    that get at least a tenth smaller.

    ``import_full`` and ``export_full`` are one torch file of the whole model, read and written
    by rank 0: the legacy way, for hand-over from and to programs that know nothing else.

    ``export_every`` steps, ``export_at_end`` and at SIGUSR2 the model is exported for inference
    by all ranks, as a Hugging Face folder below ``export_to`` (empty: ``exports`` in the run),
    in ``export_dtype`` (empty: as it is). ``export_mode`` snapshot exports a copy while the
    training goes on, stop exports what is on the devices while it stands still.
    """

    every: int = 20
    keep_last: int = 0
    keep_every: int = 0
    final: bool = True
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "async"
    on_failure: str = "raise"
    compress: str = "none"
    import_full: str = ""
    export_full: str = ""
    export_every: int = 0
    export_at_end: bool = False
    export_to: str = ""
    export_dtype: str = ""
    export_mode: str = "snapshot"


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


# Keys that take one of a few words.
CHOICES: dict[str, tuple[str, ...]] = {
    "run.device": ("auto", "cpu", "cuda"),
    "data.tokenizer": ("byte", "bpe"),
    "parallel.strategy": ("fsdp2", "fsdp1", "ddp", "single"),
    "parallel.unit": ("block", "layer", "root"),
    "parallel.fsdp1_sharding": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"),
    "parallel.fsdp1_wrap": ("block", "transformer", "size"),
    "checkpoint.mode": ("async", "sync"),
    "checkpoint.on_failure": ("raise", "warn"),
    "checkpoint.compress": ("none", "zstd"),
    "checkpoint.export_mode": ("snapshot", "stop"),
    "precision.mode": ("fp32", "mixed", "bf16", "fp16"),
    "precision.reduce_dtype": ("float32", "bfloat16"),
    "memory.activation_checkpointing": ("none", "full", "selective"),
}
