"""`ckpt.index`: it says what `.metadata` says, with payloads, and never more than it can prove."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from golden_cases import Golden, golden_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.ckpt_index import BLOCK_BYTES, Payload, Payloads, read_index, write_index
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_metadata import read_metadata
from ckptool.formats.packed_columns import pack_column, unpack_column
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry, ValueEntry

GOLDEN = [case for case in golden_cases() if (case.path / ".metadata").exists()]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_indexes_go_through(case: Golden) -> None:
    """Entries, version and notes come back as `.metadata` gives them, and it is recognised."""
    metadata = (case.path / ".metadata").read_bytes()
    index = read_metadata(metadata)
    again = read_index(write_index(index, payloads={}, metadata=metadata))
    assert again.index.entries == index.entries
    assert list(again.index.entries) == list(index.entries)
    assert (again.index.version, again.index.form) == (index.version, "ckpt-index")
    assert again.agrees_with(metadata)
    assert not again.agrees_with(metadata + b"x")
    for entry in index.tensors:
        payload = Payload(None, None)
        assert [again.payloads[entry.key][i] for i in range(len(entry.chunks))] == [
            payload for _ in entry.chunks
        ]


PAYLOADS = [
    Payload(704, 2 * BLOCK_BYTES + 5, 0, (1, 2**32 - 1, 7)),
    Payload(704, 12, 99),
    Payload(None, None),
    Payload(0, 0, None, ()),
]


def small() -> tuple[Index, dict[str, Payloads]]:
    chunks = [
        Chunk(Box((i, 0), (1, 3)), Item(f"{i % 2}/f", 2**40 * i, 2**33) if i != 2 else None)
        for i in range(4)
    ]
    wrapped = Chunk(Box((), ()), Item("z", 1, 2, ("stream.zstd/1",)))
    entries: dict[str, Any] = {
        "w": TensorEntry("w", DTYPES["bfloat16"], (4, 3), Chunks.of(chunks, num_dims=2), ("w", 0)),
        "é\ud800": ValueEntry("é\ud800", Item("0/f", 5, 6, ("stream.zstd/1",)), ()),
        "s": TensorEntry("s", DTYPES["int8"], (), Chunks.of([wrapped], num_dims=0)),
        "none": TensorEntry("none", DTYPES["int8"], (0, 5), Chunks.of([], num_dims=2)),
        "lost": ValueEntry("lost", None),
    }
    return Index(entries, version="1.0.0", notes=("a note",)), {"w": Payloads.of(PAYLOADS)}


def small_bytes() -> bytes:
    index, payloads = small()
    return write_index(index, payloads=payloads, metadata=b"metadata")


def test_payloads_go_through() -> None:
    """Places, CRCs and block CRCs come back row by row; what is not known stays so."""
    index, _ = small()
    again = read_index(small_bytes())
    assert again.index.entries == index.entries
    assert again.index.notes == index.notes
    assert [again.payloads["w"][i] for i in range(4)] == PAYLOADS
    assert again.payloads["s"][0] == Payload(None, None)
    assert len(again.payloads["none"]) == 0


def test_same_index_same_bytes() -> None:
    """Writing is deterministic, so that copies can be compared."""
    assert small_bytes() == small_bytes()


def test_cut_or_changed_anywhere() -> None:
    """Any cut and any changed byte is noticed."""
    data = small_bytes()
    for end in range(len(data)):
        with pytest.raises(DamagedError):
            read_index(data[:end])
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x10
        with pytest.raises((DamagedError, UnsupportedError)):
            read_index(bytes(changed))


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32(body))


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(8, len(small_bytes()) - 5), st.integers(0, 255)),
        min_size=1,
        max_size=3,
    )
)
def test_changed_with_a_fitting_crc(edits: list[tuple[int, int]]) -> None:
    """Even with a CRC that fits, other bytes give an index in range or our errors."""
    body = bytearray(small_bytes()[:-4])
    for position, value in edits:
        body[position] = value
    try:
        file = read_index(sealed(bytes(body)))
    except (DamagedError, UnsupportedError):
        return
    for entry in file.index.tensors:
        assert len(list(entry.chunks)) == len(file.payloads[entry.key])


def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The small index with a changed header and a CRC that fits."""
    data = small_bytes()
    (size,) = struct.unpack("<I", data[8:12])
    header = json.loads(zstandard.ZstdDecompressor().decompress(data[12 : 12 + size]))
    change(header)
    packed = zstandard.ZstdCompressor().compress(json.dumps(header).encode())
    return sealed(data[:8] + struct.pack("<I", len(packed)) + packed + data[12 + size : -4])


