"""Cuts an output of a store that copies on its side: what it can copy never comes to us. Pure.

A part that is one range of a source object is copied by the server. Every part but the last
needs the store's minimum, so what lies between two copied ranges (framing, small tensors, new
heads and tails) rides in a part of the minimum that we upload, filled up from the next range.
An output of more parts than one object takes is cut into groups of parts: each group becomes an
intermediate object, and the server copies the output together from those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.planning.parts import Bounds, Step, segment_at, slice_output
from ckptool.planning.plan import Copy, Output, Place, Tail

__all__ = [
    "MAX_COPY_BYTES",
    "PartGroup",
    "PartsSummary",
    "copy_shares",
    "cut_for_copies",
    "is_copy",
    "part_groups",
    "summarise",
]

MAX_COPY_BYTES = 512 << 20  # large enough to cost few requests, small enough to run side by side


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts of one output that make one intermediate object.

    ``first`` is the number of its first part; bytes ``[start, end)`` of the output.
    """

    first: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PartsSummary:
    """What outputs cost, by their parts, before any is written.

    ``num_bytes_copied`` are copied by the store, ``num_bytes_sent`` go through us;
    ``num_intermediates`` are objects that exist until the outputs are copied together from them.
    """

    num_parts: int = 0
    num_parts_copied: int = 0
    num_bytes_copied: int = 0
    num_bytes_sent: int = 0
    num_intermediates: int = 0

    def __add__(self, other: PartsSummary) -> PartsSummary:
        return PartsSummary(
            self.num_parts + other.num_parts,
            self.num_parts_copied + other.num_parts_copied,
            self.num_bytes_copied + other.num_bytes_copied,
            self.num_bytes_sent + other.num_bytes_sent,
            self.num_intermediates + other.num_intermediates,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "num_parts": self.num_parts,
            "num_parts_copied_by_server": self.num_parts_copied,
            "num_bytes_copied_by_server": self.num_bytes_copied,
            "num_bytes_sent": self.num_bytes_sent,
            "num_intermediate_objects": self.num_intermediates,
        }


def is_copy(step: Step, *, min_bytes: int, last: bool) -> bool:
    """Whether a part is one proved range of a source object, as large as the store asks."""
    if len(step.segments) != 1 or not isinstance(step.segments[0], Copy):
        return False
    (copy,) = step.segments
    assert isinstance(copy, Copy)
    proofs = copy.proofs
    whole = len(proofs) == 1 and proofs[0][:2] == (copy.extent.start, copy.extent.end)
    return whole and step.num_bytes > 0 and (last or step.num_bytes >= min_bytes)


def cut_for_copies(
    output: Output, *, index: int, bounds: Bounds, part_bytes: int
) -> Iterator[tuple[Step, bool]]:
    """The steps of one output and whether the server copies each, in order.

    Uploaded parts have at least the minimum and about ``part_bytes`` at most.
    """
    start = number = 0
    while True:
        end, copied = _next(output, start, bounds, part_bytes)
        step = slice_output(output, index, number, start, end)
        yield (
            step,
            copied and is_copy(step, min_bytes=bounds.min_bytes, last=end == output.num_bytes),
        )
        if end >= output.num_bytes:
            return
        start, number = end, number + 1


def part_groups(output: Output, *, bounds: Bounds, part_bytes: int) -> tuple[PartGroup, ...]:
    """How the parts of an output are grouped; empty where one object takes them all."""
    if output.num_bytes <= bounds.min_bytes * bounds.max_parts:
        return ()
    starts = [
        step.start
        for step, _ in cut_for_copies(output, index=0, bounds=bounds, part_bytes=part_bytes)
    ]
    num_groups = -(-len(starts) // bounds.max_parts)
    if num_groups == 1:
        return ()
    firsts = [len(starts) * k // num_groups for k in range(num_groups)]
    edges = [*(starts[first] for first in firsts), output.num_bytes]
    return tuple(PartGroup(first, edges[k], edges[k + 1]) for k, first in enumerate(firsts))


def copy_shares(num_bytes: int, *, total: int, bounds: Bounds) -> Iterator[tuple[int, int]]:
    """Equal shares of a range of an object of ``total`` bytes, each copied as one part."""
    position = 0
    while position < num_bytes:
        size = _copy_bytes(num_bytes - position, total, bounds)
        yield position, position + size
        position += size


def summarise(steps: Iterable[tuple[Step, bool]], *, num_groups: int = 0) -> PartsSummary:
    """Count the parts of one output; ``num_groups`` is how many groups they form."""
    parts = copied = bytes_copied = bytes_sent = 0
    for step, is_copied in steps:
        parts += 1
        if is_copied:
            copied += 1
            bytes_copied += step.num_bytes
        else:
            bytes_sent += step.num_bytes
    return PartsSummary(parts, copied, bytes_copied, bytes_sent, num_groups)


def _next(output: Output, start: int, bounds: Bounds, part_bytes: int) -> tuple[int, bool]:
    """Where the part that begins at ``start`` ends, and whether it can be copied."""
    i = segment_at(output, start)
    room = _copyable(output, i, start)
    if room >= bounds.min_bytes or (room and start + room == output.num_bytes):
        return start + _copy_bytes(room, output.num_bytes, bounds), True
    return _end_of_upload(output, start, bounds, part_bytes), False


def _copyable(output: Output, i: int, position: int) -> int:
    """Bytes from ``position`` to the end of its segment, where that is one proved range."""
    segment = output.segments[i] if i < len(output.segments) else None
    if not isinstance(segment, Copy) or len(segment.proofs) != 1:
        return 0
    return output.starts[i + 1] - position


def _copy_bytes(room: int, total: int, bounds: Bounds) -> int:
    """One copied part of a range: all of it, or equal shares of what is large.

    Of an object of ``total`` bytes; half of its parts are left to what is not copied.
    """
    limit = min(max(MAX_COPY_BYTES, 2 * total // bounds.max_parts), bounds.max_bytes)
    if room <= limit:
        return room
    num_parts = -(-room // limit)
    return max(bounds.min_bytes, -(-room // num_parts))


def _end_of_upload(output: Output, start: int, bounds: Bounds, part_bytes: int) -> int:
    """The end of an uploaded part: at the minimum, as soon as a range can be copied again."""
    position = start
    i = segment_at(output, start)
    while i < len(output.segments):
        end = output.starts[i + 1]
        least = start + bounds.min_bytes
        reach = max(position, least)
        room = _copyable(output, i, position)
        if room and end - reach >= bounds.min_bytes:
            return reach
        if end - start >= max(part_bytes, bounds.min_bytes):
            return _inside(output, i, start, max(least, start + part_bytes))
        position, i = end, i + 1
    return output.num_bytes


def _inside(output: Output, i: int, start: int, wanted: int) -> int:
    """A cut near ``wanted`` that segment ``i`` allows; its end where it allows none."""
    segment, begin, end = output.segments[i], output.starts[i], output.starts[i + 1]
    if isinstance(segment, Tail) or wanted >= end:
        return end
    if isinstance(segment, Place):
        itemsize = segment.dtype.itemsize
        return min(end, begin + -(-(wanted - begin) // itemsize) * itemsize)
    return wanted
