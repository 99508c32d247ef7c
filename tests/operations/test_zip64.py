"""An item of more than 4 GiB: zip64 records, from a sparse file, through every command."""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckptool.dtypes import dtype_named
from ckptool.engine.run import How
from ckptool.formats.crc import crc32, crc32_combine
from ckptool.formats.dcp_item import encode_item
from ckptool.formats.dcp_metadata import write_metadata
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry
from ckptool.operations.export import export
from ckptool.operations.inspect import inspect
from ckptool.operations.open import open_checkpoint
from ckptool.operations.reshard import reshard
from ckptool.operations.validate import validate

U8 = dtype_named("uint8")
LENGTH = (1 << 32) + (3 << 20) + 7
HALF = (LENGTH + 1) // 2
# first bytes, around 2 GiB where the halves meet, around 4 GiB, and the last ones
MARKS = {
    0: b"first",
    HALF - 4: b"<cut at half>",
    (1 << 32) - 5: b"<four GiB here>",
    LENGTH - 4: b"last",
}


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of one tensor in one item; the files of the test go when it ends."""
    # what is deleted again in a moment need not survive a crash
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    folder = tmp_path / "big"
    folder.mkdir()
    framing = encode_item(dtype=U8, shape=(LENGTH,))
    with open(folder / "__0_0.distcp", "wb") as file:
        file.write(framing.head)
        for at, mark in MARKS.items():
            file.seek(len(framing.head) + at)
            file.write(mark)
        file.seek(len(framing.head) + LENGTH)
        file.write(framing.tail(crc_of_marked_zeros()))
    chunk = Chunk(Box((0,), (LENGTH,)), Item("__0_0.distcp", 0, framing.length))
    entry = TensorEntry("model.w", U8, (LENGTH,), Chunks.of([chunk], num_dims=1), ("model", "w"))
    (folder / ".metadata").write_bytes(write_metadata(Index({"model.w": entry})))
    yield folder
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.unlink()


def crc_of_marked_zeros() -> int:
    """The CRC-32 of the payload, joined from runs of zeros and the marks."""
    crc, at = 0, 0
    for start, mark in MARKS.items():
        crc = crc32_combine(crc, crc_of_zeros(start - at), start - at)
        crc = crc32_combine(crc, crc32(mark), len(mark))
        at = start + len(mark)
    assert at == LENGTH
    return crc


def crc_of_zeros(num_bytes: int) -> int:
    """By doubling: nobody has to read gigabytes of zeros."""
    crc, unit, unit_num_bytes = 0, crc32(b"\0"), 1
    while num_bytes:
        if num_bytes & 1:
            crc = crc32_combine(crc, unit, unit_num_bytes)
        unit = crc32_combine(unit, unit, unit_num_bytes)
        num_bytes, unit_num_bytes = num_bytes >> 1, unit_num_bytes * 2
    return crc


def assert_holds(path: Path, *, start: int, first: int = 0, last: int = LENGTH) -> None:
    """Elements ``[first, last)`` stand at byte ``start`` of a file: the marks, and zeros around."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for at, mark in MARKS.items():
            a, b = max(at, first), min(at + len(mark), last)
            if a < b:
                assert data[start + a - first : start + b - first] == mark[a - at : b - at]
        for at in range(first + 64, last - 64, 257 << 20):
            here = data[start + at - first : start + at - first + 16]
            assert here == bytes(16) or any(abs(at - m) < 64 for m in MARKS)


def payload_starts(folder: Path) -> Sequence[tuple[Path, int, Box]]:
    """Where each chunk's payload begins, in order of rows."""
    (entry,) = open_checkpoint(str(folder)).index.tensors
    found = []
    for chunk in entry.chunks:
        assert chunk.item is not None
        head = len(encode_item(dtype=U8, shape=chunk.box.sizes).head)
        found.append((folder / chunk.item.file, chunk.item.offset + head, chunk.box))
    return found


def test_inspect_and_validate(big: Path) -> None:
    """Sizes beyond 32 bits are told right, and every byte is proved."""
    report = inspect(str(big))
    assert report.num_bytes == LENGTH
    assert report.entries[0].stored_bytes > LENGTH
    checked = validate(str(big), read_data=True)
    assert checked.is_ok, checked.findings
    assert checked.data is not None
    assert checked.data.num_ok == 1
    assert checked.data.num_bytes_read >= LENGTH


def test_reshard_and_back(big: Path, tmp_path: Path) -> None:
    """Cut in two at 2 GiB, and merged again into the very item that it was."""
    how = How(max_memory=256 << 20)
    reshard(str(big), str(tmp_path / "two"), to=2, how=how)
    chunks = payload_starts(tmp_path / "two")
    assert [str(box) for _, _, box in chunks] == [f"[0:{HALF}]", f"[{HALF}:{LENGTH}]"]
    for path, start, box in chunks:
        assert_holds(path, start=start, first=box.offsets[0], last=box.ends[0])
    (big / "__0_0.distcp").rename(tmp_path / "kept")
    reshard(str(tmp_path / "two"), str(tmp_path / "one"), to=1, merge=True, how=how)
    for path, _, _ in chunks:
        path.unlink()
    same(tmp_path / "kept", tmp_path / "one" / "__0_0.distcp")


def same(one: Path, two: Path) -> None:
    """Two files are equal; read in blocks."""
    assert one.stat().st_size == two.stat().st_size
    with open(one, "rb") as a, open(two, "rb") as b:
        while block := a.read(16 << 20):
            assert b.read(16 << 20) == block


def test_export(big: Path, tmp_path: Path) -> None:
    """Into a .pt whose own record is zip64, and into safetensors, with offsets beyond 32 bits."""
    how = How(max_memory=256 << 20)
    out = tmp_path / "x.pt"
    export(str(big), str(out), how=how)
    with zipfile.ZipFile(out) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
        assert (info.file_size, info.CRC) == (LENGTH, crc_of_marked_zeros())
    with open(out, "rb") as file:
        start = file.read(4096).index(b"first")
    assert_holds(out, start=start)
    tensor = pytest.importorskip("torch").load(out, mmap=True, weights_only=True)["w"]
    assert tensor.shape == (LENGTH,)
    for at, mark in MARKS.items():
        assert bytes(tensor[at : at + len(mark)].tolist()) == mark
    out.unlink()
    out = tmp_path / "x.safetensors"
    export(str(big), str(out), how=how)
    assert_holds(out, start=out.stat().st_size - LENGTH)
