"""Every item that torch 2.4, 2.8 and 2.13 wrote: the tensors' bytes come out as torch has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from ckptool.dtypes import DType, dtype_named
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import (
    NeedMore,
    TensorItem,
    check_item,
    encode_item,
    parse_tensor_item,
    parse_value_item,
    probe_ranges,
)
from ckptool.formats.dcp_metadata import read_metadata
from ckptool.formats.safetensors_file import parse_header
from ckptool.formats.safetensors_shards import read_sharded_headers
from ckptool.model import Box, Index, Item, TensorEntry, ValueEntry

GOLDEN = Path(__file__).parents[1] / "golden"
ZSTD = ("stream.zstd/1",)


def cases(found: Callable[[Path], bool]) -> list[Any]:
    folders = sorted(path.parent for path in GOLDEN.glob("*/*/expected.json"))
    return [pytest.param(f, id=f"{f.parent.name}/{f.name}") for f in folders if found(f / "ckpt")]


def is_dcp(folder: Path) -> bool:
    return (folder / ".metadata").exists() and "safetensors" not in folder.parent.name


def is_torch_2_13_default(folder: Path) -> bool:
    """Written by 2.13 with its default options, and not all of it conjugated or negated."""
    other = ("no-crc-1", "alignment-256-1", "plain-conj")
    return is_dcp(folder) and "2.13" in str(folder) and folder.parent.name not in other


def has_headers(folder: Path) -> bool:
    return bool(safetensors_files(folder))


def safetensors_files(folder: Path) -> list[Path]:
    if folder.parent.name == "safetensors-fs":
        return sorted(folder.glob("*.distcp"))
    return sorted(folder.glob("*.safetensors"))


def expected_of(case: Path) -> dict[str, Any]:
    return json.loads((case / "expected.json").read_text())["entries"]


def stored(case: Path, item: Item) -> bytes:
    data = (case / "ckpt" / item.file).read_bytes()[item.offset : item.end]
    assert len(data) == item.length
    if item.transforms == ZSTD:
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return data


def items_of(index: Index) -> Iterator[tuple[TensorEntry, Box, Item]]:
    for entry in index.tensors:
        for chunk in entry.chunks:
            assert chunk.item is not None
            yield entry, chunk.box, chunk.item


def elements(parsed: TensorItem, payload: bytes) -> np.ndarray[Any, Any]:
    """The tensor's elements as rows of bytes, conjugated or negated where the item says so."""
    width = parsed.dtype.itemsize
    raw = np.frombuffer(payload, np.uint8)[parsed.storage_offset * width :]
    strides = (*(stride * width for stride in parsed.strides), 1)
    shape = (*parsed.shape, width)
    if 0 in shape:
        return np.zeros(shape, np.uint8)
    out = np.lib.stride_tricks.as_strided(raw, shape, strides).copy()
    if parsed.conj or parsed.neg:
        parts = resolved(out, parsed.dtype)
        if parsed.conj:
            parts[..., 1] *= -1
        if parsed.neg:
            parts *= -1
    return out


