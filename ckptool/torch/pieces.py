"""A box of a stored chunk -> the ranges of its file to read, and where each one lands. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ckptool.dtypes import DType
from ckptool.model import Box, Extent, Item
from ckptool.planning.boxes import flat_offset
from ckptool.torch.places import Place

__all__ = ["PIECE_BYTES", "Need", "Piece", "cut_pieces"]

PIECE_BYTES = 16 << 20
_MAX_WIDENING = 1 / 20


@dataclass(frozen=True)
class Need:
    """A box of a stored chunk, and the tensor of the box's sizes that it goes into.

    ``sizes`` are the chunk's, ``box`` counts inside the chunk. ``place`` is None where the
    item must say.
    """

    key: str
    dtype: DType
    item: Item
    sizes: tuple[int, ...]
    box: Box
    target: torch.Tensor
    place: Place | None = None

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize


@dataclass
class Piece:
    """One range of a file and what it is for: bytes ``[start, end)`` of a need's payload.

    ``rows`` is None for a run of bytes that lands at ``target_start``; else the rows of the
    chunk that the range holds.
    """

    need: Need
    place: Place
    start: int
    end: int
    run: tuple[int, int] | None
    target_start: int = 0
    rows: tuple[int, int] | None = None
    sums: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def extent(self) -> Extent:
        base = self.place.start
        return Extent(self.need.item.file, base + self.start, base + self.end)


def cut_pieces(need: Need, place: Place) -> list[Piece]:
    """The ranges to read for a need, in the order of the file."""
    if not place.plain:
        return [Piece(need, place, 0, place.num_bytes, None, rows=None)]
    itemsize = need.dtype.itemsize
    if _is_run(need.box, need.sizes) and need.target.is_contiguous():
        first = flat_offset(need.sizes, need.box.offsets) * itemsize if need.sizes else 0
        return _run_pieces(need, place, first, first + need.num_bytes)
    return _row_pieces(need, place)


def _is_run(box: Box, sizes: tuple[int, ...]) -> bool:
    """Whether the box's elements follow each other in a row-major chunk."""
    partial = False
    for size, full in zip(reversed(box.sizes), reversed(sizes), strict=True):
        if partial and size != 1:
            return False
        partial = partial or size != full
    return True


def _run_pieces(need: Need, place: Place, first: int, last: int) -> list[Piece]:
    low, high = _widened(place, first, last)
    pieces = []
    at = low
    while at < high:
        end = min(high, (at // PIECE_BYTES + 1) * PIECE_BYTES)
        run = (max(at, first), min(end, last))
        pieces.append(Piece(need, place, at, end, run, target_start=run[0] - first))
        at = end
    return pieces


def _widened(place: Place, first: int, last: int) -> tuple[int, int]:
    """The range grown to whole blocks, edge by edge, where that costs little."""
    block = place.block_num_bytes
    if not block:
        return first, last
    spare = int((last - first) * _MAX_WIDENING)
    low = first // block * block
    if first - low > spare:
        low = first
    spare -= first - low
    high = min(-(-last // block) * block, place.num_bytes)
    return low, high if high - last <= spare else last


def _row_pieces(need: Need, place: Place) -> list[Piece]:
    """Whole rows of the chunk's first dim, as many at a time as fit a piece."""
    rows, width = need.sizes[0], math.prod(need.sizes[1:]) * need.dtype.itemsize
    step = max(1, PIECE_BYTES // max(width, 1))
    first, last = need.box.offsets[0], need.box.ends[0]
    assert last <= rows
    return [
        Piece(
            need,
            place,
            row * width,
            min(row + step, last) * width,
            None,
            rows=(row, min(row + step, last)),
        )
        for row in range(first, last, step)
    ]
