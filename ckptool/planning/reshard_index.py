"""The index of a resharded checkpoint: where every item stands, and its payload's CRC-32. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckptool.formats.payloads import Payloads
from ckptool.layout import shard_file_name
from ckptool.model import Chunk, Chunks, Entry, Index, Ints, Item, TensorEntry, ValueEntry
from ckptool.planning.new_chunks import NewChunks
from ckptool.planning.plan import PayloadCrcs
from ckptool.planning.sources import Sources

__all__ = [
    "NewItems",
    "PlannedPayloads",
    "items_by_file",
    "moved",
    "payload_columns",
    "planned_payloads",
    "tensor_entry",
]


@dataclass(frozen=True, slots=True, eq=False)
class NewItems:
    """Where the items of one tensor's new chunks stand, int64 ``[n]`` each.

    ``start`` and ``length`` are those in the rank's file; ``head`` is how many bytes of an item
    that is made anew stand before its payload, -1 for one that is kept. ``source`` is the
    position of the first source, -1 where there is none.
    """

    start: Ints
    length: Ints
    head: Ints
    source: Ints


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPayloads:
    """The payloads of one tensor's new chunks, int64 ``[n]`` each, -1 where it is not known.

    ``offsets`` count from the item's start. ``made_at`` is the byte of the rank's file where a
    payload begins whose CRC-32 the run makes, -1 for one that is kept.
    """

    offsets: Ints
    num_bytes: Ints
    crc32s: Ints
    rank: Ints
    made_at: Ints


def tensor_entry(
    old: TensorEntry, new: NewChunks, items: NewItems, *, files: Sequence[str]
) -> tuple[TensorEntry, Ints]:
    """A tensor with its new chunks in the order of their boxes, and that order.

    ``files`` are those of the ranks; all tensors may share them.
    """
    boxes = np.concatenate((new.offsets, new.sizes), axis=1)
    order = np.lexsort(boxes.T[::-1]) if boxes.shape[1] else np.arange(len(new))
    transform, transforms = _transforms(old.chunks, new)
    chunks = Chunks(
        offsets=new.offsets[order],
        sizes=new.sizes[order],
        file=new.rank[order],
        starts=items.start[order],
        lengths=items.length[order],
        files=files,
        transform=None if transform is None else transform[order],
        transforms=transforms,
    )
    return replace(old, chunks=chunks), order


def planned_payloads(
    new: NewChunks, items: NewItems, sources: Sources, *, order: Ints
) -> PlannedPayloads:
    """The payloads of a tensor's new chunks, in an order.

    Of an item that is copied as it is nothing is known where its bytes are not the chunk's.
    """
    is_kept = items.head < 0
    offsets, num_bytes = items.head.copy(), new.num_bytes.copy()
    crc32s = np.full(len(new), -1, np.int64)
    kept = items.source[is_kept]
    stored, end = sources.stored_start[kept], sources.stored_end[kept]
    plain = (stored >= 0) & (stored == sources.start[kept])
    plain &= end - stored == num_bytes[is_kept]
    offsets[is_kept] = np.where(plain, stored - sources.chunks.start[kept], -1)
    num_bytes[is_kept] = np.where(plain, num_bytes[is_kept], -1)
    crc32s[is_kept] = np.where(plain, sources.crc32[kept], -1)
    made_at = np.where(is_kept, -1, items.start + items.head)
    columns = (column[order] for column in (offsets, num_bytes, crc32s, new.rank, made_at))
    return PlannedPayloads(*columns)


def payload_columns(
    planned: Mapping[str, PlannedPayloads],
    made: Mapping[str, PayloadCrcs],
    *,
    is_compressed: bool,
) -> dict[str, Payloads]:
    """Payloads as ``ckpt.index`` keeps them; ``made`` has the CRC-32s of each file's new ones.

    ``is_compressed``: new items are wrapped, so that nobody finds a payload in them.
    """
    if is_compressed:
        return {key: _without_made(rows) for key, rows in planned.items()}
    find = _Finder(planned.values(), made)
    return {key: _with_made(rows, find) for key, rows in planned.items()}


class _Finder:
    """Finds CRC-32s by rank and byte, of all files in one sorted column."""

    def __init__(self, planned: Iterable[PlannedPayloads], made: Mapping[str, PayloadCrcs]) -> None:
        rows = [rows for rows in planned if len(rows.rank)]
        last = max((int(row.rank.max()) for row in rows), default=-1)
        names = [shard_file_name(rank, 0) for rank in range(last + 1)]
        files = [made.get(name, PayloadCrcs((), ())) for name in names]
        none = np.zeros(0, np.int64)
        starts = [np.array(file.starts, np.int64) for file in files]
        ends = [column.max(initial=0) for column in (*starts, *(row.made_at for row in rows))]
        self._stride = 1 + max(map(int, ends), default=0)
        self._places = np.concatenate([none, *(self._place(r, at) for r, at in enumerate(starts))])
        self._crc32s = np.concatenate([none, *(np.array(f.crc32s, np.int64) for f in files)])

    def crc32s(self, rank: Ints, start: Ints) -> Ints:
        """Those of the payloads that begin there, -1 where none does."""
        if not len(self._places):
            return np.full(len(rank), -1, np.int64)
        wanted = self._place(rank, start)
        at = np.minimum(np.searchsorted(self._places, wanted), len(self._places) - 1)
        return np.where(self._places[at] == wanted, self._crc32s[at], -1)

    def _place(self, rank: Ints | int, start: Ints) -> Ints:
        return rank * self._stride + start


def _with_made(rows: PlannedPayloads, find: _Finder) -> Payloads:
    crc32s, is_made = rows.crc32s.copy(), rows.made_at >= 0
    crc32s[is_made] = find.crc32s(rows.rank[is_made], rows.made_at[is_made])
    return _payloads(rows.offsets, rows.num_bytes, crc32s)


def _without_made(rows: PlannedPayloads) -> Payloads:
    hidden = rows.made_at >= 0
    return _payloads(
        np.where(hidden, -1, rows.offsets), np.where(hidden, -1, rows.num_bytes), rows.crc32s
    )


def _payloads(offsets: Ints, num_bytes: Ints, crc32s: Ints) -> Payloads:
    no_blocks = np.zeros(len(offsets) + 1, np.int64)
    return Payloads(offsets, num_bytes, crc32s, no_blocks, np.zeros(0, np.int64))


def _transforms(
    old: Chunks, new: NewChunks
) -> tuple[npt.NDArray[np.int64] | None, Sequence[tuple[str, ...]]]:
    """What wraps the new chunks: a kept item is wrapped as it was, a new one in nothing."""
    if old.transform is None or not new.keep.any():
        return None, ((),)
    plain = len(old.transforms)
    column = np.full(len(new), plain, np.int64)
    column[new.keep] = old.transform[new.kept_sources()]
    return column, (*old.transforms, ())


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
