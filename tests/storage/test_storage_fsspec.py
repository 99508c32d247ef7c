"""What stores of other fsspec protocols promise, memory:// and a generic one."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from ckptool.errors import (
    ObjectMissingError,
    RefusedError,
    ShortReadError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptool.model import Extent
from ckptool.storage import open_store
from ckptool.storage.fsspec_store import FsspecStore


@pytest.fixture
def generic(tmp_path: Path) -> FsspecStore:
    """A store over a file system that we know nothing special about."""
    filesystem = DirFileSystem(str(tmp_path), LocalFileSystem())
    return FsspecStore(filesystem, "root", url="odd://place", options={}, deadline_s=1)


def test_a_generic_store_is_written_in_order(generic: FsspecStore) -> None:
    """It declares no assembly, and a stream of it appears at commit only."""
    assert not generic.capabilities.assembly
    assert generic.capabilities.shared
    with pytest.raises(RefusedError, match="cannot be written in parts"):
        generic.open_assembly("k", num_bytes=1)
    stream = generic.open_stream("a/k")
    stream.write(b"one ")
    stream.write(memoryview(b"two"))
    assert list(generic.list()) == []
    assert stream.commit().num_bytes == 7
    assert generic.read("a/k") == b"one two"
    assert [o.key for o in generic.list()] == ["a/k"]
    assert generic.list_level().folders == ("a",)
    generic.put("b", b"x", if_absent=True)
    generic.delete("b")
    assert [o.modified is not None for o in generic.list()] == [True]


def test_a_generic_read_that_stays_short(
    generic: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that do not come, though the object has them, are asked for again, then an error."""
    generic.put("k", b"0123456789")
    calls: list[int] = []

    def short(path: str, start: int | None = None, end: int | None = None) -> bytes:
        calls.append(1)
        return b"01" if len(calls) < 3 else b"0123456789"[start:end]

    monkeypatch.setattr(generic._fs, "cat_file", short)
    assert generic.read("k", start=0, end=4) == b"0123"
    assert len(calls) == 3
    monkeypatch.setattr(generic._fs, "cat_file", lambda path, start=None, end=None: b"01")
    with pytest.raises(ShortReadError, match="odd://place/k at byte 0"):
        generic.read("k", start=0, end=4)


def test_a_generic_upload_of_other_size(
    generic: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object whose stored size differs from what was sent is an error."""
    write = generic._fs.pipe_file
    monkeypatch.setattr(generic._fs, "pipe_file", lambda path, data: write(path, data + b"+"))
    with pytest.raises(StorageError, match="4 bytes after 3 were sent"):
        generic.put("k", b"abc")


def test_memory_is_of_one_process() -> None:
    """memory:// declares that other processes do not see it."""
    store = open_store("memory://x")
    assert not store.capabilities.shared
    assert store.capabilities.assembly
    with pytest.raises(StorageError, match="one process"):
        store.attach_assembly("k", "token-of-another", num_bytes=1)


def test_memory_is_fsspecs_own() -> None:
    """What other code put into fsspec's memory is seen, and the other way round."""
    root = uuid.uuid4().hex
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file(f"/{root}/theirs", b"data")
    store = open_store(f"memory://{root}")
    assert store.read("theirs") == b"data"
    store.put("ours", b"data")
    assert filesystem.cat_file(f"/{root}/ours") == b"data"


def test_unknown_protocols_and_missing_packages() -> None:
    """A protocol that nobody knows is a wrong call; one whose package is missing names it."""
    with pytest.raises(UsageError, match="s4"):
        open_store("s4://bucket/x")
    known: dict[str, Any] = {
        "class": "no_such_package.FileSystem",
        "err": "install no_such_package",
    }
    known_implementations["gone"] = known
    try:
        with pytest.raises(UnsupportedError, match="no_such_package"):
            open_store("gone://x")
    finally:
        del known_implementations["gone"]


def test_urls_hide_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """User name and password in a URL do not show."""
    filesystem = LocalFileSystem()
    store = FsspecStore(filesystem, "/x", url="ftp://me:secret@host/x", options={}, deadline_s=1)
    assert store.url == "ftp://host/x"
    assert store.child("k").url == "ftp://host/x/k"
    assert "secret" not in repr(store) + store.url_of("k")
    assert store.recipe().url == "ftp://me:secret@host/x"


def test_an_asynchronous_file_system_reads_ranges_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranges are one call where the file system can; a failure in one is raised."""
    filesystem = AsyncFileSystemWrapper(LocalFileSystem())
    store = FsspecStore(filesystem, str(tmp_path), url="odd://x", options={}, deadline_s=1)
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").write_bytes(b"abc")
    monkeypatch.setattr(store, "read", None)
    extents = [Extent("b", 1, 3), Extent("a", 4, 4), Extent("a", 0, 9)]
    assert list(store.read_many(extents)) == [b"bc", b"", b"012345678"]
    with pytest.raises(ShortReadError, match="the object has 3"):
        store.read_many([Extent("a", 0, 1), Extent("b", 1, 9)])
    with pytest.raises(ObjectMissingError):
        store.read_many([Extent("gone", 0, 1)])
    assert list(store.read_many([Extent("a", 4, 4)])) == [b""]
