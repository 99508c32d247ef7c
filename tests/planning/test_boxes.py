"""Geometry: runs, rows and intersections, against numpy."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckptool.model import Box
from ckptool.planning.boxes import chunk_rows, flat_offset, intersect, is_full_width, run_boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_run_boxes_cover_the_run_exactly_and_in_order(shape, data):
    """A run of a row-major tensor is the concatenation of its boxes."""
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    elements = np.arange(size).reshape(shape)
    found = []
    for box in run_boxes(shape, start, end):
        found += elements[tuple(map(slice, box.offsets, box.ends))].reshape(-1).tolist()
    assert found == list(range(start, end))
    assert len(run_boxes(shape, start, end)) <= max(1, 2 * len(shape) - 1)


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_rows_is_what_torch_chunk_does(num_rows, num_ranks):
    """Ceil-sized pieces, the last one short, and empty ranks behind it."""
    rows = chunk_rows(num_rows, num_ranks)
    size = math.ceil(num_rows / num_ranks) if num_rows else 0
    assert len(rows) == num_ranks
    assert [r for start, end in rows for r in range(start, end)] == list(range(num_rows))
    assert all(end - start in (size, 0) or end == num_rows for start, end in rows)


def test_chunk_rows_of_six_over_four():
    """2, 2, 2, 0: the last rank has nothing (pytorch#108869)."""
    assert chunk_rows(6, 4) == [(0, 2), (2, 4), (4, 6), (6, 6)]


boxes = st.tuples(*[st.tuples(st.integers(0, 6), st.integers(0, 4))] * 2).map(
    lambda dims: Box(tuple(o for o, _ in dims), tuple(s for _, s in dims))
)


@given(boxes, boxes)
def test_an_intersection_holds_just_the_shared_elements(a, b):
    """Marking both boxes in an array and looking for overlap says the same."""
    marks = np.zeros((12, 12), int)
    for box in (a, b):
        marks[tuple(map(slice, box.offsets, box.ends))] += 1
    shared = intersect(a, b)
    expected = np.zeros_like(marks)
    if shared is not None:
        expected[tuple(map(slice, shared.offsets, shared.ends))] = 1
    assert ((marks == 2) == expected).all()


def test_zero_dims_share_their_one_element():
    """A 0-dim tensor's box intersects itself."""
    assert intersect(Box((), ()), Box((), ())) == Box((), ())


def test_full_width_looks_at_every_dim_but_the_first():
    """A box of rows is one run of bytes; one that is narrower is not."""
    assert is_full_width(Box((2, 0, 0), (1, 3, 4)), (5, 3, 4))
    assert not is_full_width(Box((2, 0, 1), (1, 3, 3)), (5, 3, 4))


@given(shapes, st.data())
def test_flat_offset_is_numpys_ravel_index(shape, data):
    """Row-major positions agree with numpy."""
    index = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    assert flat_offset(shape, index) == int(np.ravel_multi_index(index, shape) if shape else 0)
