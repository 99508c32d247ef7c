"""Which ranges to read: coalescing with a bounded gap. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptool.model import Extent

__all__ = ["coalesce", "without_overlap"]


def coalesce(
    extents: Sequence[Extent], *, max_gap: int, max_bytes: int
) -> list[tuple[Extent, list[int]]]:
    """Group extents into fewer reads: (range to read, positions of the extents in it).

    Ranges of one object are joined where at most ``max_gap`` bytes lie between them and the
    joined range has at most ``max_bytes``. Every extent is in exactly one group.
    """
    order = sorted(range(len(extents)), key=lambda i: (extents[i].key, extents[i].start))
    groups: list[tuple[Extent, list[int]]] = []
    for i in order:
        extent = extents[i]
        if groups:
            joined, members = groups[-1]
            end = max(joined.end, extent.end)
            if (
                joined.key == extent.key
                and extent.start - joined.end <= max_gap
                and end - joined.start <= max(max_bytes, joined.num_bytes)
            ):
                members.append(i)
                groups[-1] = (Extent(joined.key, joined.start, end), members)
                continue
        groups.append((extent, [i]))
    return groups


def without_overlap(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of (start, end) ranges as sorted disjoint ranges."""
    union: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union
