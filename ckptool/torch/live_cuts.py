"""Cuts an output where its bytes change hands, and gives each part to the rank with most of it.

Pure. A part is as large as asked for at most (or a little more, where a row ends), and has
the store's minimum at least. Between these bounds it ends where another rank's bytes begin, so
that what a rank holds is mostly written by that rank and does not travel.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptool.planning.boxes import is_full_width
from ckptool.planning.parts import Bounds, Step, segment_at, slice_output
from ckptool.planning.plan import Copy, Output, Place, Segment
from ckptool.torch.live_pieces import Piece, holder_of, pieces_of

__all__ = ["LivePart", "assign_parts", "cut_live", "least_bytes"]

_TINY_BYTES = 1 << 20  # cheaper to send than to write by itself


@dataclass(frozen=True, slots=True)
class LivePart:
    """One part, the rank that writes it, and the pieces that fill it, own and others'."""

    step: Step
    owner: int
    pieces: tuple[Piece, ...]

    def from_rank(self, rank: int) -> list[Piece]:
        """The pieces that ``rank`` holds."""
        return [piece for piece in self.pieces if piece.rank == rank]

    @property
    def num_bytes_travelling(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces if piece.rank != self.owner)


def least_bytes(num_bytes: int, *, bounds: Bounds, part_bytes: int) -> int:
    """How small a part of an output may be, so that the store takes all of them."""
    by_count = -(-num_bytes // max(1, bounds.max_parts - bounds.max_parts // 20))
    return min(part_bytes, max(bounds.min_bytes, by_count, min(_TINY_BYTES, part_bytes // 4)))


def cut_live(output: Output, *, index: int, part_bytes: int, min_bytes: int) -> Iterator[Step]:
    """The parts of one output, in order; ``min_bytes`` as ``least_bytes`` gives it."""
    borders = _borders(output)
    start = number = 0
    while True:
        end = _next_cut(output, borders, start, part_bytes=part_bytes, min_bytes=min_bytes)
        yield slice_output(output, index, number, start, end)
        if end >= output.num_bytes:
            return
        start, number = end, number + 1


def assign_parts(steps: Sequence[Step], *, num_ranks: int, writer: int | None) -> list[LivePart]:
    """Each part's owner: who holds most of it; of equals, who has written least.

    With ``writer`` that rank owns all of them.
    """
    loads = [0] * num_ranks
    parts = []
    for step in steps:
        pieces = tuple(pieces_of(step))
        held = [0] * num_ranks
        for piece in pieces:
            held[piece.rank] += piece.num_bytes
        owner = writer
        if owner is None:
            owner = min(range(num_ranks), key=lambda rank: (-held[rank], loads[rank], rank))
        loads[owner] += step.num_bytes
        parts.append(LivePart(step, owner, pieces))
    return parts


def _borders(output: Output) -> list[int]:
    """Where in an output another rank's bytes begin; its end is the last."""
    borders: list[int] = []
    holder: int | None = None
    for begin, segment in zip(output.starts, output.segments, strict=False):
        for start, rank in _runs(segment):
            if rank is not None and holder is not None and rank != holder:
                borders.append(begin + start)
            holder = holder if rank is None else rank
    return [*borders, output.num_bytes]


def _runs(segment: Segment) -> list[tuple[int, int | None]]:
    """(start, rank) of the runs of a segment; -1 where the ranks' bytes interlock."""
    if isinstance(segment, Copy):
        return [(0, holder_of(segment.extent.key)[0])]
    if not isinstance(segment, Place):
        return [(0, None)]
    ordered = sorted(segment.pieces, key=lambda piece: piece.box.offsets)
    if len(ordered) > 1 and not all(is_full_width(p.box, segment.shape) for p in ordered):
        return [(0, -1)]
    row = segment.row_num_bytes if segment.shape else 0
    return [
        (piece.box.offsets[0] * row if piece.box.sizes else 0, holder_of(piece.item.file)[0])
        for piece in ordered
    ]


def _next_cut(
    output: Output, borders: list[int], start: int, *, part_bytes: int, min_bytes: int
) -> int:
    border = borders[min(bisect.bisect_left(borders, start + min_bytes), len(borders) - 1)]
    room = border - start
    if room <= part_bytes:
        return border
    return _rounded(output, start + -(-room // -(-room // part_bytes)), start + min_bytes, border)


def _rounded(output: Output, wanted: int, least: int, most: int) -> int:
    """A cut near ``wanted`` that its segment allows: between rows, else between elements."""
    i = segment_at(output, wanted)
    segment, begin = output.segments[i], output.starts[i]
    if not isinstance(segment, Place):
        return wanted
    for unit in (segment.row_num_bytes if segment.shape else 1, segment.dtype.itemsize):
        cut = begin + (wanted - begin) // unit * unit
        if cut >= least:
            return cut
    return min(most, begin + -(-(wanted - begin) // unit) * unit)
