"""The layout plan of a reshard: which rank gets which box of every tensor, kept or cut. Pure.

It comes from the index alone. Target rank r owns rows by torch.chunk on dim 0. A source chunk
whose rows lie in one target keeps its item; one that a boundary cuts becomes pieces, each a
new item. ``merge`` gives every tensor one chunk per target instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptool.formats.safetensors_shards import PAYLOAD
from ckptool.model import Chunks, Index, Ints, TensorEntry
from ckptool.planning.chunk_rows import without_replicas
from ckptool.planning.made import InBlocks
from ckptool.planning.new_chunks import NewChunk, NewChunks

__all__ = ["NewChunk", "NewChunks", "ReshardLayout", "plan_layout", "rank_bound_keys"]

_RANK_KEY = re.compile(r"(^|[._])(rng|rank)[._]?\d+([._]|$)|(^|\.)rng\.\d+\.")


@dataclass(frozen=True, slots=True)
class ReshardLayout:
    """Where everything goes; ``values`` are stored by rank 0, verbatim."""

    num_ranks: int
    tensors: tuple[NewChunks, ...]
    values: tuple[str, ...]
    rank_bound: tuple[str, ...] = field(default=())

    @property
    def chunks(self) -> Sequence[NewChunk]:
        """Those of all tensors, made as they are asked for."""
        return InBlocks(map(len, self.tensors), self.tensors.__getitem__)

    @property
    def num_kept(self) -> int:
        return sum(int(np.count_nonzero(tensor.keep)) for tensor in self.tensors)

    def rank_num_bytes(self) -> list[int]:
        """Tensor bytes that each target rank gets."""
        totals = np.zeros(self.num_ranks, np.int64)
        for tensor in self.tensors:
            np.add.at(totals, tensor.rank, tensor.num_bytes)
        sums: list[int] = totals.tolist()
        return sums

    def to_json(self) -> dict[str, Any]:
        num_chunks = len(self.chunks)
        return {
            "num_ranks": self.num_ranks,
            "num_chunks": num_chunks,
            "num_items_kept": self.num_kept,
            "num_items_new": num_chunks - self.num_kept,
            "num_values": len(self.values),
            "rank_num_bytes": self.rank_num_bytes(),
            "rank_bound_keys": list(self.rank_bound),
        }


def plan_layout(index: Index, *, num_ranks: int, merge: bool) -> ReshardLayout:
    """Lay a checkpoint out for ``num_ranks``; expects an index whose structure is sound."""
    tensors: list[NewChunks] = []
    loads = np.zeros(num_ranks, np.int64)
    spread: list[TensorEntry] = []
    for entry in index.tensors:
        if _is_spread(entry, num_ranks):
            spread.append(entry)
            continue
        new = (_merged if merge else _cut)(entry, num_ranks)
        np.add.at(loads, new.rank, new.num_bytes)
        tensors.append(new)
    tensors += [_spread(entry, loads) for entry in spread]
    keys = tuple(value.key for value in index.values)
    return ReshardLayout(num_ranks, tuple(tensors), keys, tuple(rank_bound_keys(index)))


def rank_bound_keys(index: Index) -> Iterator[str]:
    """Keys that hold a rank number: they belong to the old world size."""
    return (key for key in index.entries if _RANK_KEY.search(key))


def _is_spread(entry: TensorEntry, num_ranks: int) -> bool:
    """0-dim tensors, and tensors of one chunk with fewer rows than ranks, stay whole.

    An empty chunk beside the one that holds all of it says that the tensor was sharded.
    """
    if not entry.shape:
        return True
    return entry.shape[0] < num_ranks and len(without_replicas(entry.chunks)) <= 1


def _spread(entry: TensorEntry, loads: Ints) -> NewChunks:
    """The stored chunk of a whole tensor, to the rank that has least."""
    chunks = entry.chunks
    rows = without_replicas(chunks)
    rank = np.full(len(rows), int(np.argmin(loads)), np.int64)
    new = _columns(entry, rows, chunks.offsets[rows], chunks.sizes[rows], rank)
    np.add.at(loads, new.rank, new.num_bytes)
    return new


def _cut(entry: TensorEntry, num_ranks: int) -> NewChunks:
    """Every source chunk, cut where the rows of two targets meet; empty ones to the last."""
    chunks = entry.chunks
    rows = without_replicas(chunks)
    source, rank = _targets(entry, rows, num_ranks)
    offsets, sizes = chunks.offsets[source], chunks.sizes[source]
    holds = sizes.all(axis=1)
    size = _rows_per_rank(entry, num_ranks)
    first, last = offsets[:, 0], offsets[:, 0] + sizes[:, 0]
    start = np.where(holds, np.maximum(first, rank * size), first)
    end = np.where(holds, np.minimum(last, (rank + 1) * size), last)
    offsets[:, 0], sizes[:, 0] = start, end - start
    return _columns(entry, source, offsets, sizes, rank)


def _merged(entry: TensorEntry, num_ranks: int) -> NewChunks:
    """One chunk per target; an empty one, once, where targets have no rows (as DCP stores it)."""
    rows = without_replicas(entry.chunks)
    rows = rows[entry.chunks.sizes[rows].all(axis=1)]
    source, owner = _targets(entry, rows, num_ranks)
    size, num_rows = _rows_per_rank(entry, num_ranks), entry.shape[0]
    num_full = -(-num_rows // size) if entry.num_elements else 0
    rank = np.arange(min(num_ranks, num_full + 1), dtype=np.int64)
    start, end = np.minimum(rank * size, num_rows), np.minimum((rank + 1) * size, num_rows)
    offsets = np.zeros((len(rank), len(entry.shape)), np.int64)
    sizes = np.tile(np.array(entry.shape, np.int64), (len(rank), 1))
    offsets[:, 0], sizes[:, 0] = start, end - start
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(rank))[: len(rank)]
    return _columns(entry, source[order], offsets, sizes, rank, counts=counts)


def _targets(entry: TensorEntry, rows: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """(source chunk, target rank) of every piece, in the order of ``rows``."""
    chunks = entry.chunks
    size = _rows_per_rank(entry, num_ranks)
    first, count = chunks.offsets[rows, 0], chunks.sizes[rows, 0]
    holds = chunks.sizes[rows].all(axis=1)
    low = np.where(holds, first // size, num_ranks - 1)
    high = np.where(holds, (first + np.maximum(count, 1) - 1) // size, num_ranks - 1)
    counts = high - low + 1
    before = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.repeat(low, counts) + np.arange(len(before)) - before
    return np.repeat(rows, counts), rank


def _rows_per_rank(entry: TensorEntry, num_ranks: int) -> int:
    """As torch.chunk cuts: every target but the last one with rows has as many."""
    return max(1, -(-entry.shape[0] // num_ranks))


def _columns(
    entry: TensorEntry,
    sources: Ints,
    offsets: Ints,
    sizes: Ints,
    rank: Ints,
    *,
    counts: Ints | None = None,
) -> NewChunks:
    """New chunks; ``counts`` is how many sources each has, one unless given."""
    chunks = entry.chunks
    if counts is None:
        counts = np.ones(len(rank), np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    keep = counts == 1
    if len(sources):
        only = sources[np.minimum(starts[:-1], len(sources) - 1)]
        same = (chunks.offsets[only] == offsets) & (chunks.sizes[only] == sizes)
        keep &= same.all(axis=1) & _are_items(chunks)[only]
    num_bytes = sizes.prod(axis=1, dtype=np.int64) * entry.dtype.itemsize
    return NewChunks(entry.key, offsets, sizes, rank, keep, num_bytes, sources, starts)


def _are_items(chunks: Chunks) -> npt.NDArray[np.bool_]:
    """Whether the stored bytes are DCP items; bare payloads have to be made into such."""
    return (chunks.file >= 0) & ~chunks.are_wrapped(lambda names: PAYLOAD in names)
