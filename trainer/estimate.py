"""Turns a configuration and a world size into bytes per rank, collectives and checkpoint sizes.

Steady state is exact arithmetic on shapes. Activations are a rule of thumb for this model:
what each block keeps for its backward pass, and the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config import Config, ModelConfig, ParallelConfig
from trainer.precision import Dtypes, dtypes_of
from trainer.sizes import ROOT, UnitCut, cut_model, is_flat

__all__ = ["Collectives", "Estimate", "estimate", "estimate_lines"]


@dataclass(frozen=True)
class Collectives:
    """Of data parallelism, in one step on one rank; bytes are those that leave the rank."""

    num_all_gathers: int
    num_reduce_scatters: int
    num_all_reduces: int
    sent_bytes: int


@dataclass(frozen=True)
class Estimate:
    """All in bytes. The first four are there from one step to the next; ``gathered`` and
    ``activations`` come and go within a step; ``checkpoint`` is independent of the ranks.
    ``is_offloaded``: weights, gradients and moments are in host memory between steps."""

    num_parameters: int
    num_local_parameters: int
    num_units: int
    largest_unit_bytes: int
    weights: int
    gradients: int
    moments: int
    buffers: int
    gathered: int
    activations: int
    checkpoint: int
    checkpoint_per_rank: int
    ddp_steady: int
    collectives: Collectives
    is_offloaded: bool = False

    @property
    def host(self) -> int:
        """What CPU offload keeps in host memory."""
        return self.weights + self.gradients + self.moments if self.is_offloaded else 0

    @property
    def steady(self) -> int:
        """What stays on the device."""
        return self.weights + self.gradients + self.moments + self.buffers - self.host

    @property
    def peak(self) -> int:
        return self.steady + self.gathered + self.activations

    def to_json(self) -> dict[str, Any]:
        facts = {**asdict(self), "steady": self.steady, "host": self.host, "peak": self.peak}
        return {"schema": "trainer.estimate/1", **facts}


def estimate(config: Config, model: ModelConfig, parallel: ParallelConfig) -> Estimate:
    """What rank 0 holds and does; ``model`` is complete and ``parallel`` resolved."""
    dtypes = dtypes_of(config.precision)
    units = cut_model(model, parallel)
    size, gather_size = dtypes.master.itemsize, dtypes.compute.itemsize
    local = sum(unit.local_numel for unit in units)
    total = model.num_parameters
    ranks = parallel.dp_replicate * parallel.dp_shard * parallel.tp
    return Estimate(
        num_parameters=total,
        num_local_parameters=local,
        num_units=len(units),
        largest_unit_bytes=max(unit.tp_numel for unit in units) * gather_size,
        weights=local * size,
        gradients=local * size,
        moments=2 * local * size,
        buffers=2 * model.max_seq_len * (model.dim // model.num_heads) * 4,
        gathered=_gathered_bytes(units, parallel, gather_size),
        activations=_activation_bytes(config, model, parallel, gather_size),
        checkpoint=3 * total * size,
        checkpoint_per_rank=-(-3 * total * size // ranks),
        ddp_steady=4 * total * size,
        collectives=_collectives(config, units, parallel, dtypes),
        is_offloaded=config.memory.cpu_offload,
    )


def estimate_lines(result: Estimate, *, title: str) -> Iterator[str]:
    """The estimate for people."""
    yield title
    yield f"parameters          {result.num_parameters:>16,}"
    yield f"  on this rank      {result.num_local_parameters:>16,}  in {result.num_units} units"
    yield "memory per rank"
    for name in ("weights", "gradients", "moments", "buffers", "steady"):
        yield f"  {name:<18}{_show(getattr(result, name)):>16}"
    if result.is_offloaded:
        yield f"  {'in host memory':<18}{_show(result.host):>16}  CPU offload"
    yield f"  {'gathered units':<18}{_show(result.gathered):>16}  comes and goes within a step"
    yield f"  {'activations':<18}{_show(result.activations):>16}  about; not sharded"
    yield f"  {'peak':<18}{_show(result.peak):>16}  about"
    yield f"  {'(DDP, steady)':<18}{_show(result.ddp_steady):>16}"
    calls = result.collectives
    yield "collectives per step (data parallel)"
    yield f"  all-gathers       {calls.num_all_gathers:>16}"
    yield f"  reduce-scatters   {calls.num_reduce_scatters:>16}"
    yield f"  all-reduces       {calls.num_all_reduces:>16}"
    yield f"  sent by this rank {_show(calls.sent_bytes):>16}"
    yield f"checkpoint          {_show(result.checkpoint):>16}"
    yield f"  per rank          {_show(result.checkpoint_per_rank):>16}"


def _gathered_bytes(units: list[UnitCut], parallel: ParallelConfig, gather_size: int) -> int:
    """The root stays gathered from forward to backward; of the others, the one in use and the
    one that is fetched ahead, or all where they are not resharded."""
    if parallel.strategy not in ("fsdp1", "fsdp2") or parallel.fsdp1_sharding == "NO_SHARD":
        return 0
    root = sum(unit.tp_numel for unit in units if unit.name == ROOT)
    blocks = [unit.tp_numel for unit in units if unit.name != ROOT]
    keep_all = not parallel.reshard_after_forward or parallel.fsdp1_sharding == "SHARD_GRAD_OP"
    used = sum(blocks) if keep_all else sum(sorted(blocks)[-2:])
    return (root + used) * gather_size


def _activation_bytes(
    config: Config, model: ModelConfig, parallel: ParallelConfig, gather_size: int
) -> int:
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    rows = config.data.micro_batch or max(1, config.data.global_batch // data_ranks)
    tokens = rows * config.data.seq_len
    kv_dim = model.dim // model.num_heads * model.num_kv_heads
    whole = 5 * model.dim  # inputs of the norms and of what follows them, and the residual
    cut = (3 * model.dim + 2 * kv_dim + 4 * model.ffn_dim) // parallel.tp
    mode = config.memory.activation_checkpointing
    kept = {"none": whole + cut, "selective": model.dim + cut // 2, "full": model.dim}[mode]
    blocks = model.num_layers * kept * gather_size
    if mode != "none":
        blocks += (whole + cut) * gather_size  # the block that is being recomputed
    logits = model.vocab_size * (gather_size + 4 + 4 + 4)  # as made, fp32, softmax, gradient
    return tokens * (blocks + logits)


def _collectives(
    config: Config, units: list[UnitCut], parallel: ParallelConfig, dtypes: Dtypes
) -> Collectives:
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    total = sum(unit.tp_numel for unit in units)
    share = config.data.global_batch // data_ranks
    micro_batches = max(1, share // (config.data.micro_batch or max(1, share)))
    reduced = total * (dtypes.reduce if dtypes.gather else dtypes.master).itemsize
    if parallel.strategy == "single":
        return Collectives(0, 0, 0, 0)
    if parallel.strategy == "ddp" or (parallel.strategy == "fsdp1" and not is_flat(parallel)):
        sent = 2 * reduced * (data_ranks - 1) // data_ranks
        return Collectives(0, 0, len(units), sent)
    resharded = parallel.reshard_after_forward and parallel.fsdp1_sharding != "SHARD_GRAD_OP"
    again = [unit.tp_numel for unit in units if resharded and unit.name != ROOT]
    gathers = (len(units) + len(again)) * micro_batches
    others = (parallel.dp_shard - 1) / parallel.dp_shard
    sent = int((total + sum(again)) * dtypes.compute.itemsize * micro_batches * others)
    sent += int(reduced * others)
    replicas = parallel.dp_replicate
    sent += int(2 * reduced / parallel.dp_shard * (replicas - 1) / replicas)
    reduces = len(units) if replicas > 1 else 0
    return Collectives(gathers, len(units), reduces, sent)


def _show(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.1f} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1024
    raise AssertionError
