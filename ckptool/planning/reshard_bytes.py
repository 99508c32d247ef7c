"""The byte plan of a reshard: shard files as segments, and the index that describes them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptool.formats.crc import crc32_combine
from ckptool.formats.dcp_item import ItemFraming, encode_item
from ckptool.layout import shard_file_name
from ckptool.model import Chunk, Extent, Index, Item, TensorEntry, ValueEntry
from ckptool.planning.plan import Check, Copy, Literal, Output, Payload, Plan, Segment, Tail
from ckptool.planning.reshard import NewChunk, ReshardLayout
from ckptool.planning.reshard_index import Placed, PlannedPayload, kept_payload, new_index
from ckptool.planning.sources import Source
from ckptool.planning.tensor_bytes import region_segments

__all__ = ["ItemTail", "ReshardBytes", "ordered_chunks", "plan_bytes"]


@dataclass(frozen=True, slots=True)
class ItemTail:
    """Closes a new item once its payload's CRC-32 is known."""

    framing: ItemFraming

    def __call__(self, crcs: tuple[int, ...]) -> bytes:
        return self.framing.tail(crcs[0])


@dataclass(frozen=True, slots=True)
class ReshardBytes:
    """The plan, and the index of the checkpoint that it makes.

    ``streams``: wrapped items that are kept; to prove them they must be read as a stream.
    ``fresh``: the items that are made anew, those that may be compressed. ``payloads`` has per
    tensor those of its chunks, in the order of the index.
    """

    plan: Plan
    index: Index
    streams: tuple[Payload, ...]
    fresh: frozenset[Item]
    payloads: Mapping[str, Sequence[PlannedPayload]]


def ordered_chunks(index: Index, layout: ReshardLayout) -> list[list[tuple[NewChunk, Item | None]]]:
    """Per target rank its chunks in the order of their first source, so that runs stay runs."""
    ranks: list[list[tuple[NewChunk, Item | None]]] = [[] for _ in range(layout.num_ranks)]
    for chunk in layout.chunks:
        entry = index.entries[chunk.entry]
        assert isinstance(entry, TensorEntry)
        item = entry.chunks.item(chunk.sources[0]) if chunk.sources else None
        ranks[chunk.rank].append((chunk, item))
    for rows in ranks:
        rows.sort(key=_place)
    return ranks


def plan_bytes(
    index: Index,
    layout: ReshardLayout,
    *,
    sources: Mapping[tuple[str, int], Source],
    values: Mapping[str, bytes],
    server_copy: bool = False,
) -> ReshardBytes:
    """Lay out every shard file; ``sources`` by (entry, chunk position), ``values`` as stored.

    With ``server_copy`` runs of whole items are proved as one range, by its CRC-32.
    """
    checks = {source.check.id: source.check for source in sources.values()}
    outputs: list[Output] = []
    placed: dict[str, list[Placed]] = {}
    new_values: dict[str, ValueEntry] = {}
    streams: dict[int, Payload] = {}
    fresh: set[Item] = set()
    for rank, rows in enumerate(ordered_chunks(index, layout)):
        file = _File(shard_file_name(rank, 0), checks if server_copy else None)
        for chunk, _ in rows:
            used = [sources[chunk.entry, i] for i in chunk.sources]
            if chunk.keep:
                item, payload = file.keep(used[0]), kept_payload(used[0])
                if used[0].stored is None:
                    streams[used[0].check.id] = used[0].payload
            else:
                entry = index.entries[chunk.entry]
                assert isinstance(entry, TensorEntry)
                item, payload = file.new(entry, chunk, used)
                fresh.add(item)
            placed.setdefault(chunk.entry, []).append((Chunk(chunk.box, item), payload))
        for key in layout.values if rank == 0 else ():  # last: what ends a file may be small
            value = index.entries[key]
            assert isinstance(value, ValueEntry) and value.item is not None
            new_values[key] = replace(value, item=file.literal(values[key], value.item.transforms))
        if file.segments:
            outputs.append(Output.of(file.name, file.segments))
    new, payloads = new_index(index, placed, new_values)
    return ReshardBytes(
        Plan(tuple(outputs), tuple(checks[i] for i in sorted(checks))),
        new,
        tuple(streams.values()),
        frozenset(fresh),
        payloads,
    )


