"""Any tensors, cut in any way: every reshard and export of them holds what numpy assembles."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_checkpoint import Saved, place_of, random_array, read_safetensors, write_checkpoint

from ckptool.dtypes import dtype_named
from ckptool.engine.run import How
from ckptool.errors import DamagedError
from ckptool.model import Box, TensorEntry
from ckptool.operations.export import export
from ckptool.operations.open import open_checkpoint
from ckptool.operations.reshard import reshard
from ckptool.planning.boxes import chunk_rows

DTYPES = ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64", "uint8", "float64"]
STORED = ["plain", "plain", "transposed", "view", "zstd"]
# part sizes and memory as small as the planner takes them, so that small tensors have many parts
BUDGETS = [1 << 30, 1 << 12, 1 << 14]


@st.composite
def grids(draw: Any) -> Saved:
    """A tensor of 0 to 3 dims, each cut anywhere, with empty chunks and empty dims."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 13]), max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    cuts = []
    for size in shape:
        inner = draw(st.lists(st.integers(0, size), max_size=3))
        edges = sorted({0, size, *inner})
        pairs = list(itertools.pairwise(edges)) or [(0, size)]
        if draw(st.booleans()) and len(cuts) == 0:
            pairs.append((size, size))  # what torch.chunk leaves to a rank without rows
        cuts.append(pairs)
    boxes = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in itertools.product(*cuts)
    ]
    order = draw(st.permutations(boxes))
    array = random_array(shape, dtype, seed=draw(st.integers(0, 2**32 - 1)))
    return Saved(array, order, dtype, stored=draw(st.sampled_from(STORED)))


@st.composite
def sharded(draw: Any, num_ranks: int) -> Saved:
    """A tensor cut by torch.chunk, as DTensor's Shard(0) stores it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    boxes = []
    for start, end in chunk_rows(shape[0], num_ranks):
        box = Box((start,) + (0,) * (len(shape) - 1), (end - start, *shape[1:]))
        if box not in boxes:
            boxes.append(box)
    return Saved(random_array(shape, dtype, seed=draw(st.integers(0, 2**32 - 1))), boxes, dtype)


HOPS = st.tuples(
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([None, None, "zstd"]),
    st.sampled_from(BUDGETS),
)
VALUES = {"step": 3, "betas": (0.9, 0.95), "names": ["a", {"b": None}]}


def assert_holds(folder: Path, tensors: dict[str, Saved], budget: int) -> None:
    """One safetensors file of all of it has numpy's bytes."""
    out = folder.parent / f"{folder.name}.safetensors"
    export(str(folder), str(out), everything=True, how=How(max_memory=budget))
    found = read_safetensors(out)
    wanted = {
        key: (dtype_named(saved.dtype).safetensors, saved.array.shape, saved.array.tobytes())
        for key, saved in tensors.items()
    }
    assert found == wanted


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(grids(), min_size=1, max_size=4),
    hops=st.lists(HOPS, max_size=3),
    budget=st.sampled_from(BUDGETS),
    num_files=st.integers(1, 5),
)
def test_values_survive_any_chain_of_reshards(tensors, hops, budget, num_files):
    """Whatever the cuts, the ranks, merging and compression: the bits stay the same."""
    named = {f"t{n}": saved for n, saved in enumerate(tensors)}
    with tempfile.TemporaryDirectory() as root:
        here = Path(root, "0")
        write_checkpoint(here, named, values=VALUES, num_files=num_files)
        for number, (to, merge, compress, memory) in enumerate(hops, 1):
            there = Path(root, str(number))
            reshard(
                str(here),
                str(there),
                to=to,
                merge=merge,
                compress=compress,
                how=How(max_memory=memory),
            )
            index = open_checkpoint(str(there)).index
            assert list(index.entries) == [*named, *VALUES]
            if merge:
                assert all(_one_chunk_a_rank(entry, to) for entry in index.tensors)
            here = there
        assert_holds(here, named, budget)


def _one_chunk_a_rank(entry: TensorEntry, num_ranks: int) -> bool:
    rows = chunk_rows(entry.shape[0], num_ranks) if entry.shape else []
    merged = {Box((a,) + (0,) * (len(entry.shape) - 1), (b - a, *entry.shape[1:])) for a, b in rows}
    boxes = [chunk.box for chunk in entry.chunks]
    whole = len(boxes) == 1 and (boxes[0].sizes == entry.shape or not entry.num_elements)
    return whole or set(boxes) <= merged


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 6), via=st.lists(st.integers(2, 9), max_size=3))
def test_merging_restores_the_layout(data, ranks, via):
    """N -> M -> ... -> N with --merge gives every tensor its chunks back, empty ones included.

    Not by way of one rank: a tensor of one chunk and few rows is taken for a whole one.
    """
    tensors = {f"t{n}": data.draw(sharded(ranks)) for n in range(3)}
    with tempfile.TemporaryDirectory() as root:
        here = Path(root, "0")
        first = write_checkpoint(here, tensors)
        for number, to in enumerate([*via, ranks], 1):
            there = Path(root, str(number))
            reshard(str(here), str(there), to=to, merge=True)
            here = there
        index = open_checkpoint(str(here)).index
        for key in tensors:
            old, new = first.entries[key], index.entries[key]
            assert isinstance(old, TensorEntry) and isinstance(new, TensorEntry)
            assert [c.box for c in new.chunks] == [c.box for c in old.chunks]


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.lists(grids(), min_size=1, max_size=3),
    pick=st.integers(0, 2**32),
    to=st.integers(1, 5),
    merge=st.booleans(),
    compress=st.sampled_from([None, "zstd"]),
    budget=st.sampled_from(BUDGETS),
)
def test_no_flipped_bit_passes(tensors, pick, to, merge, compress, budget):
    """One wrong payload bit anywhere: reshard and export name the entry and commit nothing."""
    named = {f"t{n}": saved for n, saved in enumerate(tensors)}
    with tempfile.TemporaryDirectory() as root:
        source = Path(root, "source")
        index = write_checkpoint(source, named)
        places = [
            (key, place_of(source, index, key, k))
            for key, saved in named.items()
            for k, box in enumerate(saved.boxes)
            if box.num_elements and saved.stored != "zstd"
        ]
        if not places:
            return
        key, (file, start, length) = places[pick % len(places)]
        data = bytearray((source / file).read_bytes())
        data[start + pick % length] ^= 1 << pick % 8
        (source / file).write_bytes(data)
        for work in (
            lambda: reshard(
                str(source), str(Path(root, "r")), to=to, merge=merge, compress=compress,
                how=How(max_memory=budget),
            ),
            lambda: export(
                str(source),
                str(Path(root, "x.safetensors")),
                everything=True,
                how=How(max_memory=budget),
            ),
            lambda: export(str(source), str(Path(root, "x.pt")), everything=True),
            lambda: export(str(source), str(Path(root, "hf")), everything=True),
        ):  # fmt: skip
            with pytest.raises(DamagedError) as caught:
                work()
            assert caught.value.facts["entry"] == key
            assert caught.value.facts["file"] == file
            assert "damaged" in caught.value.message or "CRC-32" in caught.value.message
        assert leftovers(Path(root)) == {"source"}


def leftovers(root: Path) -> set[str]:
    """Top names under a folder with a file below them."""
    return {path.relative_to(root).parts[0] for path in root.rglob("*") if path.is_file()}


def test_random_arrays_hold_every_kind_of_bit_pattern():
    """The arrays that these tests use are not all zeros."""
    array = random_array((64,), "float32", seed=1)
    assert len(np.unique(array.view(np.uint32))) == 64
