"""The byte plan: output files as segments, each of which says where its bytes come from.

A plan is made of frozen, picklable values and knows no URL option, no secret and no clock, so
the same plan runs on threads, on processes or on other machines. Lengths are fixed before the
first payload is read: an output can be written in order, or in parts in any order.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ckptool.dtypes import DType
from ckptool.model import Box, Extent, Item
from ckptool.planning.made import ByteRanges, InBlocks

__all__ = [
    "Check",
    "Copy",
    "Literal",
    "Normal",
    "Output",
    "Payload",
    "PayloadCrcs",
    "Place",
    "Plan",
    "Segment",
    "Tail",
    "TailEncoder",
]


@dataclass(frozen=True, slots=True)
class Check:
    """One source payload that must be proved before the result is committed.

    ``extent`` is the payload in its shard file; ``crc32`` what the item says it is, None where
    the item cannot tell (unverifiable). ``by_normaliser``: the payload is proved as a whole
    while it is made normal. ``entry`` and ``box`` name it in messages; ``num_payloads`` is how
    many payloads a run of whole items holds.
    """

    id: int
    extent: Extent
    crc32: int | None
    entry: str
    box: Box | None
    by_normaliser: bool = False
    num_payloads: int = 1


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of one source chunk, C-contiguous and of ``dtype``, ``sizes`` long per dim.

    ``check`` is the id of the Check that proves them. ``start`` is where they begin in
    ``item.file``; None when the item has to be made normal first (compressed, transposed,
    part of a larger storage, conjugated).
    """

    item: Item
    dtype: DType
    box: Box
    start: int | None
    check: int
    entry: str

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize

    def extent(self, start: int, end: int) -> Extent:
        """Bytes ``[start, end)`` of the payload as bytes of its file; only for a plain one."""
        assert self.start is not None
        return Extent(self.item.file, self.start + start, self.start + end)


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that the plan knows."""

    data: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of a source object that land as they are.

    ``proofs`` lists the parts of the extent that are payload: (start, end, check id), in
    offsets of the object, in order.
    """

    extent: Extent
    proofs: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.extent.num_bytes


@dataclass(frozen=True, slots=True)
class Normal:
    """Bytes ``[start, end)`` of a payload that is made normal first."""

    payload: Payload
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Place:
    """Elements ``[first, last)`` of a row-major tensor, placed from pieces by stride, or cast.

    ``origin`` is where the tensor region of ``shape`` begins in the logical tensor, in whose
    coordinates the payloads' boxes stand.
    """

    entry: str
    dtype: DType
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    pieces: tuple[Payload, ...]
    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        return (self.last - self.first) * self.dtype.itemsize

    @property
    def row_num_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class TailEncoder(Protocol):
    """Turns the CRC-32s of output payloads into bytes; picklable."""

    def __call__(self, crcs: tuple[int, ...]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Tail:
    """Bytes that need the CRC-32s of payloads standing before them in the same output.

    ``payloads`` are (start inclusive, end exclusive) in the output.
    """

    num_bytes: int
    payloads: tuple[tuple[int, int], ...]
    encode: TailEncoder


Segment: TypeAlias = "Literal | Copy | Normal | Place | Tail"


@dataclass(frozen=True, slots=True)
class Output:
    """One object to write: its key below the destination and its segments in order.

    ``starts`` are where the segments begin, and as one more the length. ``payloads`` are the
    ranges whose CRC-32s its tails need, sorted, none of them empty.
    """

    key: str
    segments: Sequence[Segment]
    starts: Sequence[int] = field(repr=False)
    payloads: Sequence[tuple[int, int]] = field(repr=False)

    @classmethod
    def of(cls, key: str, segments: Sequence[Segment]) -> Output:
        """One whose segments are kept."""
        kept = tuple(segments)
        starts, _, payloads = _edges([kept])
        return cls(key, kept, starts, payloads)

    @classmethod
    def in_blocks(
        cls,
        key: str,
        blocks: Iterable[Sequence[Segment]],
        *,
        again: Callable[[int, int], Sequence[Segment]],
    ) -> Output:
        """One of too many segments to keep: they are made anew, a block at a time, when needed.

        ``again`` gives a block from its number and the byte where it begins.
        """
        starts, counts, payloads = _edges(blocks)
        begins = array("q", (starts[i] for i in itertools.accumulate(counts, initial=0)))
        return cls(key, InBlocks(counts, _Again(again, begins)), starts, payloads)

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]


@dataclass(frozen=True, slots=True)
class PayloadCrcs:
    """CRC-32s of an output's ``payloads``, by where they begin, in that order."""

    starts: Sequence[int]
    crc32s: Sequence[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """All outputs of one operation, and what must be proved before they are committed.

    ``checks`` stand in the order of their ids.
    """

    outputs: tuple[Output, ...]
    checks: Sequence[Check]

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)


@dataclass(frozen=True, slots=True)
class _Again:
    """Makes a block from its number."""

    make: Callable[[int, int], Sequence[Segment]]
    begins: Sequence[int]

    def __call__(self, number: int) -> Sequence[Segment]:
        return self.make(number, self.begins[number])


def _edges(
    blocks: Iterable[Sequence[Segment]],
) -> tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]]:
    """Where segments begin and the last one ends, how many a block has, and ``payloads``."""
    starts, counts = array("q", [0]), array("q")
    needed: list[ByteRanges] = []
    for block in blocks:
        counts.append(len(block))
        for segment in block:
            starts.append(starts[-1] + segment.num_bytes)
        needed.append(ByteRanges(r for s in block if isinstance(s, Tail) for r in s.payloads))
    return starts, counts, ByteRanges(itertools.chain.from_iterable(needed))
