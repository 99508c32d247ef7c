"""Runs of a `.metadata` read in one step each: always what single opcodes would have given."""

from __future__ import annotations

import gc
import io
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES
from ckptool.errors import CkptoolError
from ckptool.formats.dcp_fast import FastMetadataMachine
from ckptool.formats.dcp_metadata import read_metadata, write_metadata
from ckptool.formats.dcp_objects import MetadataMachine
from ckptool.formats.dcp_reader import _Reader
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry, ValueEntry

SIZES = st.sampled_from([0, 1, 7, 255, 256, 65535, 65536, 2**31, 2**40, 2**62])


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Indexes whose chunks have offsets of their own, with numbers of every width."""
    entries: dict[str, Any] = {}
    for number in range(draw(st.integers(0, 4))):
        num_dims = draw(st.integers(0, 5))
        dims = st.tuples(*[SIZES] * num_dims)
        offsets = draw(st.lists(dims, max_size=8, unique=True))
        chunks = [
            Chunk(
                Box(offset, draw(dims)),
                Item(draw(st.sampled_from("abc")) * 9, draw(SIZES), 9)
                if draw(st.booleans())
                else None,
            )
            for offset in offsets
        ]
        key = draw(st.text(max_size=5)) + str(number)
        columns = Chunks.of(chunks, num_dims=num_dims)
        entries[key] = TensorEntry(key, DTYPES["int8"], draw(dims), columns, draw(PATHS))
        entries[f"v{key}"] = ValueEntry(f"v{key}", Item("a", draw(SIZES), 1), draw(PATHS))
    return Index(entries, version=draw(st.none() | st.text()))


PATHS = st.none() | st.lists(st.text(max_size=4) | st.integers(0, 300)).map(tuple)


def either(machine: type[MetadataMachine], data: bytes) -> Index | str:
    """The index, or which error came instead."""
    try:
        return _Reader("x").index(machine(data, what="x").run())
    except CkptoolError as error:
        return type(error).__name__


@settings(max_examples=200, deadline=None)
@given(indexes())
def test_any_index_goes_through(index: Index) -> None:
    """What is written is read back equal, in runs and opcode by opcode."""
    data = write_metadata(index)
    assert read_metadata(data) == index
    assert either(MetadataMachine, data) == index


def many(count: int = 40) -> bytes:
    """A metadata with runs of chunks and of storage entries, some of them compressed."""
    entries = {}
    for key, transforms in (("model.w", ()), ("model.b", ("stream.zstd/1",))):
        chunks = [
            Chunk(Box((i, 0), (1, 300)), Item(f"__{i % 3}_0.distcp", i * 70_000, 9, transforms))
            for i in range(count)
        ]
        columns = Chunks.of(chunks, num_dims=2)
        entries[key] = TensorEntry(key, DTYPES["int8"], (count, 300), columns, (key,))
    return write_metadata(Index(entries))


MANY = many()


@settings(max_examples=600, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(MANY) - 1), st.binary(min_size=1, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
def test_runs_and_opcodes_agree_on_damage(edits: list[tuple[int, bytes]]) -> None:
    """However the bytes are changed, runs and single opcodes give the same index or fail alike."""
    data = MANY
    for position, replacement in edits:
        data = data[:position] + replacement + data[position + len(replacement) :]
    assert either(FastMetadataMachine, data) == either(MetadataMachine, data)


def test_runs_are_taken() -> None:
    """A large index is read in far fewer steps than it has opcodes."""

    class Counting(FastMetadataMachine):
        num_gets = 0

        def get(self, index: int) -> None:
            self.num_gets += 1
            super().get(index)

    machine = Counting(many(2000), what="x")
    machine.run()
    assert machine.num_gets < 400


def test_strings_written_again_for_each_entry() -> None:
    """Keys that a pickle repeats as strings of their own, as gathered plans have them, are read."""
    original = pickle.loads(MANY)
    plain = {
        type(key)(bytes(key.fqn, "ascii").decode(), key.offset, key.index): type(info)(
            bytes(info.relative_path, "ascii").decode(),
            info.offset,
            info.length,
            [bytes(name, "ascii").decode() for name in info.transform_descriptors or ()] or None,
        )
        for key, info in original.storage_data.items()
    }
    original.storage_data = plain
    file = io.BytesIO()
    pickle.Pickler(file, 4).dump(original)
    assert file.getvalue().count(b"model.w") > 40
    assert file.getvalue().count(b"stream.zstd/1") == 40
    assert either(MetadataMachine, file.getvalue()) == read_metadata(MANY)
    assert read_metadata(file.getvalue()) == read_metadata(MANY)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(was_on: bool) -> None:
    """Reading turns the garbage collector off meanwhile, whatever happens, and only meanwhile."""
    if not was_on:
        gc.disable()
    try:
        read_metadata(MANY)
        with pytest.raises(CkptoolError):
            read_metadata(MANY[:-50])
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
