"""Turns a configuration into the shapes that each rank holds, unit by unit, without any rank.

The model is built on the meta device; how tensor and data parallelism cut each parameter is
arithmetic on its shape. ``tests`` hold this against what torch itself does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config import ModelConfig, ParallelConfig
from trainer.model import Transformer

__all__ = ["ROOT", "ParameterCut", "UnitCut", "cut_model", "cut_units", "is_flat", "rows_of"]

ROOT = "(root)"
_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class ParameterCut:
    """One parameter, whole, after tensor parallelism, and on one rank."""

    name: str
    shape: tuple[int, ...]
    tp_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placement: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def tp_numel(self) -> int:
        return math.prod(self.tp_shape)

    @property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)


@dataclass(frozen=True)
class UnitCut:
    """What is gathered together. ``tp_numel`` is its gathered size on one rank."""

    name: str
    parameters: tuple[ParameterCut, ...]
    local_numel: int

    @property
    def tp_numel(self) -> int:
        return sum(parameter.tp_numel for parameter in self.parameters)


def cut_model(model: ModelConfig, parallel: ParallelConfig, *, rank: int = 0) -> list[UnitCut]:
    """The units of a transformer on one rank, the root last; ``parallel`` is resolved."""
    with torch.device("meta"):
        module = Transformer(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if parallel.strategy == "fsdp1" and parallel.fsdp1_wrap == "size" and parallel.unit != "root":
        prefixes = _size_units(module, parallel)
    else:
        prefixes = _unit_prefixes(module, parallel)
    return cut_units(shapes, prefixes, parallel, rank=rank)


def cut_units(
    shapes: Mapping[str, tuple[int, ...]],
    prefixes: Iterable[str],
    parallel: ParallelConfig,
    *,
    rank: int = 0,
) -> list[UnitCut]:
    """Any model's units: a parameter belongs to the longest of ``prefixes``, else to the root."""
    ordered = sorted(prefixes, key=len, reverse=True)
    members: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    members[ROOT] = []
    for name in shapes:
        unit = next((prefix for prefix in ordered if name.startswith(f"{prefix}.")), ROOT)
        members[unit].append(name)
    shard_rank = (rank // parallel.tp) % parallel.dp_shard
    units = []
    for unit, names in members.items():
        cuts = tuple(_cut(name, shapes[name], parallel, shard_rank) for name in names)
        if cuts:
            units.append(UnitCut(unit, cuts, _unit_numel(cuts, parallel)))
    return units


def rows_of(num_rows: int, *, rank: int, num_ranks: int) -> int:
    """How many rows a rank gets of torch.chunk: ceil-sized pieces, the last ones short or empty."""
    size = -(-num_rows // num_ranks)
    return max(0, min(num_rows, (rank + 1) * size) - rank * size)


def _cut(
    name: str, shape: tuple[int, ...], parallel: ParallelConfig, shard_rank: int
) -> ParameterCut:
    tp_shape, placements = shape, []
    if parallel.tp > 1 and not name.endswith("norm.weight"):
        axis = 1 if name.endswith(_BY_COLUMNS) else 0
        tp_shape = tuple(
            size // parallel.tp if index == axis else size for index, size in enumerate(shape)
        )
        placements.append(f"tp: Shard({axis})")
    local_shape = tp_shape
    if parallel.strategy == "fsdp2":
        rows = rows_of(tp_shape[0], rank=shard_rank, num_ranks=parallel.dp_shard)
        local_shape = (rows, *tp_shape[1:])
        placements.insert(0, "Shard(0)")
        if parallel.dp_replicate > 1:
            placements.insert(0, "Replicate()")
    elif is_flat(parallel):
        placements.insert(0, "part of a flat unit")
        local_shape = (-(-math.prod(tp_shape) // parallel.dp_shard),)
    else:
        placements.insert(0, "whole")
    return ParameterCut(name, shape, tp_shape, local_shape, ", ".join(placements))


def _unit_numel(cuts: tuple[ParameterCut, ...], parallel: ParallelConfig) -> int:
    if is_flat(parallel):
        return -(-sum(cut.tp_numel for cut in cuts) // parallel.dp_shard)
    return sum(cut.local_numel for cut in cuts)


def is_flat(parallel: ParallelConfig) -> bool:
    """Whether a unit is cut as one flat run of numbers, as FSDP1 does."""
    return parallel.strategy == "fsdp1" and parallel.fsdp1_sharding != "NO_SHARD"


def _unit_prefixes(module: Transformer, parallel: ParallelConfig) -> list[str]:
    if parallel.strategy in ("ddp", "single") or parallel.unit == "root":
        return []
    blocks = [f"model.layers.{index}" for index in range(module.config.num_layers)]
    if parallel.unit == "block" or parallel.strategy == "fsdp1":
        return blocks
    leaves = [name for name, child in module.named_modules() if list(child.parameters(False))]
    return [name for name in leaves if module.lm_head or name != "model.embed_tokens"]


def _size_units(module: nn.Module, parallel: ParallelConfig) -> list[str]:
    """The modules that torch's size_based_auto_wrap_policy wraps, the root aside."""
    units: list[str] = []

    def visit(name: str, child: nn.Module) -> int:
        numel = sum(parameter.numel() for parameter in child.parameters())
        if numel < parallel.fsdp1_min_unit_params:
            return 0
        wrapped = sum(
            visit(f"{name}.{part}" if name else part, grandchild)
            for part, grandchild in child.named_children()
        )
        if numel - wrapped < parallel.fsdp1_min_unit_params or isinstance(child, nn.ModuleList):
            return wrapped
        units.append(name)
        return numel

    visit("", module)
    return [name for name in units if name]
