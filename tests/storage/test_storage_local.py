"""What only a local folder has: full disks, crashes, links, and a start without s3fs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptool.errors import AccessError, NotEmptyError, StorageError
from ckptool.storage import local_writers, open_store

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def _write_all(store: Any, way: str, num_bytes: int) -> None:
    if way == "put":
        store.put("k", bytes(num_bytes))
        return
    if way == "assembly":
        assembly = store.open_assembly("k", num_bytes=num_bytes)
        assembly.commit([assembly.write_part(0, 0, bytes(num_bytes))])
        return
    stream = store.open_stream("k")
    try:
        stream.write(bytes(num_bytes))
        stream.commit()
    except BaseException:
        stream.abort()
        raise


@pytest.mark.parametrize("way", ["put", "assembly", "stream"])
def test_a_full_disk(small_disk: Path, way: str) -> None:
    """Writing more than fits says how much is free, leaves the old object and nothing else."""
    store = open_store(str(small_disk))
    store.put("k", b"before")
    with pytest.raises(StorageError, match=r"no space left .*/disk/k.* bytes are free"):
        _write_all(store, way, 2 * MIB)
    assert _names(small_disk) == ["k"]
    assert store.read("k") == b"before"
    _write_all(store, way, MIB // 2)
    assert store.info("k").num_bytes == MIB // 2


@pytest.mark.parametrize("way", ["put", "assembly", "stream"])
def test_a_disk_that_fills_up_meanwhile(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that finds no space later fails in the same words."""

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local_writers.os, "pwrite", full)
    with pytest.raises(StorageError, match="no space left"):
        _write_all(open_store(str(tmp_path)), way, 10)


def test_space_is_taken_at_the_start(tmp_path: Path) -> None:
    """An assembly holds its whole size on the disk before the first part."""
    store = open_store(str(tmp_path))
    assembly = store.open_assembly("k", num_bytes=3 * MIB)
    (hidden,) = tmp_path.iterdir()
    assert hidden.stat().st_size == 3 * MIB
    assembly.abort()
    assert _names(tmp_path) == []


def test_file_systems_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where space cannot be taken ahead, an assembly works all the same."""

    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(local_writers.os, "posix_fallocate", unsupported)
    store = open_store(str(tmp_path))
    _write_all(store, "assembly", 1000)
    assert store.info("k").num_bytes == 1000


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no hard links, a conditional put still refuses a taken name."""

    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(local_writers.os, "link", unsupported)
    store = open_store(str(tmp_path))
    store.put("k", b"first", if_absent=True)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(NotEmptyError, match="already there"):
        store.put("k", b"second", if_absent=True)
    assert store.read("k") == b"first"
    assert _names(tmp_path) == ["k"]


_KILLED = """
import os, sys
from ckptool.storage import open_store
store = open_store(sys.argv[1])
if sys.argv[2] == "stream":
    stream = store.open_stream("a.b/k")
    stream.write(bytes(2 * 2**20))
else:
    store.open_assembly("a.b/k", num_bytes=100).write_part(0, 0, bytes(50))
os._exit(9)
"""


@pytest.mark.parametrize("way", ["stream", "assembly"])
def test_a_killed_writer_leaves_no_object(tmp_path: Path, way: str) -> None:
    """What a killed process had written so far has no name in any listing."""
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), way], check=False)
    store = open_store(str(tmp_path))
    assert list(store.list()) == []
    assert store.list_level("a.b").objects == ()
    for root in (store, store.child("a.b")):
        (upload,) = root.list_uploads()
        assert root.url_of(upload.key) == store.url_of("a.b/k")
    store.abort_upload("a.b/k", upload.token)
    store.abort_upload("a.b/k", upload.token)
    assert _names(tmp_path) == ["a.b"]
    store.put("a.b/k", b"data")
    assert [o.key for o in store.list()] == ["a.b/k"]


