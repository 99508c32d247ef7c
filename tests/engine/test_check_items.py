"""The item checker: large, wrapped and bare items, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from recording_store import RecordingStore

from ckptool.dtypes import dtype_named
from ckptool.engine.check_items import check_items
from ckptool.engine.item_verdict import Subject
from ckptool.errors import AccessError
from ckptool.formats.crc import crc32, crc32_combine
from ckptool.formats.dcp_item import encode_item, encode_value_item
from ckptool.formats.plain_values import encode_value
from ckptool.model import Box, Item
from ckptool.storage import open_store

F32 = dtype_named("float32")
U8 = dtype_named("uint8")
ZSTD = ("stream.zstd/1",)


def tensor_item(array, dtype=F32):
    """The item of an array, as torch writes it."""
    framing = encode_item(dtype=dtype, shape=array.shape)
    data = array.tobytes()
    return framing.head + data + framing.tail(crc32(data))


def subject(i, item, array, *, dtype=F32, **more):
    return Subject(i, f"t{i}", item, dtype, Box((0,) * array.ndim, array.shape), **more)


@pytest.fixture
def store(tmp_path):
    return RecordingStore(open_store(str(tmp_path)))


def check(store, subjects, *, jobs=1, max_memory=1 << 20):
    return list(check_items(store, subjects, jobs=jobs, max_memory=max_memory))


def test_a_large_item_is_read_in_bounded_blocks(store, tmp_path):
    """No read is larger than the memory bound allows, and the payload is read once."""
    array = np.arange(1_500_000, dtype=np.float32)
    data = tensor_item(array)
    (tmp_path / "f").write_bytes(data)
    (result,) = check(store, [subject(0, Item("f", 0, len(data)), array)])
    assert (result.status, result.findings, result.crc32) == ("ok", (), crc32(array.tobytes()))
    reads = [end - start for verb, _, start, end in store.calls if verb == "read"]
    assert max(reads) <= 256 << 10
    assert sum(reads) < len(data) + 10_000


@pytest.mark.parametrize("at", [0, 777_777, 5_999_999])
def test_a_flipped_bit_of_a_large_item(store, tmp_path, at):
    """One bit anywhere in a payload of many blocks is found, and its file and byte are told."""
    array = np.arange(1_500_000, dtype=np.float32)
    data = bytearray(b"before" + tensor_item(array))
    start = 6 + len(encode_item(dtype=F32, shape=array.shape).head)
    data[start + at] ^= 1
    (tmp_path / "f").write_bytes(data)
    (result,) = check(store, [subject(0, Item("f", 6, len(data) - 6), array)])
    assert result.status == "damaged"
    assert [(f.code, f.file, f.offset) for f in result.findings] == [
        ("damaged-payload", "f", start)
    ]


def test_an_item_of_more_than_4_gib(store, tmp_path):
    """Sizes beyond 32 bits (zip64) are read right; the file is sparse."""
    shape = ((1 << 32) + 5,)
    framing = encode_item(dtype=U8, shape=shape)
    block = bytes(1 << 24)
    crc, part = 0, crc32(block)
    for _ in range(shape[0] >> 24):
        crc = crc32_combine(crc, part, len(block))
    crc = crc32_combine(crc, crc32(b"tail!"), 5)
    with open(tmp_path / "f", "wb") as file:
        file.write(framing.head)
        file.seek(len(framing.head) + shape[0] - 5)
        file.write(b"tail!" + framing.tail(crc))
    item = Item("f", 0, framing.length)
    whole = Subject(0, "big", item, U8, Box((0,), shape))
    (result,) = check(store, [whole], max_memory=64 << 20)
    assert (result.status, result.num_bytes > shape[0]) == ("ok", True)
    with open(tmp_path / "f", "r+b") as file:
        file.seek(3_000_000_000)
        file.write(b"x")
    (result,) = check(store, [whole], max_memory=64 << 20)
    assert [f.code for f in result.findings] == ["damaged-payload"]


def test_neighbours_are_read_together(store, tmp_path):
    """A thousand small items side by side are a few requests, and come back in order."""
    arrays = [np.full(3, i, np.float32) for i in range(1000)]
    items, data = [], b""
    for array in arrays:
        item = tensor_item(array)
        items.append(Item("f", len(data), len(item)))
        data += item
    (tmp_path / "f").write_bytes(data)
    subjects = [
        subject(i, item, array) for i, (item, array) in enumerate(zip(items, arrays, strict=True))
    ]
    results = check(store, subjects, jobs=3, max_memory=12 << 20)
    assert [r.subject.id for r in results] == list(range(1000))
    assert {r.status for r in results} == {"ok"}
    assert store.requests["read"] <= 3
    assert store.num_bytes["read"] == len(data)


def test_wrapped_items_are_decompressed(store, tmp_path):
    """zstd items are proved as streams; a flipped bit in one is found."""
    array = np.arange(50_000, dtype=np.float32)
    data = zstandard.ZstdCompressor().compress(tensor_item(array))
    (tmp_path / "f").write_bytes(data)
    item = Item("f", 0, len(data), ZSTD)
    (result,) = check(store, [subject(0, item, array)])
    assert (result.status, result.crc32) == ("ok", crc32(array.tobytes()))
    broken = bytearray(data)
    broken[len(data) // 2] ^= 4
    (tmp_path / "f").write_bytes(broken)
    (result,) = check(store, [subject(0, item, array)])
    assert result.status == "damaged"
    (tmp_path / "f").write_bytes(data[:-9])
    cut = Item("f", 0, len(data) - 9, ZSTD)
    (result,) = check(store, [subject(0, cut, array)])
    assert result.status == "damaged"


def test_a_decompression_bomb_is_stopped(store, tmp_path):
    """What decompresses to more than the index declares is damage, long before it is large."""
    array = np.zeros(4, np.float32)
    bomb = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    (tmp_path / "f").write_bytes(bomb)
    (result,) = check(store, [subject(0, Item("f", 0, len(bomb), ZSTD), array)])
    assert [f.code for f in result.findings] == ["damaged-item"]
    assert "decompresses to more than" in result.findings[0].message


def test_an_unknown_wrapping_is_a_warning(store, tmp_path):
    """What cannot be unwrapped is not called ok, nor damaged."""
    (tmp_path / "f").write_bytes(bytes(100))
    item = Item("f", 0, 100, ("stream.lz9/1",))
    (result,) = check(store, [subject(0, item, np.zeros(4, np.float32))])
    assert result.status == "unverifiable"
    assert [(f.code, f.severity) for f in result.findings] == [("not-checked", "warning")]
    assert "stream.lz9/1" in result.findings[0].message


def test_bare_payloads_are_unverifiable(store, tmp_path):
    """Without framing nothing tells what the bytes should be; they are read only if asked."""
    (tmp_path / "f").write_bytes(b"abcdefgh")
    array = np.zeros(2, np.float32)
    item = Item("f", 0, 8, ("payload",))
    (quiet,) = check(store, [subject(0, item, array)])
    (asked,) = check(store, [subject(0, item, array, wants_crc=True)])
    assert (quiet.status, quiet.crc32) == ("unverifiable", None)
    assert (asked.status, asked.crc32) == ("unverifiable", crc32(b"abcdefgh"))


def test_values_are_proved(store, tmp_path):
    """A value's item is parsed and its CRC-32s compared."""
    data = encode_value_item(encode_value({"lr": 0.1, "betas": (0.9, 0.95)}))
    (tmp_path / "f").write_bytes(data)
    value = Subject(0, "v", Item("f", 0, len(data)))
    assert [r.status for r in check(store, [value])] == ["ok"]
    broken = data.replace(b"betas", b"betaz")
    (tmp_path / "f").write_bytes(broken)
    (result,) = check(store, [value])
    assert (result.status, result.findings[0].entry) == ("damaged", "v")


