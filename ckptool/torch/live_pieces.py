"""A part of an output -> the pieces that fill it: whose bytes, and where each one lands. Pure.

The sources of a live export are shares: boxes that ranks hold. To the export's own planner a
share looks like a stored chunk, in a file of its own whose name says which rank holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptool.dtypes import DType
from ckptool.engine.place import Landing, landings
from ckptool.model import Box, Item, TensorEntry
from ckptool.planning.boxes import flat_offset
from ckptool.planning.parts import Step
from ckptool.planning.plan import Check, Copy, Payload, Place, Segment
from ckptool.planning.sources import Source

__all__ = ["Piece", "holder_of", "live_source", "pieces_of"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, end)`` of share number ``share`` of ``rank``, and where they go in a part.

    They land at byte ``at``, or, where ``box`` is given, in that box of a row-major region of
    ``region`` sizes that begins there. ``source`` and ``target`` are the dtypes of a cast, None
    where the bytes stay as they are.
    """

    rank: int
    share: int
    start: int
    end: int
    at: int
    entry: str
    source: DType | None = None
    target: DType | None = None
    itemsize: int = 1
    region: tuple[int, ...] = ()
    box: Box | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the part."""
        if self.source is None or self.target is None:
            return self.end - self.start
        return (self.end - self.start) // self.source.itemsize * self.target.itemsize


def live_source(entry: TensorEntry, box: Box, *, rank: int, share: int) -> Source:
    """Share number ``share`` of ``rank`` as the source of a plan."""
    num_bytes = box.num_elements * entry.dtype.itemsize
    item = Item(f"{rank}/{share}", 0, num_bytes)
    payload = Payload(item, entry.dtype, box, 0, -1, entry.key)
    return Source(payload, Check(-1, payload.extent(0, num_bytes), None, entry.key, box), None)


def holder_of(file: str) -> tuple[int, int]:
    """The rank and the number of the share that stands for a stored chunk."""
    rank, share = file.split("/")
    return int(rank), int(share)


def pieces_of(step: Step) -> Iterator[Piece]:
    """What fills a part besides its literals, in the order of its bytes."""
    at = 0
    for segment in step.segments:
        yield from _pieces(segment, at)
        at += segment.num_bytes


def _pieces(segment: Segment, at: int) -> Iterator[Piece]:
    if isinstance(segment, Copy):
        rank, share = holder_of(segment.extent.key)
        yield Piece(rank, share, segment.extent.start, segment.extent.end, at, "")
    elif isinstance(segment, Place):
        for landing in landings(segment):
            yield _landed(segment, landing, at)


def _landed(place: Place, landing: Landing, at: int) -> Piece:
    payload, itemsize = landing.payload, place.dtype.itemsize
    rank, share = holder_of(payload.item.file)
    casts = payload.dtype != place.dtype
    inside = tuple(o - r for o, r in zip(landing.box.offsets, landing.run.offsets, strict=True))
    begin = at + landing.first * itemsize
    box: Box | None = Box(inside, landing.box.sizes)
    if _is_run(landing.box.sizes, landing.run.sizes):
        begin += flat_offset(landing.run.sizes, inside) * itemsize
        box = None
    return Piece(
        rank,
        share,
        landing.start,
        landing.end,
        begin,
        place.entry,
        payload.dtype if casts else None,
        place.dtype if casts else None,
        itemsize,
        landing.run.sizes,
        box,
    )


def _is_run(sizes: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a box's elements follow each other in a row-major region."""
    partial = False
    for size, whole in zip(reversed(sizes), reversed(full), strict=True):
        if partial and size != 1:
            return False
        partial = partial or size != whole
    return True
