"""Reshard layouts: any grid of chunks, any number of ranks; covers are exact."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry, ValueEntry
from ckptool.planning.boxes import chunk_rows
from ckptool.planning.new_chunks import NewChunk
from ckptool.planning.reshard import plan_layout

F32 = dtype_named("float32")


def _cuts(draw, size):
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    edges = [0, *sorted(inner), size]
    return list(itertools.pairwise(edges))


@st.composite
def tensors(draw, key="w"):
    """A tensor in any grid of chunks: rows, columns, uneven, with empty chunks."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    boxes = [Box((), ())]
    for size in shape:
        boxes = [
            Box((*box.offsets, start), (*box.sizes, end - start))
            for box in boxes
            for start, end in _cuts(draw, size)
        ]
    boxes = list(dict.fromkeys(draw(st.permutations(boxes))))
    chunks = [Chunk(box, Item(f"__{i}_0.distcp", 0, 100)) for i, box in enumerate(boxes)]
    return TensorEntry(key, F32, shape, Chunks.of(chunks, num_dims=len(shape)), (key,))


def _marks(entry, chunks):
    marks = np.zeros(entry.shape, int)
    for chunk in chunks:
        marks[tuple(map(slice, chunk.box.offsets, chunk.box.ends))] += 1
    return marks


@given(tensors(), st.integers(1, 9), st.booleans())
def test_every_element_goes_to_one_rank_and_to_the_right_one(entry, num_ranks, merge):
    """The new chunks tile the tensor; rows lie where torch.chunk puts them."""
    layout = plan_layout(Index({"w": entry}), num_ranks=num_ranks, merge=merge)
    assert len({chunk.box for chunk in layout.chunks}) == len(layout.chunks)
    assert (_marks(entry, layout.chunks) == 1).all()
    rows = chunk_rows(entry.shape[0], num_ranks) if entry.shape else []
    for chunk in layout.chunks:
        assert 0 <= chunk.rank < num_ranks
        if chunk.box.num_elements and not _stays_whole(entry, num_ranks):
            start, end = rows[chunk.rank]
            assert start <= chunk.box.offsets[0] and chunk.box.ends[0] <= end


@given(tensors(), st.integers(1, 9), st.booleans())
def test_sources_cover_each_new_chunk_and_kept_ones_are_equal(entry, num_ranks, merge):
    """What a chunk is made of holds all of it; a kept item is that very chunk."""
    for new in plan_layout(Index({"w": entry}), num_ranks=num_ranks, merge=merge).chunks:
        used = [entry.chunks[i] for i in new.sources]
        inside = _marks(entry, used)[tuple(map(slice, new.box.offsets, new.box.ends))]
        assert (inside == 1).all()
        if new.keep:
            assert [chunk.box for chunk in used] == [new.box]


@given(tensors(), st.integers(1, 9), st.integers(1, 9))
def test_merge_restores_the_layout(entry, n, m):
    """With merge, N -> M -> N gives the chunks of N again.

    Not where a tensor of few rows was one chunk on the way: nothing says then that it was cut.
    """

    def boxes(tensor, num_ranks):
        layout = plan_layout(Index({"w": tensor}), num_ranks=num_ranks, merge=True)
        return [(chunk.box, chunk.rank) for chunk in layout.chunks]

    def written(tensor, num_ranks):
        chunks = [Chunk(box, Item("f", 0, 1)) for box, _ in boxes(tensor, num_ranks)]
        return TensorEntry("w", F32, tensor.shape, Chunks.of(chunks, num_dims=len(tensor.shape)))

    at_n = written(entry, n)
    there = written(at_n, m)
    again = boxes(there, n)
    lost = any(_stays_whole(*stage) for stage in ((entry, n), (at_n, m), (there, n)))
    assert lost or again == boxes(at_n, n)


