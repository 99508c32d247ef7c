"""The shard files of a new layout, laid out in blocks whenever they are needed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ckptool.model import Index, Ints, TensorEntry
from ckptool.planning.chunk_rows import ranks_of
from ckptool.planning.made import Recent
from ckptool.planning.plan import Segment
from ckptool.planning.reshard import ReshardLayout
from ckptool.planning.shard_block import KeptItem, ShardBlock
from ckptool.planning.sources import Sources

__all__ = ["ShardFiles"]

BLOCK_CHUNKS = 4096


class ShardFiles:
    """The files of all ranks, each in blocks of chunks that are the same every time.

    New chunks are counted tensor by tensor, those of tensor i from ``firsts[i]``.
    ``first_source`` has the position of each one's first source, -1 where it has none. A rank
    writes its chunks in the order of their first sources, so that runs stay runs.
    """

    def __init__(
        self,
        index: Index,
        layout: ReshardLayout,
        sources: Sources,
        values: Mapping[str, bytes],
        *,
        joins_checks: bool,
    ) -> None:
        self._index, self._layout, self._sources = index, layout, sources
        self._values, self._joins_checks = values, joins_checks
        counts = [len(tensor) for tensor in layout.tensors]
        none = np.zeros(0, np.int64)
        self.firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self._keep = np.concatenate([none.astype(bool), *(t.keep for t in layout.tensors)])
        self._positions = [self._positions_of(i) for i in range(len(counts))]
        self.first_source = np.concatenate([none, *map(self._first_sources, range(len(counts)))])
        rank = np.concatenate([none, *(tensor.rank for tensor in layout.tensors)])
        self._order = self._ordered(rank)
        self._ends = np.searchsorted(rank[self._order], np.arange(layout.num_ranks), side="right")
        self.segments = Recent(self._segments)  # of a rank, a block of it, and where that begins

    @property
    def num_chunks(self) -> int:
        return len(self._order)

    def num_blocks(self, rank: int) -> int:
        """How many blocks a rank's file has; values stand in one of their own, behind all."""
        first, last = self._bounds(rank)
        return -(-(last - first) // BLOCK_CHUNKS) + (1 if rank == 0 and self._values else 0)

    def chunks(self, rank: int, number: int) -> Ints:
        """The new chunks of a block, in their order; none in the block of values."""
        first, last = self._bounds(rank)
        first += number * BLOCK_CHUNKS
        return self._order[first : max(first, min(last, first + BLOCK_CHUNKS))]

    def block(self, rank: int, number: int, start: int) -> ShardBlock:
        """Block ``number`` of a rank's file, which begins at byte ``start`` of it."""
        block = ShardBlock(start, joins_checks=self._joins_checks)
        chunks = self.chunks(rank, number)
        if not len(chunks):
            for key in self._layout.values:  # last: what ends a file may be small
                block.literal(self._values[key])
            return block
        keep = self._keep[chunks]
        kept = iter(self._kept_items(self.first_source[chunks[keep]]))
        rows = zip(chunks.tolist(), self._owner[chunks].tolist(), keep.tolist(), strict=True)
        for position, tensor, is_kept in rows:
            if is_kept:
                block.keep(next(kept))
            else:
                self._make(block, tensor, position - int(self.firsts[tensor]))
        return block

    def _segments(self, rank: int, number: int, start: int) -> Sequence[Segment]:
        return self.block(rank, number, start).segments

    def _make(self, block: ShardBlock, tensor: int, number: int) -> None:
        new = self._layout.tensors[tensor]
        entry = self._index.entries[new.entry]
        assert isinstance(entry, TensorEntry)
        first, last = new.source_starts[number], new.source_starts[number + 1]
        used = [self._sources[i] for i in self._positions[tensor][first:last].tolist()]
        block.new(entry, new[number], used)

    def _kept_items(self, at: Ints) -> list[KeptItem]:
        rows, sources = self._sources.chunks, self._sources
        columns = (
            rows.start[at],
            rows.length[at],
            sources.stored_start[at],
            sources.stored_end[at],
            sources.item_crc32[at],
            at,
        )
        files = (rows.files[i] for i in rows.file[at].tolist())
        return [KeptItem(*row) for row in zip(files, *(c.tolist() for c in columns), strict=True)]

    def _bounds(self, rank: int) -> tuple[int, int]:
        return int(self._ends[rank - 1]) if rank else 0, int(self._ends[rank])

    def _positions_of(self, tensor: int) -> Ints:
        """The positions among the sources of all that a tensor's new chunks are made of."""
        chunks = self._sources.chunks
        first, last = int(chunks.firsts[tensor]), int(chunks.firsts[tensor + 1])
        found = np.searchsorted(chunks.row[first:last], self._layout.tensors[tensor].sources)
        return first + found

    def _first_sources(self, tensor: int) -> Ints:
        new, positions = self._layout.tensors[tensor], self._positions[tensor]
        if not len(positions):
            return np.full(len(new), -1, np.int64)
        first = new.source_starts[:-1]
        has_any = new.source_starts[1:] > first
        return np.where(has_any, positions[np.minimum(first, len(positions) - 1)], -1)

    def _ordered(self, rank: Ints) -> Ints:
        """By rank, and there by the place of the first source; those without one come first."""
        name_ranks = ranks_of([tensor.entry for tensor in self._layout.tensors])
        place = np.full(len(rank), -1, np.int64)
        has_source = self.first_source >= 0
        by_place = self._sources.chunks.by_place()
        place_ranks = np.empty(len(by_place), np.int64)
        place_ranks[by_place] = np.arange(len(by_place))
        place[has_source] = place_ranks[self.first_source[has_source]]
        return np.lexsort((name_ranks[self._owner], place, rank))
