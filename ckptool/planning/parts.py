"""Cuts outputs into parts, each an independent step that any worker can do. Pure.

A part is a range of one output. Cuts fall anywhere inside literals and copies, at rows (or
elements, where a row is larger than a part) of what is placed by stride, and never inside a
tail. Every part but the last has at least the store's minimum.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptool.errors import OverBudgetError
from ckptool.model import Extent
from ckptool.planning.plan import Copy, Literal, Normal, Output, Place, Segment, Tail

__all__ = [
    "Bounds",
    "Step",
    "choose_part_bytes",
    "cut_output",
    "segment_at",
    "slice_output",
]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a store's parts, in bytes; the last part may be below the minimum."""

    min_bytes: int
    max_bytes: int
    max_parts: int


@dataclass(frozen=True, slots=True)
class Step:
    """One part: bytes ``[start, end)`` of output ``output``, as sliced segments.

    ``sums`` has an element per segment: where in the output the payload begins to whose CRC
    the segment's bytes count, None where no tail needs them.
    """

    output: int
    key: str
    number: int
    start: int
    end: int
    segments: tuple[Segment, ...]
    sums: tuple[int | None, ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def tails(self) -> list[Tail]:
        return [segment for segment in self.segments if isinstance(segment, Tail)]


def choose_part_bytes(num_bytes: int, *, bounds: Bounds, preferred: int) -> int:
    """A part size with which an output of ``num_bytes`` keeps every bound of the store.

    Raises OverBudgetError where none does: the object is larger than the store can hold.
    """
    needed = -(-num_bytes // max(1, bounds.max_parts - bounds.max_parts // 20))
    size = min(max(preferred, bounds.min_bytes, needed), bounds.max_bytes)
    if size * bounds.max_parts < num_bytes:
        raise OverBudgetError(
            f"an object of {num_bytes} bytes needs more than {bounds.max_parts} parts of at most "
            f"{bounds.max_bytes} bytes",
            hint="make smaller files: a larger --to, or --max-file-size",
            num_bytes=num_bytes,
        )
    return size


def cut_output(output: Output, *, index: int, part_bytes: int, min_bytes: int) -> Iterator[Step]:
    """The steps of one output, in order; an empty output has one empty step."""
    start, number = 0, 0
    while True:
        end = _next_cut(output, start, part_bytes=part_bytes, min_bytes=min_bytes)
        yield slice_output(output, index, number, start, end)
        if end >= output.num_bytes:
            return
        start, number = end, number + 1


def _next_cut(output: Output, start: int, *, part_bytes: int, min_bytes: int) -> int:
    wanted = start + part_bytes
    if wanted >= output.num_bytes:
        return output.num_bytes
    i = segment_at(output, wanted)
    segment, begin, end = output.segments[i], output.starts[i], output.starts[i + 1]
    if isinstance(segment, Tail):
        return begin if begin - start >= max(min_bytes, 1) else end
    if isinstance(segment, Place):
        for unit in (segment.row_num_bytes, segment.dtype.itemsize):
            # whole rows of the tensor, so count from its first element, not the segment's
            skipped = segment.first * segment.dtype.itemsize
            cut = begin + max(0, (skipped + wanted - begin) // unit * unit - skipped)
            if cut - start >= max(min_bytes, part_bytes // 2, 1):
                return cut
        itemsize = segment.dtype.itemsize
        return min(end, begin + -(-(wanted - begin) // itemsize) * itemsize)
    return wanted


def segment_at(output: Output, position: int) -> int:
    """The segment that holds the byte at ``position``; empty segments hold none."""
    return bisect.bisect_right(output.starts, position) - 1


def slice_output(output: Output, index: int, number: int, start: int, end: int) -> Step:
    """Bytes ``[start, end)`` of an output as a step."""
    segments: list[Segment] = []
    sums: list[int | None] = []
    i = segment_at(output, start) if output.segments else 0
    while i < len(output.segments) and (output.starts[i] < end or start == end):
        begin = output.starts[i]
        segment = output.segments[i]
        if segment.num_bytes:
            a, b = max(start, begin), min(end, begin + segment.num_bytes)
            segments.append(_narrow(segment, a - begin, b - begin))
            sums.append(_payload_of(output.payloads, a))
        i += 1
    return Step(index, output.key, number, start, end, tuple(segments), tuple(sums))


def _payload_of(payloads: Sequence[tuple[int, int]], position: int) -> int | None:
    i = bisect.bisect_right(payloads, (position, 1 << 63)) - 1
    return payloads[i][0] if i >= 0 and payloads[i][0] <= position < payloads[i][1] else None


def _narrow(segment: Segment, start: int, end: int) -> Segment:
    """Bytes ``[start, end)`` of a segment."""
    if (start, end) == (0, segment.num_bytes):
        return segment
    if isinstance(segment, Literal):
        return Literal(segment.data[start:end])
    if isinstance(segment, Copy):
        return _narrow_copy(segment, start, end)
    if isinstance(segment, Normal):
        return replace(segment, start=segment.start + start, end=segment.start + end)
    if isinstance(segment, Place):
        itemsize = segment.dtype.itemsize
        assert start % itemsize == 0 and end % itemsize == 0
        first = segment.first + start // itemsize
        return replace(segment, first=first, last=segment.first + end // itemsize)
    raise AssertionError("a tail is never cut")


def _narrow_copy(copy: Copy, start: int, end: int) -> Copy:
    extent = Extent(copy.extent.key, copy.extent.start + start, copy.extent.start + end)
    i = bisect.bisect_right(copy.proofs, extent.start, key=lambda proof: proof[1])
    proofs = []
    while i < len(copy.proofs) and copy.proofs[i][0] < extent.end:
        begin, stop, check = copy.proofs[i]
        proofs.append((max(begin, extent.start), min(stop, extent.end), check))
        i += 1
    return Copy(extent, tuple(proofs))
