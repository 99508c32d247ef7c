"""``ckpt.index``: what reshard writes of payloads is true, and what reads it stays as strict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_checkpoint import Saved, random_array, rows_of, write_checkpoint
from recording_store import RecordingStore

from ckptool.errors import DamagedError
from ckptool.formats.ckpt_index import Payloads, read_index, write_index
from ckptool.formats.crc import crc32
from ckptool.layout import INDEX_NAME, METADATA_NAME
from ckptool.model import Box, Index, TensorEntry
from ckptool.operations.export import export
from ckptool.operations.open import Checkpoint, open_checkpoint
from ckptool.operations.reshard import reshard
from ckptool.operations.validate import validate
from ckptool.storage import open_store

ARRAY = random_array((96, 64), "float32", seed=1)
HALVES = [Box((0, 32 * k), (96, 32)) for k in range(2)]
WHOLE = [Box((0, 0), (96, 64))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without ckpt.index, with every way in which items are stored."""
    folder = tmp_path_factory.mktemp("indexed") / "step-1"
    tensors = {
        "model.rows": rows_of(ARRAY, "float32", 32, 32, 32, 0),
        "model.columns": Saved(ARRAY, HALVES, "float32"),
        "model.zstd": Saved(ARRAY, WHOLE, "float32", stored="zstd"),
        "model.turned": Saved(ARRAY, WHOLE, "float32", stored="transposed"),
        "model.view": Saved(ARRAY, WHOLE, "float32", stored="view"),
        "model.scalar": Saved(np.float32(3).reshape(()), [Box((), ())], "float32"),
    }
    write_checkpoint(folder, tensors, values={"step": 1})
    return folder


@pytest.fixture
def indexed(plain, tmp_path) -> Path:
    """The same, resharded: with a ckpt.index beside it."""
    reshard(str(plain), str(tmp_path / "indexed"), to=4)
    return tmp_path / "indexed"


def opened(folder: Path) -> tuple[Checkpoint, dict[str, Payloads]]:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.payloads is not None
    return checkpoint, dict(checkpoint.payloads)


@pytest.mark.parametrize(
    "how", [{"to": 1}, {"to": 3}, {"to": 3, "merge": True}, {"to": 3, "compress": "zstd"}],
    ids=str,
)  # fmt: skip
def test_payloads_are_where_the_index_says(plain, tmp_path, how):
    """Of every chunk that it tells of, place, size and CRC-32 are those of the chunk's bytes."""
    dest = tmp_path / "dest"
    reshard(str(plain), str(dest), **how)
    checkpoint, payloads = opened(dest)
    assert checkpoint.form == "ckpt-index"
    known = unknown = 0
    for entry in checkpoint.index.tensors:
        for chunk, payload in zip(entry.chunks, payloads[entry.key], strict=True):
            assert chunk.item is not None
            if payload.offset is None:
                unknown += 1
                continue
            start = chunk.item.offset + payload.offset
            data = (dest / chunk.item.file).read_bytes()[start : start + payload.num_bytes]
            where = tuple(map(slice, chunk.box.offsets, chunk.box.ends))
            array = ARRAY if entry.shape else np.float32(3).reshape(())
            assert data == array[where].tobytes()
            assert payload.crc32 in ((crc32(data), None) if not data else (crc32(data),))
            known += 1
    assert known >= 5
    # of items that are kept though transposed, or wrapped, it tells nothing
    assert (unknown > 0) == (how["to"] == 1 or "compress" in how)
    assert validate(str(dest), read_data=True).is_ok


