"""Cuts the outputs of a plan for one destination: sizes within the budget, and what is copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptool.engine.grouped import bounds_of
from ckptool.engine.how import How
from ckptool.errors import OverBudgetError
from ckptool.planning.copies import (
    PartGroup,
    PartsSummary,
    cut_for_copies,
    part_groups,
    summarise,
)
from ckptool.planning.parts import Step, choose_part_bytes, cut_output
from ckptool.planning.plan import Output, Place, Plan
from ckptool.storage.base import Store

__all__ = ["Cut", "choose_size", "cuts_of", "groups_of", "memory_of", "summarise_plan"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A step as it was cut, and whether the server copies it."""

    step: Step
    copied: bool


def cuts_of(index: int, output: Output, dest: Store, how: How, *, part_bytes: int) -> Iterator[Cut]:
    """The steps of output ``index``, in order."""
    bounds = bounds_of(dest)
    if how.server_copy:
        steps = cut_for_copies(output, index=index, bounds=bounds, part_bytes=part_bytes)
        return (Cut(step, copied) for step, copied in steps)
    plain = cut_output(output, index=index, part_bytes=part_bytes, min_bytes=bounds.min_bytes)
    return (Cut(step, False) for step in plain)


def groups_of(output: Output, dest: Store, how: How, *, part_bytes: int) -> tuple[PartGroup, ...]:
    """The intermediate objects of an output; none where one object takes all its parts."""
    if not how.server_copy:
        return ()
    return part_groups(output, bounds=bounds_of(dest), part_bytes=part_bytes)


def choose_size(output: Output, dest: Store, how: How, *, num_jobs: int) -> int:
    """The size of an output's parts: what suits the store, within the memory budget.

    Raises OverBudgetError where the store's smallest parts are too large for it.
    """
    room = how.max_memory // (4 * num_jobs)
    part_bytes = choose_part_bytes(
        output.num_bytes,
        bounds=bounds_of(dest),
        preferred=min(dest.part_limits.preferred_bytes, room),
    )
    if 2 * min(part_bytes, output.num_bytes) > how.max_memory:
        raise OverBudgetError(
            f"{output.key}: its parts have {part_bytes} bytes, more than --max-memory "
            f"{how.max_memory} leaves room for",
            hint="give a larger --max-memory, or make smaller files",
        )
    return part_bytes


def summarise_plan(plan: Plan, dest: Store, how: How, *, num_jobs: int) -> PartsSummary:
    """What a plan will cost in parts, and who moves the bytes."""
    total = PartsSummary()
    for index, output in enumerate(plan.outputs):
        size = choose_size(output, dest, how, num_jobs=num_jobs)
        cuts = cuts_of(index, output, dest, how, part_bytes=size)
        groups = groups_of(output, dest, how, part_bytes=size)
        total += summarise(((c.step, c.copied) for c in cuts), num_groups=len(groups))
    return total


def memory_of(cut: Cut) -> int:
    """Bytes that a step holds at once: its part, and what is read beside it."""
    if cut.copied:
        return 0
    extra = sum(
        (segment.last - segment.first) * max((p.dtype.itemsize for p in segment.pieces), default=0)
        for segment in cut.step.segments
        if isinstance(segment, Place)
    )
    return 2 * cut.step.num_bytes + 2 * extra
