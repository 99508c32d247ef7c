"""The structure check, on tilings that hypothesis makes and on what is done to them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry, ValueEntry
from ckptool.planning.structure import check_structure
from ckptool.planning.tiling import check_tiling

F32 = dtype_named("float32")


def index_of(boxes, shape, *, key="w"):
    """An index of one float32 tensor; each box is an item of its own, side by side."""
    rows = [
        Chunk(box, Item(f"__{i % 3}_0.distcp", i * 1_000_000, 1_000_000))
        for i, box in enumerate(boxes)
    ]
    chunks = Chunks.of(rows, num_dims=len(shape))
    return Index(entries={key: TensorEntry(key, F32, tuple(shape), chunks)})


def codes(index, *, severities=("error", "warning")):
    return [f.code for f in check_structure(index) if f.severity in severities]


def volume(boxes):
    return sum(b.num_elements for b in boxes)


@st.composite
def tilings(draw, *, max_dims=4):
    """A shape, and boxes that tile it: cut again and again at any place of any dim."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=max_dims)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        sizes, offsets = list(box.sizes), list(box.offsets)
        sizes[dim] = cut
        boxes.append(Box(box.offsets, tuple(sizes)))
        offsets[dim] += cut
        sizes[dim] = box.sizes[dim] - cut
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(boxes))


