"""The segments that make up the bytes of one row-major tensor region from its sources. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.dtypes import DType
from ckptool.model import Box
from ckptool.planning.plan import Copy, Normal, Place, Segment
from ckptool.planning.sources import Source

__all__ = ["region_segments"]


def region_segments(
    entry: str, box: Box, sources: Sequence[Source], *, dtype: DType
) -> list[Segment]:
    """Segments for the bytes of ``box`` in row-major order, as ``dtype``.

    The sources' boxes must cover the box. Where they are stacked on dim 0 and nothing is cast,
    these are copies of byte ranges; otherwise the elements are placed.
    """
    if not box.num_elements:
        return []
    rows = sorted(sources, key=lambda source: source.payload.box.offsets)
    casts = any(source.payload.dtype != dtype for source in rows)
    if casts or not _are_stacked(box, rows):
        pieces = tuple(source.payload for source in rows)
        place = Place(entry, dtype, box.sizes, box.offsets, pieces, 0, box.num_elements)
        return [place]
    return [_rows_of(box, source) for source in rows]


def _are_stacked(box: Box, rows: Sequence[Source]) -> bool:
    """Whether every source spans all of the box but its rows, which follow one another."""
    if not box.sizes:
        return len(rows) == 1
    width = (box.offsets[1:], box.sizes[1:])
    position = box.offsets[0]
    for source in rows:
        piece = source.payload.box
        first, last = piece.offsets[0], piece.offsets[0] + piece.sizes[0]
        if (piece.offsets[1:], piece.sizes[1:]) != width or not first <= position < last:
            return False
        position = last
    return position >= box.offsets[0] + box.sizes[0]


def _rows_of(box: Box, source: Source) -> Segment:
    payload = source.payload
    start, end = 0, payload.num_bytes
    if box.sizes:
        first, num_rows = payload.box.offsets[0], payload.box.sizes[0]
        row = payload.num_bytes // num_rows
        start = (max(first, box.offsets[0]) - first) * row
        end = (min(first + num_rows, box.offsets[0] + box.sizes[0]) - first) * row
    if not source.is_plain:
        return Normal(payload, start, end)
    extent = payload.extent(start, end)
    return Copy(extent, ((extent.start, extent.end, payload.check),))
