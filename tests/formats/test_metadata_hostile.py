"""A `.metadata` from a stranger: every way to be wrong is an error of ours, and does nothing."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.dcp_metadata import read_metadata, write_metadata
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry, ValueEntry


def small_index(file: str = "__0_0.distcp", **changes: Any) -> Index:
    halves = [
        Chunk(Box((0, 0), (3, 4)), Item(file, 0, 500)),
        Chunk(Box((3, 0), (3, 4)), Item("__1_0.distcp", 0, 70_000, ("stream.zstd/1",))),
    ]
    w = TensorEntry(
        "model.w", dtype_named("float32"), (6, 4), Chunks.of(halves, num_dims=2), ("model", "w")
    )
    return Index({"model.w": w, "step": ValueEntry("step", Item(file, 500, 20), ("step",))})


SMALL = write_metadata(small_index())


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def find(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def with_planner_data(opcodes: bytes) -> bytes:
    """A metadata whose planner_data is made by ``opcodes``."""
    plain = write_metadata(Index({}))
    before, after = plain[11:].split(b"\x8c\x0cplanner_data\x94N")
    return b"\x80\x04" + before + b"\x8c\x0cplanner_data\x94" + opcodes + after


def test_the_frame_of_these_tests_is_sound() -> None:
    """What the other tests break is whole before they break it."""
    assert read_metadata(SMALL) == small_index()
    assert read_metadata(with_planner_data(b"}")).entries == {}


def test_cut_short_anywhere() -> None:
    """A metadata cut at any byte is damaged, and nothing else."""
    for end in range(len(SMALL)):
        with pytest.raises(DamagedError):
            read_metadata(SMALL[:end])


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(SMALL) - 1), st.binary(max_size=4)), min_size=1, max_size=4
    )
)
def test_mutated_anyhow(edits: list[tuple[int, bytes]]) -> None:
    """Bytes changed at random give an index or one of our two errors."""
    data = SMALL
    for position, replacement in edits:
        data = data[:position] + replacement + data[position + len(replacement) :]
    try:
        read_metadata(data)
    except (DamagedError, UnsupportedError):
        pass


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    """Bytes that are no pickle at all give one of our two errors."""
    with pytest.raises((DamagedError, UnsupportedError)):
        read_metadata(b"\x80\x04" + data)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("subprocess", "Popen"),
        ("importlib", "import_module"),
    ],
)
def test_hostile_global(module: str, name: str) -> None:
    """A global that runs code is named, and the checkpoint called damaged."""
    call = find(module, name) + text("echo harm") + b"\x85R"
    with pytest.raises(DamagedError, match=rf"{module}\.{name}"):
        read_metadata(with_planner_data(call))


def test_unknown_class_asks_for_a_newer_version() -> None:
    """A class that a later torch may have added is named, with what to do."""
    opcodes = find("torch.distributed.checkpoint.metadata", "ShardLayout") + b")\x81"
    with pytest.raises(UnsupportedError, match=r"metadata\.ShardLayout.*newer torch"):
        read_metadata(with_planner_data(opcodes))


def test_reduce_of_an_object_runs_nothing(tmp_path: Any) -> None:
    """A pickled object with `__reduce__`, as an attacker would plant it, is never called."""

    class Planted:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    planted = pickle.dumps(Planted(), 4)[11:-1]
    with pytest.raises(DamagedError, match=r"mkdir"):
        read_metadata(with_planner_data(planted))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(find("torch", "Size") + b"}b", id="state of a function"),
        pytest.param(b"]}b", id="state of a list"),
        pytest.param(find("torch", "Size") + b")\x81", id="instance of a function"),
        pytest.param(
            find("torch.distributed.checkpoint.metadata", "Metadata") + b")R", id="call of a class"
        ),
        pytest.param(text("torch") + b")R", id="call of a string"),
        pytest.param(b"N)R", id="call of None"),
        pytest.param(text("x") + b"Q", id="persistent id"),
        pytest.param(b"}]Ns", id="a list as a key"),
        pytest.param(b"h\xff", id="an empty memo slot"),
        pytest.param(b"0" * 50, id="pops beyond the bottom"),
        pytest.param(b"e", id="appends to nothing"),
        pytest.param(b"(" * 1000, id="marks without end"),
        pytest.param(b"\x96" + b"\xff" * 8, id="a bytearray of 2**64 bytes"),
        pytest.param(b"\x8d" + b"\xff" * 7 + b"\x7f", id="a text of 2**63 bytes"),
        pytest.param(b"\x8b\xff\xff\xff\xff", id="an int of 4 GiB"),
        pytest.param(b"]r\xff\xff\xff\x7fj\xff\xff\xff\x7e", id="a memo slot of 2**31"),
        pytest.param(b"})" + b"\x85" * 300_000 + b"Ns", id="a key nested 300,000 deep"),
        pytest.param(b"})" + b"2\x86" * 60 + b"Ns", id="a key of 2**60 parts"),
        pytest.param(b"cos\nsystem\n", id="a global in text"),
        pytest.param(b"(ios\nsystem\n", id="INST"),
        pytest.param(b"\x82\x01", id="a registered extension"),
        pytest.param(b"\x97", id="a buffer out of band"),
        pytest.param(b"I42\n", id="an int in text"),
    ],
)
def test_hostile_opcodes(opcodes: bytes) -> None:
    """Each trick of a hostile pickle ends in one of our errors, at once."""
    with pytest.raises((DamagedError, UnsupportedError)):
        read_metadata(with_planner_data(opcodes))


def test_deep_nesting_is_read_or_refused_without_a_crash() -> None:
    """Lists nested a hundred thousand deep in a field that we do not need do no harm."""
    deep = b"]" * 100_000 + b"a" * 99_999
    assert read_metadata(with_planner_data(deep)).entries == {}


@pytest.mark.parametrize(
    "file",
    [
        "../outside.distcp",
        "/etc/passwd",
        "a/../../outside",
        "s3://other/bucket",
        "file:///etc/passwd",
        "a\\..\\b",
        "C:/windows",
        "x\0y",
        "",
        ".",
    ],
)
def test_files_outside_the_checkpoint(file: str) -> None:
    """A file name that leaves the checkpoint is refused for tensors and values alike."""
    with pytest.raises(DamagedError, match="outside the checkpoint"):
        read_metadata(write_metadata(small_index(file)))


def test_files_in_a_folder_below_are_fine() -> None:
    """A file in a folder of the checkpoint is legal."""
    index = small_index("7f3a/__0_0.distcp")
    assert read_metadata(write_metadata(index)) == index


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(b"M\xf4\x01", b"J\xff\xff\xff\xff", id="length below 0"),
        pytest.param(b"M\xf4\x01", b"\x88", id="length True"),
        pytest.param(b"M\xf4\x01", b"N", id="length None"),
        pytest.param(b"M\xf4\x01", b"\x8a\x09" + b"\xff" * 8 + b"\x00", id="length 2**64"),
        pytest.param(b"M\xf4\x01", b"G" + b"\x00" * 8, id="length 0.0"),
        pytest.param(b"K\x06K\x04\x86", b"K\x06\x85", id="shape with one dim"),
        pytest.param(b"K\x06K\x04\x86", b"K\x06J\xff\xff\xff\xff\x86", id="shape below 0"),
        pytest.param(b"K\x03K\x04\x86", b"K\x03\x85", id="chunk with one dim"),
        pytest.param(b"K\x03K\x04\x86", b"K\x03N\x86", id="chunk with None"),
        pytest.param(b"K\x03K\x04\x86", b"K\x03J\xff\xff\xff\xff\x86", id="chunk below 0"),
        pytest.param(
            b"K\x03K\x04\x86", b"K\x03\x8a\x09" + b"\xff" * 8 + b"\x00\x86", id="chunk beyond int64"
        ),
    ],
)
def test_numbers_that_are_no_sizes(old: bytes, new: bytes) -> None:
    """Every number of the index is a size that fits 64 bits, or it is named."""
    framed = SMALL[:2] + SMALL[11:]  # without its frame, whose length would not fit
    assert old in framed
    with pytest.raises(DamagedError, match=r"model\.w|step"):
        read_metadata(framed.replace(old, new))


def test_unknown_dtype_is_named_with_its_tensor() -> None:
    """A dtype of a later torch stops the read and names the tensor that has it."""
    framed = SMALL[:2] + SMALL[11:]
    changed = framed.replace(b"\x07float32", b"\x07float99")
    with pytest.raises(UnsupportedError, match=r"model\.w.*float99"):
        read_metadata(changed)


def test_root_that_is_no_metadata() -> None:
    """Another pickle is named for what it is."""
    with pytest.raises(DamagedError, match="dict, not a Metadata"):
        read_metadata(pickle.dumps({"a": 1}, 4))