def cells(boxes):
    for box in boxes:
        yield from itertools.product(
            *(range(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
        )


@given(tilings())
def test_accepts_any_tiling(case):
    """Boxes that tile a shape are accepted in any order, empty boxes included."""
    shape, boxes = case
    assert codes(index_of(boxes, shape)) == []


@given(tilings(), st.data())
def test_names_what_is_missing(case, data):
    """Without one chunk, exactly its elements are named as missing, as one box."""
    shape, boxes = case
    lost = data.draw(st.sampled_from([b for b in boxes if b.num_elements]))
    left = [b for b in boxes if b is not lost]
    found = list(check_structure(index_of(left, shape)))
    assert [(f.code, f.severity, f.entry, f.box) for f in found] == [
        ("missing-box", "error", "w", lost)
    ]
    assert str(lost) in found[0].message or lost.sizes == shape


@given(tilings(), st.data())
def test_names_all_missing_elements(case, data):
    """Without several chunks, the missing boxes are disjoint and hold just their elements."""
    shape, boxes = case
    assume(len(boxes) > 2)
    lost = data.draw(st.sets(st.sampled_from(range(len(boxes))), min_size=2, max_size=len(boxes)))
    left = [b for i, b in enumerate(boxes) if i not in lost]
    found = [f.box for f in check_structure(index_of(left, shape))]
    assert sorted(cells(found)) == sorted(cells(boxes[i] for i in lost))


@given(tilings(), st.data())
def test_reports_a_moved_chunk(case, data):
    """A chunk at another place is an overlap, a hole or outside: never accepted."""
    shape, boxes = case
    movable = [i for i, b in enumerate(boxes) if b.num_elements and b.offsets]
    assume(movable)
    i = data.draw(st.sampled_from(movable))
    offsets = tuple(data.draw(st.integers(-2, 9)) for _ in shape)
    assume(offsets != boxes[i].offsets)
    moved = [*boxes[:i], Box(offsets, boxes[i].sizes), *boxes[i + 1 :]]
    same = sorted(cells(b for b in moved)) == sorted(cells(boxes))
    assert bool(codes(index_of(moved, shape), severities=("error",))) != same


@given(tilings(), st.data())
def test_the_same_box_twice_is_a_note(case, data):
    """A replica of a chunk is legal and noted."""
    shape, boxes = case
    twice = data.draw(st.sampled_from([b for b in boxes if b.num_elements]))
    found = list(check_structure(index_of([*boxes, twice], shape)))
    assert [(f.code, f.severity, f.box) for f in found] == [("duplicate-box", "note", twice)]


@given(tilings(), st.data())
def test_reports_an_overlap(case, data):
    """A second, different box over elements that are covered is named with what both cover."""
    shape, boxes = case
    assume(volume(boxes) > 1)
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    extra = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    assume(extra not in boxes)
    found = [f for f in check_structure(index_of([*boxes, extra], shape)) if f.is_error]
    assert {f.code for f in found} == {"overlap"}
    assert set(cells(f.box for f in found)) == set(cells([extra]))


@given(tilings(), st.data())
@settings(max_examples=50)
def test_a_chunk_without_item_is_reported(case, data):
    """A chunk that is listed but not stored is named, and is no hole."""
    shape, boxes = case
    i = data.draw(st.sampled_from([i for i, b in enumerate(boxes) if b.num_elements]))
    entry = index_of(boxes, shape).tensors[0]
    rows = [Chunk(c.box, None if n == i else c.item) for n, c in enumerate(entry.chunks)]
    entry = TensorEntry("w", F32, shape, Chunks.of(rows, num_dims=len(shape)))
    found = list(check_structure(Index(entries={"w": entry})))
    assert [(f.code, f.box) for f in found] == [("not-stored", boxes[i])]


def test_interlocking_boxes_are_accepted_and_checked():
    """Five boxes that no straight cut separates, many times over: exact; one less: named."""
    mill = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((1, 0), (2, 1)),
        ((1, 1), (1, 1)),
    ]
    boxes = [
        Box((3 * i + a, 3 * j + b), size)
        for i in range(30)
        for j in range(30)
        for (a, b), size in mill
    ]
    assert codes(index_of(boxes, (90, 90))) == []
    found = list(check_structure(index_of(boxes[:1000] + boxes[1001:], (90, 90))))
    assert [(f.code, f.box) for f in found] == [("missing-box", boxes[1000])]


@pytest.mark.parametrize("num_dims", [2, 3])
def test_a_sparse_irregular_tiling_is_split(num_dims):
    """Boxes whose grid of edges would be huge are still checked exactly."""
    rng = np.random.default_rng(1)
    shape = (1 << 20,) * num_dims
    boxes = [Box((0,) * num_dims, shape)]
    while len(boxes) < 400:
        box = boxes.pop(int(rng.integers(len(boxes))))
        dim = int(rng.integers(num_dims))
        if box.sizes[dim] < 2:
            boxes.append(box)
            continue
        cut = int(rng.integers(1, box.sizes[dim]))
        sizes, offsets = list(box.sizes), list(box.offsets)
        sizes[dim], offsets[dim] = cut, box.offsets[dim] + cut
        boxes.append(Box(box.offsets, tuple(sizes)))
        sizes[dim] = box.sizes[dim] - cut
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    offsets = np.array([b.offsets for b in boxes])
    sizes = np.array([b.sizes for b in boxes])
    assert check_tiling(offsets, sizes, shape=shape).is_exact
    found = check_tiling(offsets[1:], sizes[1:], shape=shape)
    assert found.missing == (boxes[0],)
    assert found.complete


def test_a_tensor_without_chunks_is_reported():
    """A shape with elements and no chunk at all is a missing box: the whole tensor."""
    found = list(check_structure(index_of([], (10, 6))))
    assert [(f.code, f.box) for f in found] == [("missing-box", Box((0, 0), (10, 6)))]
    assert "no chunk of 'w' is listed" in found[0].message


def test_empty_tensors_and_uneven_shards_are_legal():
    """[5] over 4 ranks ends in an empty chunk at offset 5; an empty tensor needs no chunk."""
    boxes = [Box((0,), (2,)), Box((2,), (2,)), Box((4,), (1,)), Box((5,), (0,))]
    assert codes(index_of(boxes, (5,)), severities=("error", "warning", "note")) == []
    assert codes(index_of([], (0, 3))) == []
    assert codes(index_of([Box((0, 0), (0, 3))], (0, 3))) == []


def test_a_zero_dim_tensor_is_one_chunk():
    """A 0-dim tensor has one chunk; none is an error, two are replicas."""
    scalar = Box((), ())
    assert codes(index_of([scalar], ())) == []
    assert codes(index_of([], ())) == ["missing-box"]
    assert codes(index_of([scalar, scalar], ()), severities=("note",)) == ["duplicate-box"]


def test_chunks_with_other_dims_are_reported():
    """A 2-D tensor with 1-D chunks is named."""
    chunks = Chunks.of([Chunk(Box((0,), (6,)), Item("a", 0, 999))], num_dims=1)
    index = Index(entries={"w": TensorEntry("w", F32, (3, 2), chunks)})
    assert codes(index) == ["bad-box"]


def test_items_that_share_bytes_are_reported():
    """Two items that overlap in a file are named with the byte where it starts."""

    def tensor(key, start, file="f"):
        return TensorEntry(
            key, F32, (4,), Chunks.of([Chunk(Box((0,), (4,)), Item(file, start, 100))], num_dims=1)
        )

    entries = [tensor("a", 0), tensor("b", 99), tensor("c", 199), tensor("d", 50, "g")]
    found = list(check_structure(Index(entries={e.key: e for e in entries})))
    assert [(f.code, f.entry, f.file, f.offset) for f in found] == [("shared-bytes", "b", "f", 99)]
    assert "'a'" in found[0].message


def test_an_item_inside_a_long_one_is_reported():
    """The longest item so far counts, not the one before."""
    items = {"a": (0, 1000), "b": (10, 20), "c": (900, 50), "d": (1000, 5)}
    entries = {k: ValueEntry(k, Item("f", *place)) for k, place in items.items()}
    assert [f.entry for f in check_structure(Index(entries=entries))] == ["b", "c"]


def test_two_entries_in_the_same_item_are_reported():
    """A value that points at another value's item is never right."""
    entries = {k: ValueEntry(k, Item("f", 5, 10)) for k in "ab"}
    assert [f.code for f in check_structure(Index(entries=entries))] == ["shared-bytes"]


def test_an_item_too_short_for_its_chunk_is_reported():
    """16 bytes of payload do not fit 15; compressed, they may."""
    for transforms, expected in [((), ["short-item"]), (("stream.zstd/1",), [])]:
        chunk = Chunk(Box((0,), (4,)), Item("f", 0, 15, transforms))
        entry = TensorEntry("w", F32, (4,), Chunks.of([chunk], num_dims=1))
        assert codes(Index(entries={"w": entry})) == expected


@pytest.mark.parametrize("item", [Item("f", -1, 99), Item("f", 0, -1), Item("f", 1 << 62, 99)])
def test_impossible_places_are_reported(item):
    """Negative or absurd offsets and lengths are named, and break nothing."""
    found = list(check_structure(Index(entries={"v": ValueEntry("v", item)})))
    assert [(f.code, f.entry) for f in found] == [("bad-item", "v")]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "s3://b/x", "a/../../x"])
