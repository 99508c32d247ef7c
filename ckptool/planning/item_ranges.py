"""An index -> all its items in columns, whoever owns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptool.model import Box, Entry, Index, Item, TensorEntry, ValueEntry

__all__ = ["ItemRanges", "item_ranges"]

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ItemRanges:
    """Where each stored item lies; one row an item.

    ``owner`` counts ``entries``; ``row`` is the chunk's row in its tensor, -1 for a value;
    ``file`` indexes ``files``, which are those that the index names.
    """

    entries: tuple[Entry, ...]
    files: tuple[str, ...]
    owner: Ints
    row: Ints
    file: Ints
    start: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.owner)

    def whose(self, i: int) -> tuple[str, Box | None]:
        """The key of item ``i``, and its box where it is a tensor's."""
        entry = self.entries[int(self.owner[i])]
        if isinstance(entry, ValueEntry):
            return entry.key, None
        return entry.key, entry.chunks[int(self.row[i])].box

    def item(self, i: int) -> Item:
        entry = self.entries[int(self.owner[i])]
        item = entry.item if isinstance(entry, ValueEntry) else entry.chunks.item(int(self.row[i]))
        assert item is not None
        return item


def item_ranges(index: Index) -> ItemRanges:
    """The stored items of an index, tensors' first."""
    entries = tuple(index.entries.values())
    names: dict[str, int] = {}
    tables: dict[int, Ints] = {}
    columns: list[Ints] = []
    for owner, entry in enumerate(entries):
        if isinstance(entry, TensorEntry):
            columns.append(_tensor_rows(owner, entry, names, tables))
    values = [
        (owner, -1, names.setdefault(e.item.file, len(names)), e.item.offset, e.item.length)
        for owner, e in enumerate(entries)
        if isinstance(e, ValueEntry) and e.item is not None
    ]
    columns.append(np.array(values, np.int64).reshape(-1, 5).T)
    owner_, row, file, start, length = np.concatenate(columns, axis=1)
    return ItemRanges(entries, tuple(names), owner_, row, file, start, length)


def _tensor_rows(
    owner: int, entry: TensorEntry, names: dict[str, int], tables: dict[int, Ints]
) -> Ints:
    """Owner, row, file, start and length of a tensor's stored chunks, ``[5, n]``."""
    chunks = entry.chunks
    table = tables.get(id(chunks.files))
    if table is None:
        table = np.array([names.setdefault(f, len(names)) for f in chunks.files], np.int64)
        tables[id(chunks.files)] = table
    rows = np.flatnonzero(chunks.file >= 0)
    file = table[chunks.file[rows]]
    owners = np.full(len(rows), owner, np.int64)
    return np.stack((owners, rows, file, chunks.starts[rows], chunks.lengths[rows]))
