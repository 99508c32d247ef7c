"""Turns the parallel configuration and a world size into a device mesh and a rank's place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptool.errors import UsageError
from trainer.config import ModelConfig, ParallelConfig

__all__ = ["Layout", "build_mesh", "resolve_parallel"]


@dataclass(frozen=True)
class Layout:
    """Where this rank stands. ``mesh`` is None for ddp and single; its axes, outermost first,
    are ``dp_shard`` and, where they are in use, ``dp_replicate`` before it and ``tp`` after."""

    parallel: ParallelConfig
    device: torch.device
    rank: int
    world_size: int
    mesh: DeviceMesh | None

    @property
    def num_data_ranks(self) -> int:
        return self.world_size // self.parallel.tp

    @property
    def data_rank(self) -> int:
        return self.rank // self.parallel.tp

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh without its tensor-parallel axis: 1-D, or replicate by shard."""
        assert self.mesh is not None
        names = tuple(name for name in self.mesh.mesh_dim_names or () if name != "tp")
        return self.mesh[names] if len(names) > 1 else self.mesh[names[0]]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def facts(self) -> dict[str, object]:
        """What the manifest says of the layout."""
        names = ("strategy", "dp_replicate", "dp_shard", "tp")
        return {name: getattr(self.parallel, name) for name in names}

    def describe(self) -> str:
        parallel = self.parallel
        axes = f"{parallel.dp_replicate} x {parallel.dp_shard} x {parallel.tp}"
        return f"{parallel.strategy}, dp_replicate x dp_shard x tp = {axes}"


def resolve_parallel(
    parallel: ParallelConfig, *, world_size: int, model: ModelConfig
) -> ParallelConfig:
    """Fill ``dp_shard``, and check that the axes fit the ranks and the model; raises UsageError.

    One process needs no sharding: whatever the strategy, its tensors are plain.
    """
    if world_size == 1:
        _refuse_axes(parallel, "one process")
        return replace(parallel, strategy="single", dp_replicate=1, dp_shard=1, tp=1)
    if parallel.strategy == "single":
        raise UsageError(
            f'parallel.strategy = "single" was started on {world_size} ranks',
            hint="start one process, or set parallel.strategy to fsdp2 or ddp",
        )
    if parallel.strategy == "ddp":
        _refuse_axes(replace(parallel, dp_replicate=1), "ddp")
        return replace(parallel, dp_replicate=world_size, dp_shard=1)
    others = parallel.dp_replicate * parallel.tp
    dp_shard = parallel.dp_shard or world_size // others
    if others * dp_shard != world_size:
        raise UsageError(
            f"dp_replicate {parallel.dp_replicate} x dp_shard {dp_shard} x tp {parallel.tp} "
            f"is not the world size {world_size}",
            hint="leave parallel.dp_shard at 0 to take the ranks that are left",
        )
    _check_tensor_parallel(parallel.tp, model)
    parallel = replace(parallel, dp_shard=dp_shard)
    _check_fsdp1(parallel)
    return parallel


def build_mesh(parallel: ParallelConfig, *, device: torch.device) -> DeviceMesh | None:
    """The mesh of resolved axes; collective, since it makes process groups.

    ``dp_shard`` is always there, so that a mesh of replicas alone is not taken for a sharded one.
    """
    if parallel.strategy in ("ddp", "single"):
        return None
    axes = {"dp_shard": parallel.dp_shard}
    if parallel.dp_replicate > 1 or parallel.fsdp1_sharding == "HYBRID_SHARD":
        axes = {"dp_replicate": parallel.dp_replicate, **axes}
    if parallel.tp > 1:
        axes["tp"] = parallel.tp
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _refuse_axes(parallel: ParallelConfig, what: str) -> None:
    for name in ("dp_replicate", "dp_shard", "tp"):
        if getattr(parallel, name) > 1:
            raise UsageError(f"parallel.{name} = {getattr(parallel, name)} does not fit {what}")


def _check_tensor_parallel(tp: int, model: ModelConfig) -> None:
    if tp == 1:
        return
    for name in ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size"):
        if getattr(model, name) % tp:
            raise UsageError(f"model.{name} {getattr(model, name)} does not divide by tp {tp}")


def _check_fsdp1(parallel: ParallelConfig) -> None:
    if parallel.strategy != "fsdp1":
        return
    hybrid = parallel.fsdp1_sharding == "HYBRID_SHARD"
    if parallel.dp_replicate > 1 and not hybrid:
        raise UsageError(
            f"FSDP1 with parallel.dp_replicate = {parallel.dp_replicate} needs HYBRID_SHARD",
            hint="set parallel.fsdp1_sharding to HYBRID_SHARD",
        )
    if parallel.tp > 1 and (parallel.dp_shard == 1 or parallel.fsdp1_sharding == "NO_SHARD"):
        raise UsageError(
            "FSDP1 on a tensor-parallel mesh must shard over more than one rank: torch gathers no "
            "optimizer state from it otherwise",
            hint='use parallel.strategy = "fsdp2"',
        )
    if hybrid and parallel.dp_shard == 1:
        # torch turns this into NO_SHARD within one rank, and never reduces between the replicas.
        raise UsageError(
            "FSDP1's HYBRID_SHARD with one rank to shard over would not reduce gradients",
            hint="use ddp, or leave parallel.dp_shard ranks to shard over",
        )