def test_data_is_synced_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is: sync the file, rename it, sync the folder."""
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        events.append("sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")
        sync(fd)

    def rename(source: str, target: str) -> None:
        events.append("rename")
        replace(source, target)

    store = open_store(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    for way in ("put", "assembly", "stream"):
        events.clear()
        _write_all(store, way, 10)
        assert events == ["sync file", "rename", "sync folder"], way


def test_long_names(tmp_path: Path) -> None:
    """A name of 255 bytes can be written by every way, though a hidden name stands first."""
    store = open_store(str(tmp_path))
    name = "ä" * 127
    store.put(name, b"put")
    stream = store.open_stream(name)
    stream.write(b"stream")
    stream.commit()
    assert [o.key for o in store.list()] == [name]
    with pytest.raises(StorageError, match="shorter name"):
        store.put("x" * 300, b"")


def test_links_are_followed_once(tmp_path: Path) -> None:
    """A linked folder is listed; a ring of links ends."""
    store = open_store(str(tmp_path))
    store.put("step-1/x", b"x")
    (tmp_path / "latest").symlink_to("step-1")
    (tmp_path / "step-1" / "ring").symlink_to("..")
    (tmp_path / "dangling").symlink_to("nowhere")
    keys = [o.key for o in store.list()]
    assert "latest/x" in keys
    assert "step-1/x" in keys
    assert len(keys) < 10
    assert store.list_level().folders == ("latest", "step-1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    """Missing permission is an AccessError."""
    tmp_path.chmod(0o500)
    with pytest.raises(AccessError, match="owner and mode"):
        open_store(str(tmp_path)).put("k", b"")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing permission says what to check."""

    def denied(*arguments: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(local_writers.os, "open", denied)
    with pytest.raises(AccessError, match=r"cannot write .*/k: Permission denied.*owner and mode"):
        open_store(str(tmp_path)).put("k", b"")


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    """A file on the way is told by name; listing it finds nothing."""
    store = open_store(str(tmp_path))
    store.put("a", b"file")
    with pytest.raises(StorageError, match="a/b"):
        store.put("a/b", b"")
    with pytest.raises(StorageError, match="a/b"):
        store.read("a/b")
    assert list(store.list("a")) == []


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "{}/", "{}/x/.."])
def test_forms_of_a_path(tmp_path: Path, form: str) -> None:
    """Paths and file:// URLs name the same folder."""
    (tmp_path / "k").write_bytes(b"data")
    assert open_store(form.format(tmp_path)).read("k") == b"data"


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths start at the working directory, and later changes of it do not matter."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "k").write_bytes(b"data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    stores = [open_store("run"), open_store("./run"), open_store("~/run"), open_store(Path("run"))]
    with contextlib.chdir("/") if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        assert [store.read("k") for store in stores] == [b"data"] * 4
    assert stores[0].url == "run"
    assert stores[0].url_of("k") == "run/k"


def test_the_root_of_the_file_system() -> None:
    """/ is a root like any other."""
    store = open_store("/")
    assert store.url == "/"
    assert store.url_of("tmp") == "/tmp"
    assert "tmp" in store.list_level().folders


_LEAN = """
import sys
from ckptool.storage import open_store
store = open_store(sys.argv[1])
store.put("a.b/k", b"data")
assert store.read("a.b/k") == b"data" and store.list() and store.list_level("a.b")
heavy = {"torch", "fsspec", "s3fs", "aiobotocore", "botocore", "aiohttp", "asyncio"}
print(sorted(heavy & set(sys.modules)))
"""


def test_a_local_store_loads_no_client(tmp_path: Path) -> None:
    """Using a local path imports neither fsspec, s3fs nor torch."""
    command = [sys.executable, "-c", _LEAN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only some systems take the advice")
@pytest.mark.parametrize("way", ["put", "assembly", "stream"])
def test_the_disk_begins_with_each_part(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is written is on its way to the disk before the sync that waits for it."""
    events: list[Any] = []
    advise, sync = os.posix_fadvise, os.fsync

    def advised(fd: int, offset: int, num_bytes: int, advice: int) -> None:
        events.append((offset, num_bytes, advice))
        advise(fd, offset, num_bytes, advice)

    def synced(fd: int) -> None:
        events.append("sync")
        sync(fd)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "fsync", synced)
    _write_all(open_store(str(tmp_path / "run")), way, 2 * MIB)
    begun = events.index((0, 2 * MIB, os.POSIX_FADV_DONTNEED))
    assert "sync" in events[begun:]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only some systems take the advice")
def test_a_file_system_that_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused advice is no failure."""

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EINVAL, "no advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    store = open_store(str(tmp_path / "run"))
    _write_all(store, "assembly", 2 * MIB)
    assert store.read("k") == bytes(2 * MIB)


@pytest.mark.parametrize("way", ["stream", "assembly"])
def test_large_writes_go_down_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """No write is larger than 128 KiB, whatever is handed over, and each ends on a multiple of it.

    Larger ones take larger blocks of memory, which many virtual machines have to ask for.
    """
    pieces = []
    pwrite = os.pwrite

    def written(fd: int, data: Any, offset: int) -> int:
        pieces.append((offset, offset + len(data)))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", written)
    store = open_store(str(tmp_path))
    _write_all(store, way, 3 * MIB + 5)
    assert store.info("k").num_bytes == 3 * MIB + 5
    assert [start for start, _ in pieces] == list(range(0, 3 * MIB + 5, 2**17))
    assert max(end - start for start, end in pieces) == 2**17


def test_a_part_may_begin_and_end_anywhere(tmp_path: Path) -> None:
    """Pieces are cut at multiples of the file, and the bytes are those that were given."""
    data = bytes(range(256)) * 4099
    assembly = open_store(str(tmp_path)).open_assembly("k", num_bytes=len(data))
    cuts = [0, 1, 2**17 - 1, 2**17 + 1, 3 * 2**17, len(data)]
    parts = [
        assembly.write_part(number, start, data[start:end])
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
    ]
    assembly.commit(parts)
    assert (tmp_path / "k").read_bytes() == data