def test_garbage_is_damage(store, tmp_path):
    """An item that is no zip at all is named, and its neighbours are still checked."""
    array = np.zeros(4, np.float32)
    good = tensor_item(array)
    (tmp_path / "f").write_bytes(bytes(500) + good)
    results = check(
        store,
        [subject(0, Item("f", 0, 500), array), subject(1, Item("f", 500, len(good)), array)],
    )
    assert [r.status for r in results] == ["damaged", "ok"]


def test_a_file_that_vanished_is_a_finding(store, tmp_path):
    """An object that is gone or shorter than it was listed does not end the check."""
    array = np.zeros(4, np.float32)
    good = tensor_item(array)
    (tmp_path / "a").write_bytes(good)
    (tmp_path / "c").write_bytes(good[:-100])
    subjects = [subject(i, Item(f, 0, len(good)), array) for i, f in enumerate("abc")]
    results = check(store, subjects)
    assert [r.status for r in results] == ["ok", "damaged", "damaged"]
    assert [f.code for r in results for f in r.findings] == ["unreadable", "unreadable"]


def test_a_failing_store_raises(store, tmp_path, monkeypatch):
    """Lost access is not damage: it ends the check with the store's own error."""

    def refuse(key, *, start=0, end=None):
        raise AccessError("403")

    monkeypatch.setattr(store, "read", refuse)
    with pytest.raises(AccessError):
        check(store, [subject(0, Item("a", 0, 10), np.zeros(4, np.float32))])


def test_a_payload_that_the_index_does_not_know(store, tmp_path):
    """A sound item in another's place is caught by the CRC-32 that the index keeps."""
    array = np.arange(4, dtype=np.float32)
    data = tensor_item(array)
    (tmp_path / "f").write_bytes(data)
    item = Item("f", 0, len(data))
    right, wrong = crc32(array.tobytes()), crc32(b"another")
    results = check(
        store, [subject(0, item, array, known_crc=c) for c in (right, wrong)], max_memory=1 << 20
    )
    assert [r.status for r in results] == ["ok", "damaged"]
    assert [f.code for f in results[1].findings] == ["other-payload"]