def test_paths_outside_the_checkpoint_are_reported(name):
    """A file that a hostile index places elsewhere is an error."""
    index = Index(entries={"v": ValueEntry("v", Item(name, 0, 9))})
    assert codes(index) == ["unsafe-path"]


def test_hostile_shapes_end():
    """Absurd sizes end with a finding, not with overflow or memory."""
    for shape, box in [
        ((1 << 40, 1 << 40), Box((0, 0), (1, 1))),
        ((4,), Box((1 << 62,), (1 << 62,))),
    ]:
        assert "bad-shape" in codes(index_of([box], shape)) or "bad-box" in codes(
            index_of([box], shape)
        )


def test_a_value_without_item_is_reported():
    """A value that is listed but not stored is an error."""
    assert codes(Index(entries={"v": ValueEntry("v", None)})) == ["not-stored"]


def test_many_chunks_are_quick():
    """A million chunks are swept in columns: no Python object for each."""
    n = 1_000_000
    starts = np.arange(n, dtype=np.int64)
    offsets = np.stack([starts, np.zeros(n, np.int64)], axis=1)
    sizes = np.stack([np.ones(n, np.int64), np.full(n, 8)], axis=1)
    columns = {"file": starts % 64, "starts": starts * 100, "lengths": np.full(n, 100)}
    files = tuple(f"__{i}_0.distcp" for i in range(64))
    chunks = Chunks(offsets=offsets, sizes=sizes, files=files, **columns)
    assert codes(Index(entries={"w": TensorEntry("w", F32, (n, 8), chunks)})) == []
