"""The layout plan of a reshard: which rank gets which box of every tensor, kept or cut. Pure.

It comes from the index alone. Target rank r owns rows by torch.chunk on dim 0. A source chunk
whose rows lie in one target keeps its item; one that a boundary cuts becomes pieces, each a
new item. ``merge`` gives every tensor one chunk per target instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptool.formats.safetensors_shards import PAYLOAD
from ckptool.model import Box, Chunk, Index, TensorEntry
from ckptool.planning.boxes import chunk_rows, intersect

__all__ = ["NewChunk", "ReshardLayout", "plan_layout", "rank_bound_keys"]

_RANK_KEY = re.compile(r"(^|[._])(rng|rank)[._]?\d+([._]|$)|(^|\.)rng\.\d+\.")


@dataclass(frozen=True, slots=True)
class NewChunk:
    """One chunk of the new checkpoint, made of source chunks given by their position.

    ``keep``: the one source item is copied as it is. Otherwise the box is filled from the
    sources, a new item.
    """

    entry: str
    box: Box
    rank: int
    sources: tuple[int, ...]
    keep: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReshardLayout:
    """Where everything goes; ``values`` are stored by rank 0, verbatim."""

    num_ranks: int
    chunks: tuple[NewChunk, ...]
    values: tuple[str, ...]
    rank_bound: tuple[str, ...] = field(default=())

    @property
    def num_kept(self) -> int:
        return sum(chunk.keep for chunk in self.chunks)

    def rank_num_bytes(self) -> list[int]:
        """Tensor bytes that each target rank gets."""
        totals = [0] * self.num_ranks
        for chunk in self.chunks:
            totals[chunk.rank] += chunk.num_bytes
        return totals

    def to_json(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "num_chunks": len(self.chunks),
            "num_items_kept": self.num_kept,
            "num_items_new": len(self.chunks) - self.num_kept,
            "num_values": len(self.values),
            "rank_num_bytes": self.rank_num_bytes(),
            "rank_bound_keys": list(self.rank_bound),
        }


def plan_layout(index: Index, *, num_ranks: int, merge: bool) -> ReshardLayout:
    """Lay a checkpoint out for ``num_ranks``; expects an index whose structure is sound."""
    chunks: list[NewChunk] = []
    loads = [0] * num_ranks
    spread: list[TensorEntry] = []
    for entry in index.tensors:
        if _is_spread(entry, num_ranks):
            spread.append(entry)
            continue
        for chunk in _by_rows(entry, num_ranks, merge):
            chunks.append(chunk)
            loads[chunk.rank] += chunk.num_bytes
    for entry in spread:
        chunks += _spread(entry, loads)
    keys = tuple(value.key for value in index.values)
    return ReshardLayout(num_ranks, tuple(chunks), keys, tuple(rank_bound_keys(index)))


def rank_bound_keys(index: Index) -> Iterator[str]:
    """Keys that hold a rank number: they belong to the old world size."""
    return (key for key in index.entries if _RANK_KEY.search(key))


def _is_spread(entry: TensorEntry, num_ranks: int) -> bool:
    """0-dim tensors, and tensors of one chunk with fewer rows than ranks, stay whole.

    An empty chunk beside the one that holds all of it says that the tensor was sharded.
    """
    if not entry.shape:
        return True
    return len(_without_replicas(entry)) <= 1 and entry.shape[0] < num_ranks


def _spread(entry: TensorEntry, loads: list[int]) -> Iterator[NewChunk]:
    """The stored chunk of a whole tensor, to the rank that has least."""
    for i, chunk in _without_replicas(entry):
        rank = min(range(len(loads)), key=loads.__getitem__)
        num_bytes = chunk.box.num_elements * entry.dtype.itemsize
        loads[rank] += num_bytes
        yield NewChunk(entry.key, chunk.box, rank, (i,), _is_item(chunk), num_bytes)


def _is_item(chunk: Chunk) -> bool:
    """Whether the stored bytes are a DCP item; bare payloads have to be made into one."""
    return chunk.item is not None and PAYLOAD not in chunk.item.transforms


def _by_rows(entry: TensorEntry, num_ranks: int, merge: bool) -> Iterator[NewChunk]:
    rows = chunk_rows(entry.shape[0], num_ranks)
    sources = _without_replicas(entry)
    if merge:
        yield from _merged(entry, rows, sources)
    else:
        for i, chunk in sources:
            yield from _cut(entry, rows, i, chunk)


def _without_replicas(entry: TensorEntry) -> list[tuple[int, Chunk]]:
    """Chunks by place; of equal boxes the first one."""
    seen: dict[Box, tuple[int, Chunk]] = {}
    for i, chunk in enumerate(entry.chunks):
        seen.setdefault(chunk.box, (i, chunk))
    return sorted(seen.values(), key=lambda pair: pair[1].box.offsets)


def _cut(
    entry: TensorEntry, rows: list[tuple[int, int]], i: int, chunk: Chunk
) -> Iterator[NewChunk]:
    itemsize = entry.dtype.itemsize
    if not chunk.box.num_elements:
        yield NewChunk(entry.key, chunk.box, len(rows) - 1, (i,), _is_item(chunk), 0)
        return
    size = rows[0][1]  # all but the last non-empty target have as many rows
    first, last = chunk.box.offsets[0], chunk.box.ends[0]
    for rank in range(first // size, (last - 1) // size + 1):
        start, end = max(first, rows[rank][0]), min(last, rows[rank][1])
        box = Box((start, *chunk.box.offsets[1:]), (end - start, *chunk.box.sizes[1:]))
        keep = box == chunk.box and _is_item(chunk)
        yield NewChunk(entry.key, box, rank, (i,), keep, box.num_elements * itemsize)


def _merged(
    entry: TensorEntry, rows: list[tuple[int, int]], sources: list[tuple[int, Chunk]]
) -> Iterator[NewChunk]:
    """One chunk per target; an empty one, once, where targets have no rows (as DCP stores it)."""
    itemsize = entry.dtype.itemsize
    rest = entry.shape[1:]
    position = 0
    for rank, (start, end) in enumerate(rows):
        box = Box((start,) + (0,) * len(rest), (end - start, *rest))
        if not box.num_elements:
            yield NewChunk(entry.key, box, rank, (), False, 0)
            return
        while position < len(sources) and sources[position][1].box.ends[0] <= start:
            position += 1
        used = []
        for i, chunk in sources[position:]:
            if chunk.box.offsets[0] >= end:
                break
            if intersect(chunk.box, box) is not None:
                used.append((i, chunk))
        keep = len(used) == 1 and used[0][1].box == box and _is_item(used[0][1])
        yield NewChunk(
            entry.key, box, rank, tuple(i for i, _ in used), keep, box.num_elements * itemsize
        )
