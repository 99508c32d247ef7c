"""A part of a shard file as it is laid out: items one after another -> segments. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptool.formats.crc import crc32_combine
from ckptool.formats.dcp_item import ItemFraming, encode_item
from ckptool.model import Extent, TensorEntry
from ckptool.planning.new_chunks import NewChunk
from ckptool.planning.plan import Copy, Literal, Segment, Tail
from ckptool.planning.sources import Source
from ckptool.planning.tensor_bytes import region_segments

__all__ = ["ItemTail", "KeptItem", "PlacedItem", "Run", "ShardBlock"]


class KeptItem(NamedTuple):
    """An item that is copied as it is, from where it stands in its file.

    ``stored_start`` and ``stored_end`` are those of its payload in the file, -1 where it is
    wrapped; ``crc32`` that of the whole item, -1 where it is not known; ``check`` proves it.
    """

    file: str
    start: int
    length: int
    stored_start: int
    stored_end: int
    crc32: int
    check: int


class PlacedItem(NamedTuple):
    """Where an item stands in its new file; ``head`` bytes of a new one stand before its payload.

    ``head`` is -1 for one that is not made anew.
    """

    start: int
    length: int
    head: int


@dataclass(frozen=True, slots=True)
class Run:
    """Kept items that follow one another in their file, proved as one range by its CRC-32."""

    extent: Extent
    crc32: int
    checks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemTail:
    """Closes a new item once its payload's CRC-32 is known."""

    framing: ItemFraming

    def __call__(self, crcs: tuple[int, ...]) -> bytes:
        return self.framing.tail(crcs[0])


class ShardBlock:
    """Items of one shard file, from byte ``start`` of it; copies that continue one another join.

    With ``joins_checks``, those of a run's payloads give way to one of the whole run: the first
    one's, noted in ``runs``.
    """

    def __init__(self, start: int, *, joins_checks: bool) -> None:
        self.end = start
        self.items: list[PlacedItem] = []
        self.runs: list[Run] = []
        self._joins_checks = joins_checks
        self._segments: list[Segment] = []
        self._run: Extent | None = None
        self._proofs: list[tuple[int, int, int]] = []
        self._crcs: list[tuple[int, int]] = []

    @property
    def segments(self) -> Sequence[Segment]:
        self._end_run()
        return self._segments

    def literal(self, data: bytes) -> None:
        """An item whose bytes are known."""
        self._item([Literal(data)])

    def keep(self, item: KeptItem) -> None:
        """An item that is copied as it is."""
        extent = Extent(item.file, item.start, item.start + item.length)
        proofs: tuple[tuple[int, int, int], ...] = ()
        if item.stored_start >= 0:
            proofs = ((item.stored_start, item.stored_end, item.check),)
        self._item([Copy(extent, proofs)])
        self._crcs.append((item.crc32, item.length))

    def new(self, entry: TensorEntry, chunk: NewChunk, sources: Sequence[Source]) -> None:
        """An item that is made anew, its payload filled from the sources."""
        framing = encode_item(dtype=entry.dtype, shape=chunk.box.sizes)
        begin = self.end + len(framing.head)
        payload = (begin, begin + framing.payload_num_bytes)
        body = region_segments(entry.key, chunk.box, sources, dtype=entry.dtype)
        tail = Tail(
            framing.length - len(framing.head) - framing.payload_num_bytes,
            (payload,),
            ItemTail(framing),
        )
        self._item([Literal(framing.head), *body, tail], head=len(framing.head))

    def _item(self, segments: Sequence[Segment], *, head: int = -1) -> None:
        start = self.end
        for segment in segments:
            self.end += segment.num_bytes
            self._append(segment)
        self.items.append(PlacedItem(start, self.end - start, head))

    def _append(self, segment: Segment) -> None:
        run = self._run
        if not isinstance(segment, Copy):
            self._end_run()
            if segment.num_bytes:
                self._segments.append(segment)
        elif run is not None and (run.key, run.end) == (segment.extent.key, segment.extent.start):
            self._run = Extent(run.key, run.start, segment.extent.end)
            self._proofs += segment.proofs
        else:
            self._end_run()
            self._run, self._proofs = segment.extent, list(segment.proofs)

    def _end_run(self) -> None:
        run, proofs = self._run, self._proofs
        if run is not None and run.num_bytes:
            crc = self._run_crc(run) if self._joins_checks else None
            if crc is not None:
                checks = tuple(check for _, _, check in proofs)
                self.runs.append(Run(run, crc, checks))
                proofs = [(run.start, run.end, checks[0])]
            self._segments.append(Copy(run, tuple(proofs)))
        self._run, self._proofs, self._crcs = None, [], []

    def _run_crc(self, run: Extent) -> int | None:
        """The CRC-32 of a run of whole items; None where one of them has none, or is cut."""
        crc = length = 0
        for item_crc, num_bytes in self._crcs:
            if item_crc < 0:
                return None
            crc = crc32_combine(crc, item_crc, num_bytes) if length else item_crc
            length += num_bytes
        return crc if length == run.num_bytes else None