def resolved(rows: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """Real and imaginary parts (or just the numbers) of rows of bytes, as a view."""
    kind = {"complex32": "f2", "complex64": "f4", "complex128": "f8"}.get(dtype.name)
    return rows.view(kind or dtype.name)


def assembled(case: Path, entry: TensorEntry) -> bytes:
    """The logical tensor's bytes from its chunks' items."""
    width = entry.dtype.itemsize
    whole = np.zeros((*entry.shape, width), np.uint8)
    for chunk in entry.chunks:
        data = stored(case, chunk.item)
        parsed = parse_tensor_item(length=len(data), head=data)
        assert (parsed.dtype, parsed.shape) == (entry.dtype, chunk.box.sizes)
        payload = data[parsed.payload_offset : parsed.payload_offset + parsed.payload_num_bytes]
        assert parsed.crc32 in (None, crc32(payload))
        place = tuple(map(slice, chunk.box.offsets, chunk.box.ends))
        whole[place] = elements(parsed, payload)
    return whole.tobytes()


def index_of(case: Path) -> Index:
    return read_metadata((case / "ckpt" / ".metadata").read_bytes(), name=".metadata")


def test_the_corpus_is_there() -> None:
    """The tests below have something to read."""
    assert len(cases(is_dcp)) > 40
    assert len(cases(has_headers)) > 4


@pytest.mark.parametrize("case", cases(is_dcp))
def test_tensors_have_torchs_own_bytes(case: Path) -> None:
    """Each logical tensor, put together from its items, has the digest that torch gave."""
    expected = expected_of(case)
    index = index_of(case)
    assert {entry.key for entry in index.tensors} == {
        key for key, row in expected.items() if row["kind"] == "tensor"
    }
    for entry in index.tensors:
        digest = hashlib.sha256(assembled(case, entry)).hexdigest()
        assert (entry.key, digest) == (entry.key, expected[entry.key]["sha256"])


@pytest.mark.parametrize("case", cases(is_dcp))
def test_one_probe_of_start_and_end_suffices(case: Path) -> None:
    """The first probe parses every item, and says what the whole item says."""
    for _, box, item in items_of(index_of(case)):
        data = stored(case, item)
        whole = parse_tensor_item(length=len(data), head=data)
        hint = box.num_elements * whole.dtype.itemsize
        head, tail = probe_ranges(len(data), hint)
        parts = {"head": data[:head], "tail": data[len(data) - tail :]}
        assert parse_tensor_item(length=len(data), **parts) == whole


@pytest.mark.parametrize("case", cases(is_dcp))
def test_any_probe_reaches_the_end(case: Path) -> None:
    """From nothing at all, each NeedMore asks for more until the item is parsed."""
    for _, _, item in list(items_of(index_of(case)))[:3]:
        data = stored(case, item)
        asked = [(0, 0)]
        while (parsed := probed(data, asked)) is None:
            assert sum(asked[-1]) > sum(asked[-2])
            assert len(asked) < 30
        assert parsed == parse_tensor_item(length=len(data), head=data)


def probed(data: bytes, asked: list[tuple[int, int]]) -> TensorItem | None:
    """The item, or None with what is needed for it appended to ``asked``."""
    head, tail = asked[-1]
    try:
        return parse_tensor_item(length=len(data), head=data[:head], tail=data[len(data) - tail :])
    except NeedMore as more:
        asked.append((more.head_num_bytes, more.tail_num_bytes))
        return None


@pytest.mark.parametrize("case", cases(is_dcp))
def test_golden_items_have_no_findings(case: Path) -> None:
    """Nothing that torch writes is reported, in tensors or in values of whatever class."""
    index = index_of(case)
    values = [entry.item for entry in index.entries.values() if isinstance(entry, ValueEntry)]
    for item in [*(item for _, _, item in items_of(index)), *values]:
        assert check_item(stored(case, item)) == []
    for item in values:
        assert parse_value_item(stored(case, item)).pickle.startswith(b"\x80")


@pytest.mark.parametrize("case", cases(is_torch_2_13_default))
def test_plain_items_are_written_alike(case: Path) -> None:
    """What torch 2.13 wrote of plain tensors comes out of our encoder byte for byte."""
    num_compared = 0
    for _, _, item in items_of(index_of(case)):
        data = stored(case, item)
        parsed = parse_tensor_item(length=len(data), head=data)
        if parsed.is_plain:
            framing = encode_item(dtype=parsed.dtype, shape=parsed.shape)
            start, end = parsed.payload_offset, parsed.payload_offset + parsed.payload_num_bytes
            payload = data[start:end]
            assert framing.head + payload + framing.tail(crc32(payload)) == data
            num_compared += 1
    assert num_compared


@pytest.mark.parametrize("case", cases(lambda f: f.parent.name == "no-crc-1"))
def test_a_missing_crc_is_no_damage(case: Path) -> None:
    """A writer without CRC-32s leaves items that are unverifiable, not wrong."""
    for _, box, item in items_of(index_of(case)):
        data = stored(case, item)
        parsed = parse_tensor_item(length=len(data), head=data)
        assert parsed.crc32 == (None if box.num_elements else 0)
        assert check_item(data) == []


@pytest.mark.parametrize("case", cases(lambda f: f.parent.name == "alignment-256-1"))
def test_other_alignments_are_followed(case: Path) -> None:
    """Payloads stand where the headers say, not where torch usually puts them."""
    offsets = set()
    for _, _, item in items_of(index_of(case)):
        data = stored(case, item)
        offsets.add(parse_tensor_item(length=len(data), head=data).payload_offset)
    assert offsets
    assert all(offset % 256 == 0 for offset in offsets)


@pytest.mark.parametrize("case", cases(lambda f: f.parent.name == "plain-conj"))
def test_bytes_that_are_not_plain_are_told(case: Path) -> None:
    """Conjugated, negated or strided payloads are never taken for plain ones."""
    found = set()
    for _, _, item in items_of(index_of(case)):
        data = stored(case, item)
        parsed = parse_tensor_item(length=len(data), head=data)
        if parsed.conj or parsed.neg:
            assert not parsed.is_plain
            found.add("conj" if parsed.conj else "neg")
    assert found


@pytest.mark.parametrize("case", cases(has_headers))
def test_safetensors_shards_have_torchs_own_bytes(case: Path) -> None:
    """Headers alone place every chunk of a distributed Hugging Face checkpoint."""
    files = {}
    for path in safetensors_files(case / "ckpt"):
        data = path.read_bytes()
        files[path.name] = parse_header(data, file_num_bytes=len(data))
    index = read_sharded_headers(files)
    expected = expected_of(case)
    assert set(index.entries) == set(expected)
    for entry in index.tensors:
        row = expected[entry.key]
        assert (entry.dtype, list(entry.shape)) == (dtype_named(row["dtype"]), row["shape"])
        whole = np.zeros((*entry.shape, entry.dtype.itemsize), np.uint8)
        for chunk in entry.chunks:
            place = tuple(map(slice, chunk.box.offsets, chunk.box.ends))
            payload = np.frombuffer(stored(case, chunk.item), np.uint8)
            whole[place] = payload.reshape(whole[place].shape)
        assert hashlib.sha256(whole.tobytes()).hexdigest() == row["sha256"]
