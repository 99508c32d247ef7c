"""The vocabulary: chunks in columns are the chunks that were put in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptool.model import Box, Chunk, Chunks, Item

numbers = st.integers(0, 3)
items = st.builds(
    Item, st.sampled_from(["a", "b"]), numbers, numbers, st.sampled_from([(), ("z",), ("y", "z")])
)
pairs = st.tuples(numbers, numbers)
rows = st.lists(st.builds(Chunk, st.builds(Box, pairs, pairs), st.none() | items), max_size=6)


@given(rows)
def test_columns_give_back_the_chunks(chunks: list[Chunk]) -> None:
    """One by one, in any selection and all of them, with and without stored bytes."""
    columns = Chunks.of(chunks, num_dims=2)
    assert list(columns) == [columns[i] for i in range(len(columns))] == chunks
    odd = np.arange(len(chunks))[::-2]
    assert columns.at(odd) == chunks[::-2]
    wrapped = [chunk.item is not None and chunk.item.transforms != () for chunk in chunks]
    assert (columns.are_wrapped() & (columns.file >= 0)).tolist() == wrapped


@given(rows, rows)
def test_columns_are_equal_where_chunks_are(a: list[Chunk], b: list[Chunk]) -> None:
    """However files and transforms are numbered, and whatever stands where no item is."""
    assert (Chunks.of(a, num_dims=2) == Chunks.of(b, num_dims=2)) == (a == b)
    mine = Chunks.of(a, num_dims=2)
    other = Chunks.of([*b, *a], num_dims=2)  # numbers files and transforms in another order
    here = np.arange(len(b), len(b) + len(a))
    moved = Chunks(
        offsets=other.offsets[here],
        sizes=other.sizes[here],
        file=other.file[here],
        starts=np.where(other.file[here] < 0, 99, other.starts[here]),
        lengths=other.lengths[here],
        files=other.files,
        transform=None if other.transform is None else other.transform[here],
        transforms=other.transforms,
    )
    assert mine == moved


def test_many_chunks_are_walked_in_order() -> None:
    """More chunks than are made at once come one after another, each once."""
    num = 10_000
    columns = Chunks.of((Chunk(Box((i,), (1,)), Item("f", i, 1)) for i in range(num)), num_dims=1)
    assert [chunk.box.offsets[0] for chunk in columns] == list(range(num))


def test_other_things_are_no_chunks() -> None:
    """Columns of other dims, or no columns at all, are not equal."""
    assert Chunks.of([], num_dims=1) != Chunks.of([], num_dims=2)
    assert Chunks.of([], num_dims=1) != []
