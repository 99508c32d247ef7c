"""Turns the mistakes that everyone makes once into an error or a warning that says what to do.

What cannot work is an error; what works and wastes memory or time is a line in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptool.errors import UsageError
from trainer.config import Config
from trainer.estimate import Estimate
from trainer.layout import Layout

__all__ = [
    "check_mesh",
    "check_optimizer",
    "check_same_start",
    "warnings_of",
]

_SMALL_UNIT, _LARGE_UNIT = 1 << 20, 1 << 30


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise where the optimizer was built before the model was sharded.

    It then holds the full-size parameters that sharding replaced: torch raises nothing, no
    memory is saved, and its steps change nothing that the model uses.
    """
    known = {id(parameter) for parameter in model.parameters()}
    stray = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if stray:
        shape = tuple(stray[0].shape)
        raise UsageError(
            f"the optimizer holds {len(stray)} parameters that the model does not have (the "
            f"first is {shape}): it was built before the model was sharded",
            hint="shard first (fully_shard, or the FSDP wrapper), then build the optimizer "
            "from model.parameters()",
        )


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raise where two axes of a mesh share one process group: their collectives would mix."""
    if mesh is None or mesh.mesh_dim_names is None:
        return
    seen: dict[tuple[int, ...], str] = {}
    for name in mesh.mesh_dim_names:
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group(name)))
        if len(ranks) > 1 and ranks in seen:
            raise UsageError(
                f"the mesh axes {seen[ranks]} and {name} share the ranks {ranks}",
                hint="make one mesh with init_device_mesh and slice it",
            )
        seen[ranks] = name


def check_same_start(model: nn.Module, samples: Sequence[int], layout: Layout) -> None:
    """Raise where ranks start from different weights or read the same data. Collective.

    Ranks that hold the same part of the model must agree; the samples of different data ranks
    must not.
    """
    if layout.world_size == 1:
        return
    mine = torch.tensor([_digest(model), *map(float, samples)], dtype=torch.float64)
    mine = mine.to(layout.device)
    rows = [torch.empty_like(mine) for _ in range(layout.world_size)]
    dist.all_gather(rows, mine)
    num_parts = layout.parallel.dp_shard * layout.parallel.tp
    for rank, row in enumerate(rows):
        twin = rank % num_parts
        if float(row[0]) != float(rows[twin][0]):
            raise UsageError(
                f"rank {rank} starts from other weights than rank {twin}",
                hint="seed every rank alike, or load the same checkpoint on all of them",
            )
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        data_rank = rank // layout.parallel.tp
        for sample in map(int, row[1:].tolist()):
            if owners.setdefault(sample, data_rank) != data_rank:
                raise UsageError(
                    f"data ranks {owners[sample]} and {data_rank} both read sample {sample}",
                    hint="give each data rank its own share of the global batch",
                )


def warnings_of(
    config: Config, layout: Layout, result: Estimate, *, device_bytes: int | None
) -> Iterator[str]:
    """What works and wastes something; ``device_bytes`` is a GPU's memory, None on CPU."""
    parallel = layout.parallel
    sharded = parallel.strategy in ("fsdp1", "fsdp2") and parallel.dp_shard > 1
    if sharded and parallel.unit == "root":
        yield (
            "only the root is wrapped: the whole model is gathered at once and no peak is "
            'saved; set parallel.unit = "block"'
        )
    elif sharded and parallel.unit == "layer":
        yield (
            f"every layer is a unit of its own: {result.num_units} units pay 10-30 us for each "
            'of three collectives; set parallel.unit = "block"'
        )
    if sharded and parallel.unit != "root" and result.largest_unit_bytes < _SMALL_UNIT:
        yield (
            f"the largest unit gathers {result.largest_unit_bytes:,} bytes, under 1 MB: "
            "latency will dominate; wrap larger units, or use ddp"
        )
    if sharded and result.largest_unit_bytes > _LARGE_UNIT:
        yield (
            f"the largest unit gathers {result.largest_unit_bytes / 2**30:.1f} GiB, over 1 GB: "
            "it is transient memory on every rank; wrap smaller units"
        )
    if device_bytes is None:
        return
    room = device_bytes * 0.9
    if sharded and result.ddp_steady + result.activations < room:
        yield (
            f"DDP would fit: {result.ddp_steady / 2**30:.1f} GiB of weights, gradients and "
            f"moments and about {result.activations / 2**30:.1f} GiB of activations in "
            f"{device_bytes / 2**30:.0f} GiB; it sends a third less a step"
        )
    mode = config.memory.activation_checkpointing
    if mode == "none" and result.activations > max(result.steady, room / 2):
        yield (
            f"activations, about {result.activations / 2**30:.1f} GiB, dominate; set "
            'memory.activation_checkpointing = "full" (or "selective")'
        )
    if config.memory.cpu_offload and result.peak < room:
        yield (
            f"CPU offload is on, and about {result.peak / 2**30:.1f} GiB would fit the GPU's "
            f"{device_bytes / 2**30:.0f} GiB: its transfers make a step 2-5 times as long"
        )


def _digest(model: nn.Module) -> float:
    """Of what this rank holds of the model."""
    total = 0.0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += float(local.detach().sum(dtype=torch.float64))
    return total