class Recorded:
    """The stores that an operation opens, by URL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stores: dict[str, RecordingStore] = {}
        for module in ("open", "export", "reshard"):
            monkeypatch.setattr(f"ckptool.operations.{module}.open_store", self._open)

    def _open(self, url: str, *, options: Any = None) -> RecordingStore:
        return self.stores.setdefault(url, RecordingStore(open_store(url, options=options)))


def test_an_export_reads_payloads_only(tmp_path, monkeypatch):
    """With ckpt.index no head and no tail of an item is read."""
    write_checkpoint(tmp_path / "a", {"model.w": rows_of(ARRAY, "float32", 48, 48)})
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=3, merge=True)
    recorded = Recorded(monkeypatch)
    report = export(str(tmp_path / "b"), str(tmp_path / "c")).report
    assert report is not None
    assert (report.payloads_proved, report.unverifiable) == (3, [])
    calls = recorded.stores[str(tmp_path / "b")].calls
    reads = [c for c in calls if c[0] == "read" and c[1].endswith(".distcp")]
    assert sum(end - start for _, _, start, end in reads) == ARRAY.nbytes
    assert len(reads) == 3


@pytest.mark.parametrize(
    "how", [{}, {"dtype": "bfloat16"}, {"everything": True, "format": "torch"}], ids=str
)
def test_the_same_export_without_the_index(indexed, tmp_path, how):
    """ckpt.index changes no byte of what is exported."""
    export(str(indexed), str(tmp_path / "with"), **how)
    (indexed / INDEX_NAME).unlink()
    export(str(indexed), str(tmp_path / "without"), **how)
    names = sorted(p.name for p in (tmp_path / "with").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "without").iterdir())
    for name in names:
        one, other = tmp_path / "with" / name, tmp_path / "without" / name
        assert one.read_bytes() == other.read_bytes()


def flip(folder: Path, checkpoint: Checkpoint, key: str, byte: int) -> None:
    entry = checkpoint.index.entries[key]
    assert isinstance(entry, TensorEntry)
    item = entry.chunks[0].item
    assert item is not None
    data = bytearray((folder / item.file).read_bytes())
    data[item.offset + byte] ^= 8
    (folder / item.file).write_bytes(data)


@pytest.mark.parametrize("key", ["model.rows", "model.columns", "model.zstd", "model.turned"])
def test_damage_is_found_by_the_index(indexed, tmp_path, key):
    """A flipped payload bit stops an export, whether the index tells of the payload or not."""
    flip(indexed, opened(indexed)[0], key, 1000)
    with pytest.raises(DamagedError, match=key.replace(".", r"\.")):
        export(str(indexed), str(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_framing_is_proved_all_the_same(indexed, tmp_path):
    """An item that is kept is proved with its framing, which the index does not tell of."""
    flip(indexed, opened(indexed)[0], "model.rows", 20)
    with pytest.raises(DamagedError):
        reshard(str(indexed), str(tmp_path / "out"), to=1)


def rewrite(folder: Path, **columns: Any) -> None:
    """A ckpt.index with other columns for model.rows, which goes with the same .metadata."""
    said = read_index((folder / INDEX_NAME).read_bytes())
    payloads = {**said.payloads}
    payloads["model.rows"] = replace(payloads["model.rows"], **columns)
    index = Index(said.index.entries, version=said.index.version)
    metadata = (folder / METADATA_NAME).read_bytes()
    (folder / INDEX_NAME).write_bytes(write_index(index, payloads=payloads, metadata=metadata))


def test_a_wrong_crc_in_the_index(indexed, tmp_path):
    """Bytes that are not what the index says are not exported."""
    crcs = opened(indexed)[1]["model.rows"].crc32s
    rewrite(indexed, crc32s=crcs ^ 1)
    with pytest.raises(DamagedError, match=r"model\.rows"):
        export(str(indexed), str(tmp_path / "out"))


def test_a_place_outside_of_the_item(indexed, tmp_path):
    """A payload that would reach beyond its item is named, and the index with it."""
    offsets = opened(indexed)[1]["model.rows"].offsets
    rewrite(indexed, offsets=np.where(offsets < 0, offsets, 10**6))
    with pytest.raises(DamagedError, match=r"(?s)model\.rows.*ckpt\.index|ckpt\.index"):
        export(str(indexed), str(tmp_path / "out"), only=["model.rows"])


def test_an_index_of_another_metadata_is_not_used(indexed, tmp_path):
    """Where .metadata was changed since, it wins: items are read as if there were no index."""
    offsets = opened(indexed)[1]["model.rows"].offsets
    rewrite(indexed, offsets=offsets)
    metadata = (indexed / METADATA_NAME).read_bytes()
    said = read_index((indexed / INDEX_NAME).read_bytes())
    other = write_index(said.index, payloads={}, metadata=metadata + b" ")
    (indexed / INDEX_NAME).write_bytes(other)
    assert open_checkpoint(str(indexed)).payloads is None
    report = export(str(indexed), str(tmp_path / "out")).report
    assert report is not None
    assert report.payloads_proved > 0
