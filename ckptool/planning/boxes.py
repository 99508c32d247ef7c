"""Geometry of boxes: intersections, torch.chunk's rows, and row-major runs as boxes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ckptool.model import Box

__all__ = [
    "chunk_rows",
    "flat_offset",
    "intersect",
    "is_full_width",
    "run_boxes",
    "whole_box",
]


def whole_box(shape: Sequence[int]) -> Box:
    """The box that covers a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None where they share no element (0-dim boxes share one)."""
    offsets = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = tuple(min(x, y) for x, y in zip(a.ends, b.ends, strict=True))
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def chunk_rows(num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """Each rank's rows (start inclusive, end exclusive) as ``torch.chunk`` cuts dim 0.

    Pieces have ceil(num_rows / num_ranks) rows, the last one fewer, and ranks behind it none.
    """
    size = -(-num_rows // num_ranks) if num_rows else 0
    starts = [min(rank * size, num_rows) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(starts))


def is_full_width(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box spans every dim but the first, so that its bytes are one run."""
    return box.offsets[1:] == (0,) * (len(shape) - 1) and box.sizes[1:] == tuple(shape[1:])


def flat_offset(shape: Sequence[int], index: Sequence[int]) -> int:
    """The row-major position of an element of a tensor of ``shape``."""
    position = 0
    for size, i in zip(shape, index, strict=True):
        position = position * size + i
    return position


def run_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements ``[start, end)`` of a row-major tensor as boxes, in order.

    At most ``2 * dims - 1`` boxes. Each one has size 1 in its leading dims, then one partial
    dim, then whole dims, so it is a run in the tensor and in every C-contiguous chunk of it.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    boxes: list[Box] = []
    first, into_first = divmod(start, row)
    last, into_last = divmod(end, row)
    if first == last:
        return [_below(first, box) for box in run_boxes(shape[1:], into_first, into_last)]
    if into_first:
        boxes += [_below(first, box) for box in run_boxes(shape[1:], into_first, row)]
        first += 1
    if last > first:
        rest = tuple(shape[1:])
        boxes.append(Box((first,) + (0,) * len(rest), (last - first, *rest)))
    if into_last:
        boxes += [_below(last, box) for box in run_boxes(shape[1:], 0, into_last)]
    return boxes


def _below(index: int, box: Box) -> Box:
    return Box((index, *box.offsets), (1, *box.sizes))
