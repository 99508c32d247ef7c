"""The source chunks that a plan uses, in columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptool.model import Box, Chunks, Ints, Item, TensorEntry

__all__ = ["ChunkRows", "Wanted", "ranks_of", "without_replicas"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk whose payload a plan needs; ``whole``: the item is copied with its framing."""

    entry: TensorEntry
    box: Box
    item: Item
    whole: bool


class ChunkRows:
    """Chunk ``row[i]`` of ``entries[owner[i]]``, entry by entry; ``[n]`` each.

    Its item has ``length[i]`` bytes from ``start[i]`` of ``files[file[i]]``; ``whole`` says whether
    it is copied with its framing. The chunks of entry k begin at ``firsts[k]`` and end at the next.
    """

    def __init__(self, chosen: Sequence[tuple[TensorEntry, Ints, npt.NDArray[np.bool_]]]) -> None:
        """``chosen``: entries, their rows, and which of those are copied whole."""
        self.entries = [entry for entry, _, _ in chosen]
        counts = [len(rows) for _, rows, _ in chosen]
        names: dict[str, int] = {}
        none = np.zeros(0, np.int64)
        self.owner = np.repeat(np.arange(len(chosen), dtype=np.int32), counts)
        self.row = np.concatenate([none, *(rows for _, rows, _ in chosen)])
        self.whole = np.concatenate([none.astype(bool), *(whole for _, _, whole in chosen)])
        self.file = np.concatenate(
            [none, *(_files(entry.chunks, rows, names) for entry, rows, _ in chosen)]
        )
        self.start = np.concatenate([none, *(e.chunks.starts[rows] for e, rows, _ in chosen)])
        self.length = np.concatenate([none, *(e.chunks.lengths[rows] for e, rows, _ in chosen)])
        self.files = tuple(names)
        self.firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, index: int) -> Wanted:
        entry = self.entries[int(self.owner[index])]
        chunk = entry.chunks[int(self.row[index])]
        assert chunk.item is not None, "the structure was checked"
        return Wanted(entry, chunk.box, chunk.item, bool(self.whole[index]))

    def by_place(self) -> Ints:
        """The positions in the order of files, by name, and of the bytes in them."""
        return np.lexsort((self.start, ranks_of(self.files)[self.file]))


def ranks_of(names: Sequence[str]) -> Ints:
    """The number that each name has in their order."""
    ranks = np.empty(len(names), np.int64)
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return ranks


def without_replicas(chunks: Chunks) -> Ints:
    """The positions of chunks by place; of equal boxes the first one."""
    if len(chunks) < 2 or not chunks.offsets.shape[1]:
        return np.arange(min(1, len(chunks)))
    if (np.diff(chunks.offsets[:, 0]) > 0).all():
        return np.arange(len(chunks))
    boxes = np.concatenate((chunks.offsets, chunks.sizes), axis=1)
    order = np.lexsort(boxes.T[::-1])
    ordered = boxes[order]
    is_new = np.concatenate(([True], (ordered[1:] != ordered[:-1]).any(axis=1)))
    return order[is_new]


def _files(chunks: Chunks, rows: Ints, names: dict[str, int]) -> Ints:
    """Of each row the number of its file in ``names``, which grows."""
    used, inverse = np.unique(chunks.file[rows], return_inverse=True)
    assert not len(used) or used[0] >= 0, "the structure was checked"
    numbers = [names.setdefault(chunks.files[i], len(names)) for i in used.tolist()]
    return np.array(numbers, np.int64)[inverse.reshape(-1)]
