"""Cuts an output of a store that copies on its side: what it can copy never comes to us. Pure.

A part that is one range of a source object is copied by the server. Every part but the last
needs the store's minimum, so what lies between two copied ranges (framing, small tensors, new
heads and tails) rides in a part of the minimum that we upload, filled up from the next range.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.planning.parts import Bounds, Step, needed_payloads, segment_at, slice_output
from ckptool.planning.plan import Copy, Output, Place, Tail

__all__ = ["MAX_COPY_BYTES", "cut_for_copies", "is_copy"]

MAX_COPY_BYTES = 512 << 20  # large enough to cost few requests, small enough to run side by side


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
    needed = needed_payloads(output)
    start = number = 0
    while True:
        end, copied = _next(output, start, bounds, part_bytes)
        step = slice_output(output, index, number, start, end, needed)
        yield (
            step,
            copied and is_copy(step, min_bytes=bounds.min_bytes, last=end == output.num_bytes),
        )
        if end >= output.num_bytes:
            return
        start, number = end, number + 1


def _next(output: Output, start: int, bounds: Bounds, part_bytes: int) -> tuple[int, bool]:
    """Where the part that begins at ``start`` ends, and whether it can be copied."""
    i = segment_at(output, start)
    room = _copyable(output, i, start)
    if room >= bounds.min_bytes or (room and start + room == output.num_bytes):
        return start + _copy_bytes(room, bounds), True
    return _end_of_upload(output, start, bounds, part_bytes), False


def _copyable(output: Output, i: int, position: int) -> int:
    """Bytes from ``position`` to the end of its segment, where that is one proved range."""
    segment = output.segments[i] if i < len(output.segments) else None
    if not isinstance(segment, Copy) or len(segment.proofs) != 1:
        return 0
    return output.starts[i + 1] - position


def _copy_bytes(room: int, bounds: Bounds) -> int:
    """One copied part of a range: all of it, or equal shares of what is large."""
    limit = min(MAX_COPY_BYTES, bounds.max_bytes)
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