def set_at(*path: Any, to: Any) -> Callable[[dict[str, Any]], object]:
    def change(header: Any) -> None:
        for step in path[:-1]:
            header = header[step]
        header[path[-1]] = to

    return change


def test_the_header_of_these_tests_is_sound() -> None:
    """What the next test breaks is whole before it breaks it."""
    assert read_index(with_header(lambda header: None)).index == read_index(small_bytes()).index


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(set_at("files", 0, to="../x"), id="a file outside"),
        pytest.param(set_at("files", to=["a"]), id="fewer files than numbers"),
        pytest.param(set_at("files", 0, to=5), id="a file that is no text"),
        pytest.param(set_at("transforms", to=[]), id="no transforms"),
        pytest.param(set_at("entries", 0, "chunks", to=5), id="more chunks than rows"),
        pytest.param(set_at("entries", 0, "chunks", to=-1), id="chunks below 0"),
        pytest.param(set_at("entries", 0, "shape", to=[4]), id="another number of dims"),
        pytest.param(set_at("entries", 0, "shape", to=[-4, 3]), id="a shape below 0"),
        pytest.param(set_at("entries", 0, "shape", to="43"), id="a shape that is none"),
        pytest.param(set_at("entries", 0, "path", to=[None]), id="a path that is none"),
        pytest.param(set_at("entries", 0, "key", to="s"), id="a key twice"),
        pytest.param(set_at("entries", 1, "item", to=[99, 0, 0, 0]), id="an item in no file"),
        pytest.param(set_at("entries", 1, "item", to=[-1, 0, 0, 0]), id="an item in file -1"),
        pytest.param(set_at("entries", 1, "item", to=[0, 0]), id="half an item"),
        pytest.param(set_at("entries", to=None), id="no entries"),
        pytest.param(set_at("columns", 0, "num_rows", to=2**40), id="columns beyond all bounds"),
        pytest.param(set_at("columns", 0, "num_rows", to=7), id="a column of other rows"),
        pytest.param(set_at("columns", 0, "width", to=3), id="numbers of 3 bytes"),
        pytest.param(set_at("columns", 0, "num_bytes", to=1), id="a column of other bytes"),
        pytest.param(set_at("columns", 0, "delta", to="yes"), id="a delta that is none"),
        pytest.param(set_at("columns", 0, "name", to="other"), id="a column missing"),
        pytest.param(set_at("metadata", to={}), id="no metadata"),
        pytest.param(set_at("metadata", "crc32", to=2**32), id="a CRC that is none"),
        pytest.param(set_at("version", to=1.0), id="a version that is no text"),
    ],
)
def test_hostile_headers(change: Callable[[dict[str, Any]], object]) -> None:
    """Each inconsistency behind a fitting CRC is damage, never another error."""
    with pytest.raises(DamagedError, match=r"ckpt\.index"):
        read_index(with_header(change))


def test_later_versions_ask_for_a_newer_program() -> None:
    """A later magic or schema is unsupported, not damaged; a new dtype is named."""
    with pytest.raises(UnsupportedError):
        read_index(b"CKPTIDX2" + small_bytes()[8:])
    with pytest.raises(UnsupportedError):
        read_index(with_header(set_at("schema", to="ckptool.index/2")))
    with pytest.raises(UnsupportedError, match="float99"):
        read_index(with_header(set_at("entries", 0, "dtype", to="float99")))


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    """A frame that declares other sizes than its column is refused without making room."""
    column, _ = pack_column("x", np.zeros(10, np.int64))
    bomb = zstandard.ZstdCompressor().compress(bytes(2**26))
    with pytest.raises(DamagedError, match="67108864 bytes, not 10"):
        unpack_column(column, memoryview(bomb))


NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1)) | st.lists(st.integers(-300, 300))


@settings(max_examples=200, deadline=None)
@given(NUMBERS)
def test_any_column_goes_through(numbers: list[int]) -> None:
    """Packing is exact for every int64, wrap-around included."""
    column = np.array(numbers, np.int64)
    described, data = pack_column("x", column)
    assert unpack_column(described, memoryview(data)).tolist() == numbers


def test_regular_columns_pack_to_almost_nothing() -> None:
    """Offsets that step evenly, as a sharded index has them, take next to no bytes."""
    _, data = pack_column("x", np.arange(0, 10**9, 1000))
    assert len(data) < 1000