class _File:
    """One shard file as it is laid out; copies that continue one another become one run.

    With ``checks``, those of a run's payloads are replaced by one of the whole run.
    """

    def __init__(self, name: str, checks: dict[int, Check] | None) -> None:
        self.name = name
        self._checks = checks
        self._segments: list[Segment] = []
        self._run: Extent | None = None
        self._proofs: list[tuple[int, int, int]] = []
        self._crcs: list[tuple[int | None, int]] = []
        self._length = 0

    @property
    def segments(self) -> list[Segment]:
        self._end_run()
        return self._segments

    def literal(self, data: bytes, transforms: tuple[str, ...] = ()) -> Item:
        return self._item([Literal(data)], transforms)

    def keep(self, source: Source) -> Item:
        item = source.payload.item
        proofs: tuple[tuple[int, int, int], ...] = ()
        if source.stored is not None:
            proofs = ((source.stored.start, source.stored.end, source.check.id),)
        copy = Copy(Extent(item.file, item.offset, item.end), proofs)
        kept = self._item([copy], item.transforms)
        self._crcs.append((source.item_crc32, item.length))
        return kept

    def new(
        self, entry: TensorEntry, chunk: NewChunk, sources: Sequence[Source]
    ) -> tuple[Item, PlannedPayload]:
        framing = encode_item(dtype=entry.dtype, shape=chunk.box.sizes)
        begin = self._length + len(framing.head)
        payload = (begin, begin + framing.payload_num_bytes)
        body = region_segments(entry.key, chunk.box, sources, dtype=entry.dtype)
        tail = Tail(
            framing.length - len(framing.head) - framing.payload_num_bytes,
            (payload,),
            ItemTail(framing),
        )
        item = self._item([Literal(framing.head), *body, tail], ())
        num_bytes = framing.payload_num_bytes
        return item, PlannedPayload(len(framing.head), num_bytes, made_at=(self.name, begin))

    def _item(self, segments: Sequence[Segment], transforms: tuple[str, ...]) -> Item:
        start = self._length
        for segment in segments:
            self._length += segment.num_bytes
            self._append(segment)
        return Item(self.name, start, self._length - start, transforms)

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
            crc = self._run_crc(run)
            if self._checks is not None and crc is not None:
                proofs = [(run.start, run.end, self._check_run(run, crc))]
            self._segments.append(Copy(run, tuple(proofs)))
        self._run, self._proofs, self._crcs = None, [], []

    def _run_crc(self, run: Extent) -> int | None:
        """The CRC-32 of a run of whole items; None where one of them has none, or is cut."""
        crc = length = 0
        for item_crc, num_bytes in self._crcs:
            if item_crc is None:
                return None
            crc = crc32_combine(crc, item_crc, num_bytes) if length else item_crc
            length += num_bytes
        return crc if length == run.num_bytes else None

    def _check_run(self, run: Extent, crc: int) -> int:
        """Replace the checks of the run's payloads by one of the run."""
        assert self._checks is not None
        ids = [check for _, _, check in self._proofs]
        replaced = [self._checks.pop(i) for i in ids]
        first = replaced[0]
        self._checks[first.id] = Check(
            first.id,
            run,
            crc,
            first.entry if len(ids) == 1 else f"{first.entry} (and {len(ids) - 1} more)",
            first.box if len(ids) == 1 else None,
            num_payloads=len(ids),
        )
        return first.id


def _place(row: tuple[NewChunk, Item | None]) -> tuple[str, int, str]:
    chunk, item = row
    return ("", 0, chunk.entry) if item is None else (item.file, item.offset, chunk.entry)