def test_sixteen_to_four_keeps_every_item():
    """Where boundaries nest nothing is cut: four items of each tensor per new file."""
    chunks = [Chunk(Box((r, 0), (1, 3)), Item(f"__{r}_0.distcp", 0, 9)) for r in range(16)]
    entry = TensorEntry("w", F32, (16, 3), Chunks.of(chunks, num_dims=2))
    layout = plan_layout(Index({"w": entry}), num_ranks=4, merge=False)
    assert layout.num_kept == 16
    assert [chunk.rank for chunk in layout.chunks] == [r // 4 for r in range(16)]


def test_scalars_and_short_whole_tensors_are_spread_by_bytes():
    """0-dim tensors, and one-chunk tensors with fewer rows than ranks, stay in one chunk."""

    def whole(key, shape):
        chunk = Chunk(Box((0,) * len(shape), shape), Item("f", 0, 9))
        return TensorEntry(key, F32, shape, Chunks.of([chunk], num_dims=len(shape)))

    entries = [whole("a", ()), whole("b", (2, 100)), whole("c", ()), whole("d", (8, 1))]
    layout = plan_layout(Index({e.key: e for e in entries}), num_ranks=4, merge=False)
    ranks = {chunk.entry: chunk.rank for chunk in layout.chunks if chunk.entry != "d"}
    assert len(set(ranks.values())) == 3
    assert sum(chunk.entry == "d" for chunk in layout.chunks) == 4


def test_values_and_rank_bound_keys_are_reported():
    """Values go to rank 0 as they are; keys with a rank number belong to the old world size."""
    keys = ["step", "rng.3.cpu", "rng.0.python", "model.layers.3.w"]
    index = Index({key: ValueEntry(key, Item("f", 0, 1)) for key in keys})
    layout = plan_layout(index, num_ranks=2, merge=False)
    assert list(layout.values) == keys
    assert list(layout.rank_bound) == ["rng.3.cpu", "rng.0.python"]


def _stays_whole(entry, num_ranks):
    if not entry.shape:
        return True
    return len({chunk.box for chunk in entry.chunks}) <= 1 and entry.shape[0] < num_ranks


def test_a_large_layout_is_columns(monkeypatch):
    """No object is made for a chunk until somebody asks for it: millions cost no memory."""
    num_ranks = 512
    starts = np.arange(num_ranks, dtype=np.int64)
    offsets, sizes = np.zeros((num_ranks, 2), np.int64), np.full((num_ranks, 2), 8, np.int64)
    offsets[:, 0] = 8 * starts
    chunks = Chunks(
        offsets=offsets, sizes=sizes, file=starts, starts=starts, lengths=starts + 1,
        files=[f"__{rank}_0.distcp" for rank in range(num_ranks)],
    )  # fmt: skip
    index = Index({f"w{n}": TensorEntry(f"w{n}", F32, (4096, 8), chunks) for n in range(50)})
    made = []
    monkeypatch.setattr(Chunk, "__init__", lambda *a: made.append(1))
    monkeypatch.setattr(NewChunk, "__init__", lambda *a: made.append(1))
    for merge in (False, True):
        layout = plan_layout(index, num_ranks=96, merge=merge)
        document = layout.to_json()
        assert document["num_chunks"] == len(layout.chunks)
        assert sum(document["rank_num_bytes"]) == 50 * 4096 * 8 * 4
    assert made == []


@given(tensors(), st.integers(1, 9), st.booleans())
def test_chunks_are_a_sequence(entry, num_ranks, merge):
    """Chunks are found by position as they are in order; sums are those of the chunks."""
    other = TensorEntry("v", F32, entry.shape, entry.chunks, ("v",))
    layout = plan_layout(Index({"w": entry, "v": other}), num_ranks=num_ranks, merge=merge)
    listed = list(layout.chunks)
    assert [layout.chunks[i] for i in range(len(layout.chunks))] == listed
    assert layout.chunks[:] == listed
    assert layout.num_kept == sum(chunk.keep for chunk in listed)
    totals = [sum(c.num_bytes for c in listed if c.rank == rank) for rank in range(num_ranks)]
    assert layout.rank_num_bytes() == totals
