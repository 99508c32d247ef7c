"""Boxes of one tensor -> the boxes that nobody covers, and the pairs that cover one twice.

Boxes that are cut on one dim only (nearly all of them) are swept in n log n. Others are laid
on the grid of their edges, where one cumulative sum per dim counts how often each cell is
covered; a grid that would be much larger than the boxes are many is first split in two at an
edge, again and again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptool.model import Box

__all__ = ["Overlap", "Tiling", "check_tiling"]

Ints: TypeAlias = npt.NDArray[np.int64]

_MAX_CELLS = 1 << 16
_MAX_GRID_DIMS = 8
_MAX_FAULTS = 1000


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two boxes, by their row, and the box that both cover."""

    first: int
    second: int
    box: Box


@dataclass(frozen=True, slots=True)
class Tiling:
    """What is wrong with a tiling; nothing, where it is exact.

    ``complete`` is False where there are so many faults, or boxes that interlock so badly,
    that not all of them were worked out.
    """

    missing: tuple[Box, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    complete: bool = True

    @property
    def is_exact(self) -> bool:
        return self.complete and not self.missing and not self.overlaps


def check_tiling(offsets: Ints, sizes: Ints, *, shape: Sequence[int]) -> Tiling:
    """Whether boxes tile ``shape`` exactly.

    ``offsets`` and ``sizes`` are ``[n, dims]``; the boxes are distinct, inside the shape and
    hold at least one element each. A shape without elements needs no box.
    """
    if 0 in shape:
        return Tiling()
    full = np.array(shape, np.int64)
    if not len(offsets):
        return Tiling(missing=(Box((0,) * len(shape), tuple(shape)),))
    free = [d for d in range(len(shape)) if (sizes[:, d] != full[d]).any()]
    if not free:
        return Tiling()
    starts, ends = offsets[:, free], offsets[:, free] + sizes[:, free]
    if len(free) == 1:
        found = _sweep(starts[:, 0], ends[:, 0], int(full[free[0]]))
    else:
        found = _Splitter(starts, ends, full[free]).run()
    return _lift(found, free, shape)


def _lift(found: Tiling, free: Sequence[int], shape: Sequence[int]) -> Tiling:
    """Boxes of the free dims -> boxes of all dims; the other dims are covered whole."""

    def lift(box: Box) -> Box:
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, offset, size in zip(free, box.offsets, box.sizes, strict=True):
            offsets[dim], sizes[dim] = offset, size
        return Box(tuple(offsets), tuple(sizes))

    overlaps = tuple(Overlap(o.first, o.second, lift(o.box)) for o in found.overlaps)
    return Tiling(tuple(lift(b) for b in found.missing), overlaps, found.complete)


def _sweep(starts: Ints, ends: Ints, length: int) -> Tiling:
    """Intervals on ``[0, length)``, sorted by start and compared with how far one has come."""
    order = np.argsort(starts, kind="stable")
    start, end = starts[order], ends[order]
    reach = np.maximum.accumulate(end)
    before = np.concatenate(([0], reach[:-1]))
    holder = np.maximum.accumulate(np.where(end == reach, np.arange(len(end)), 0))
    gaps = np.flatnonzero(start > before)
    missing = [(int(before[i]), int(start[i])) for i in gaps]
    if reach[-1] < length:
        missing.append((int(reach[-1]), length))
    overlaps = []
    for i in np.flatnonzero(start < before)[:_MAX_FAULTS]:
        low, high = int(start[i]), int(min(end[i], before[i]))
        box = Box((low,), (high - low,))
        overlaps.append(Overlap(int(order[holder[i - 1]]), int(order[i]), box))
    return Tiling(
        tuple(Box((a,), (b - a,)) for a, b in missing),
        tuple(overlaps),
        complete=bool(np.count_nonzero(start < before) <= _MAX_FAULTS),
    )


class _Splitter:
    """Checks boxes that are cut on several dims; rows of ``starts``/``ends`` are boxes."""

    def __init__(self, starts: Ints, ends: Ints, shape: Ints) -> None:
        self._starts, self._ends, self._shape = starts, ends, shape
        self._missing: list[Box] = []
        self._overlaps: dict[tuple[int, int], Overlap] = {}
        self._budget = 1000 + 16 * len(starts)

    def run(self) -> Tiling:
        low = np.zeros_like(self._shape)
        todo = [(low, self._shape, np.arange(len(self._starts)))]
        while todo:
            self._budget -= 1
            if self._budget < 0 or len(self._missing) + len(self._overlaps) > _MAX_FAULTS:
                break
            todo.extend(self._step(*todo.pop()))
        missing = tuple(_join(self._missing))
        return Tiling(missing, tuple(self._overlaps.values()), complete=not todo)

    def _step(self, low: Ints, high: Ints, rows: Ints) -> list[tuple[Ints, Ints, Ints]]:
        """Settle one region, or give the two halves of it."""
        if not len(rows):
            self._missing.append(_box(low, high))
            return []
        starts = np.maximum(self._starts[rows], low)
        ends = np.minimum(self._ends[rows], high)
        edges = [
            np.unique(np.concatenate((low[d : d + 1], starts[:, d], ends[:, d], high[d : d + 1])))
            for d in range(len(low))
        ]
        num_cells = float(np.prod([len(e) - 1.0 for e in edges]))
        fits = len(low) <= _MAX_GRID_DIMS and num_cells <= max(_MAX_CELLS, 16 * len(rows))
        if num_cells == 1 or fits:
            self._settle(edges, starts, ends, rows)
            return []
        return _halves(low, high, rows, starts, ends, edges)

    def _settle(self, edges: list[Ints], starts: Ints, ends: Ints, rows: Ints) -> None:
        counts = _count_cells(edges, starts, ends)
        self._missing.extend(_cell_boxes(counts == 0, edges))
        over = counts > 1
        for cell in np.argwhere(over):
            if not over[tuple(cell)] or len(self._overlaps) > _MAX_FAULTS:
                continue
            at = np.array([e[i] for e, i in zip(edges, cell, strict=True)])
            hit = np.flatnonzero(((starts <= at) & (ends > at)).all(axis=1))[:2]
            pair = (int(rows[hit[0]]), int(rows[hit[1]]))
            low, high = starts[hit].max(axis=0), ends[hit].min(axis=0)
            bounds = [np.searchsorted(e, ab) for e, *ab in zip(edges, low, high, strict=True)]
            over[tuple(slice(a, b) for a, b in bounds)] = False
            first, second = self._starts[list(pair)], self._ends[list(pair)]
            both = _box(first.max(axis=0), second.min(axis=0))
            self._overlaps.setdefault(pair, Overlap(*pair, both))


def _halves(
    low: Ints, high: Ints, rows: Ints, starts: Ints, ends: Ints, edges: list[Ints]
) -> list[tuple[Ints, Ints, Ints]]:
    """Two regions, cut at the middle edge of the dim where that cuts the fewest boxes."""

    def cost(dim: int) -> tuple[int, int]:
        cut = edges[dim][len(edges[dim]) // 2]
        left, right = (starts[:, dim] < cut).sum(), (ends[:, dim] > cut).sum()
        return int(left + right), int(max(left, right))

    dim = min((d for d in range(len(low)) if len(edges[d]) > 2), key=cost)
    cut = edges[dim][len(edges[dim]) // 2]
    upper, lower = high.copy(), low.copy()
    upper[dim] = lower[dim] = cut
    left, right = starts[:, dim] < cut, ends[:, dim] > cut
    return [(low, upper, rows[left]), (lower, high, rows[right])]


def _count_cells(edges: list[Ints], starts: Ints, ends: Ints) -> Ints:
    """How many boxes cover each cell of the grid: corner marks, then a running sum per dim."""
    num_dims = len(edges)
    marks = np.zeros([len(e) for e in edges], np.int64)
    first = [np.searchsorted(edges[d], starts[:, d]) for d in range(num_dims)]
    last = [np.searchsorted(edges[d], ends[:, d]) for d in range(num_dims)]
    for corner in itertools.product((0, 1), repeat=num_dims):
        place = tuple(last[d] if up else first[d] for d, up in enumerate(corner))
        np.add.at(marks, place, -1 if sum(corner) % 2 else 1)
    for dim in range(num_dims):
        np.cumsum(marks, axis=dim, out=marks)
    return marks[(slice(None, -1),) * num_dims]


def _cell_boxes(mask: npt.NDArray[np.bool_], edges: list[Ints]) -> list[Box]:
    """Marked cells of a grid, joined into boxes."""
    mask = mask.copy()
    boxes: list[Box] = []
    for cell in np.argwhere(mask):
        if len(boxes) > _MAX_FAULTS or not mask[tuple(cell)]:
            continue
        end = cell + 1
        for dim in reversed(range(len(edges))):
            while end[dim] < mask.shape[dim] and mask[_slab(cell, end, dim)].all():
                end[dim] += 1
        mask[tuple(slice(a, b) for a, b in zip(cell, end, strict=True))] = False
        low = np.array([e[i] for e, i in zip(edges, cell, strict=True)])
        high = np.array([e[i] for e, i in zip(edges, end, strict=True)])
        boxes.append(_box(low, high))
    return boxes


def _slab(cell: Ints, end: Ints, dim: int) -> tuple[slice, ...]:
    """The layer of cells that follows ``[cell, end)`` on one dim."""
    bounds = zip(cell, end, strict=True)
    return tuple(slice(b, b + 1) if d == dim else slice(a, b) for d, (a, b) in enumerate(bounds))


def _box(low: Ints, high: Ints) -> Box:
    return Box(tuple(low.tolist()), tuple((high - low).tolist()))


def _join(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that touch with a whole side become one; splitting had cut them."""
    joined = list(boxes)
    for dim in range(len(joined[0].offsets) if joined else 0):
        rest: dict[tuple[object, ...], Box] = {}
        for box in sorted(joined, key=lambda b: b.offsets[dim]):
            sides = [b for d, b in enumerate(zip(box.offsets, box.sizes, strict=True)) if d != dim]
            key = (box.offsets[dim], *sides)
            before = rest.pop(key, None)
            if before is not None:
                sizes = list(box.sizes)
                sizes[dim] += before.sizes[dim]
                box = Box(before.offsets, tuple(sizes))
            rest[(box.ends[dim], *sides)] = box
        joined = list(rest.values())
    return sorted(joined, key=lambda b: b.offsets)
