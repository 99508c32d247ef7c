"""Turns a model and a world size into a table of what is sharded how, unit by unit.

Shape and placement stand side by side, since a local tensor (``.to_local()``) is a part of the
parameter and never the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.config import ParallelConfig
from trainer.sizes import UnitCut, cut_units

__all__ = ["LESSON_SHAPES", "explain_lesson", "explain_units"]

# Linear(64, 64), ReLU, Linear(64, 64): the model that everyone shards first.
LESSON_SHAPES: dict[str, tuple[int, ...]] = {
    "0.weight": (64, 64),
    "0.bias": (64,),
    "2.weight": (64, 64),
    "2.bias": (64,),
}


def explain_lesson(world_size: int) -> list[UnitCut]:
    """The beginner's model, sharded as one unit over ``world_size`` ranks."""
    parallel = ParallelConfig(strategy="fsdp2", dp_shard=world_size)
    return cut_units(LESSON_SHAPES, [], parallel)


def explain_units(units: Sequence[UnitCut], *, rank: int, num_ranks: int) -> Iterator[str]:
    """The table for people; blocks alike are shown once."""
    total = sum(parameter.numel for unit in units for parameter in unit.parameters)
    local = sum(unit.local_numel for unit in units)
    yield f"{total:,} parameters; rank {rank} of {num_ranks} holds {local:,}"
    shown: dict[tuple[tuple[int, ...], ...], str] = {}
    for unit in units:
        kind = tuple(parameter.shape for parameter in unit.parameters)
        yield f"{unit.name}: {unit.tp_numel:,} gathered, {unit.local_numel:,} held"
        if kind in shown:
            yield f"  as {shown[kind]}"
            continue
        shown[kind] = unit.name
        for parameter in unit.parameters:
            short = parameter.name.removeprefix(f"{unit.name}.")
            yield (
                f"  {short:<36} {_shape(parameter.shape):>16} -> "
                f"{_shape(parameter.local_shape):>16}  {parameter.placement}"
            )
    yield "the right-hand shape is what .to_local() gives: a part, never the whole parameter"


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
