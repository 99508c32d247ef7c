"""The index of a resharded checkpoint: where every item stands, and its payload's CRC-32. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ckptool.formats.payloads import Payload, Payloads
from ckptool.model import Chunk, Chunks, Entry, Index, Item, ValueEntry
from ckptool.planning.sources import Source

__all__ = [
    "Placed",
    "PlannedPayload",
    "items_by_file",
    "kept_payload",
    "moved",
    "new_index",
    "payload_columns",
]


@dataclass(frozen=True, slots=True)
class PlannedPayload:
    """Where a new chunk's payload stands in its item; None where its item does not say.

    ``made_at`` is the output and the byte where a payload begins whose CRC-32 the run makes.
    """

    offset: int | None = None
    num_bytes: int | None = None
    crc32: int | None = None
    made_at: tuple[str, int] | None = None


Placed: TypeAlias = "tuple[Chunk, PlannedPayload]"


def kept_payload(source: Source) -> PlannedPayload:
    """That of an item that is copied as it is; unknown where its bytes are not the chunk's."""
    stored, payload = source.stored, source.payload
    if stored is None or stored.start != payload.start or stored.num_bytes != payload.num_bytes:
        return PlannedPayload()
    offset = stored.start - payload.item.offset
    return PlannedPayload(offset, stored.num_bytes, source.check.crc32)


def new_index(
    old: Index, placed: Mapping[str, Sequence[Placed]], values: Mapping[str, ValueEntry]
) -> tuple[Index, dict[str, list[PlannedPayload]]]:
    """The index of what is planned, chunks in the order of their boxes, and their payloads."""
    entries: dict[str, Entry] = {}
    payloads: dict[str, list[PlannedPayload]] = {}
    for key, entry in old.entries.items():
        if isinstance(entry, ValueEntry):
            entries[key] = values[key]
            continue
        rows = sorted(placed[key], key=lambda row: (row[0].box.offsets, row[0].box.sizes))
        columns = Chunks.of([chunk for chunk, _ in rows], num_dims=len(entry.shape))
        entries[key] = replace(entry, chunks=columns)
        payloads[key] = [payload for _, payload in rows]
    return Index(entries, version=old.version), payloads


def payload_columns(
    planned: Mapping[str, Sequence[PlannedPayload]],
    made: Mapping[tuple[str, int], int],
    *,
    is_compressed: bool,
) -> dict[str, Payloads]:
    """Payloads as ``ckpt.index`` keeps them; ``made`` has the CRC-32s by where they begin.

    ``is_compressed``: new items are wrapped, so that nobody finds a payload in them.
    """
    return {
        key: Payloads.of(_known(row, made, is_compressed) for row in rows)
        for key, rows in planned.items()
    }


def _known(
    row: PlannedPayload, made: Mapping[tuple[str, int], int], is_compressed: bool
) -> Payload:
    if row.made_at is None:
        return Payload(row.offset, row.num_bytes, row.crc32)
    if is_compressed:
        return Payload(None, None)
    return Payload(row.offset, row.num_bytes, made.get(row.made_at))


def items_by_file(index: Index) -> dict[str, list[Item]]:
    """All items of an index, by file and in the order of their bytes."""
    files: dict[str, list[Item]] = {}
    for entry in index.entries.values():
        items = [entry.item] if isinstance(entry, ValueEntry) else [c.item for c in entry.chunks]
        for item in items:
            if item is not None:
                files.setdefault(item.file, []).append(item)
    return {file: sorted(items, key=lambda item: item.offset) for file, items in files.items()}


def moved(index: Index, placed: Mapping[Item, Item]) -> Index:
    """The index with every item where it ended up."""
    entries: dict[str, Entry] = {}
    for key, entry in index.entries.items():
        if isinstance(entry, ValueEntry):
            assert entry.item is not None
            entries[key] = replace(entry, item=placed[entry.item])
        else:
            chunks = [
                Chunk(chunk.box, placed[chunk.item])
                for chunk in entry.chunks
                if chunk.item is not None
            ]
            entries[key] = replace(entry, chunks=Chunks.of(chunks, num_dims=len(entry.shape)))
    return replace(index, entries=entries)
