"""How bytes become a local file: under a hidden name first, then synced and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from isal import isal_zlib

from ckptool.errors import StorageError
from ckptool.storage.base import Buffer, ObjectInfo, PartReceipt
from ckptool.storage.errors import out_of_space, translate
from ckptool.storage.parts import check_parts, wrong_size

if TYPE_CHECKING:
    from ckptool.storage.local import LocalStore

__all__ = [
    "LocalAssembly",
    "LocalStream",
    "is_hidden_name",
    "publish",
    "split_hidden_name",
    "sync_folder",
    "write_hidden",
]

_HIDDEN = re.compile(r"\.(.*)\.([0-9a-f]{16})\.ckptool-part")
_MAX_NAME_BYTES = 200
_BUFFER_BYTES = 2**20
_WRITE_BYTES = 2**17


class LocalStream:
    """A file written in order; large writes go straight down, small ones are gathered."""

    def __init__(self, store: LocalStore, key: str, *, path: str) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._hidden = hidden_path(path, secrets.token_hex(8))
        self._fd: int | None = _create(self._hidden)
        self._pending = bytearray()
        self._num_bytes = 0

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if len(self._pending) + len(view) < _BUFFER_BYTES:
            self._pending += view
            return
        self._flush()
        self._write(view)

    def commit(self) -> ObjectInfo:
        self._flush()
        assert self._fd is not None
        with _translated(self._store.url_of(self._key)):
            os.fsync(self._fd)
            if os.fstat(self._fd).st_size != self._num_bytes:
                stored = os.fstat(self._fd).st_size
                raise wrong_size(self._store.url_of(self._key), self._num_bytes, stored)
            self._close()
            publish(self._hidden, self._path)
        return self._store.info(self._key)

    def abort(self) -> None:
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._hidden)

    def _flush(self) -> None:
        self._write(memoryview(self._pending))
        self._pending = bytearray()

    def _write(self, view: memoryview) -> None:
        where = self._store.url_of(self._key)
        if self._fd is None:
            raise StorageError(f"{where} is closed: it was committed or aborted", url=where)
        with _translated(where):
            _pwrite_all(self._fd, view, self._num_bytes)
        self._num_bytes += len(view)

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class LocalAssembly:
    """A file of known size, preallocated under a hidden name and written in any order."""

    def __init__(
        self, store: LocalStore, key: str, *, path: str, token: str, num_bytes: int
    ) -> None:
        self._store = store
        self._key = key
        self._path = path
        self._token = token
        self._hidden = hidden_path(path, token)
        self._num_bytes = num_bytes
        self._fd: int | None = None
        self._lock = threading.Lock()

    @property
    def token(self) -> str:
        return self._token

    def preallocate(self) -> None:
        """Take the space now: a full disk is found before the work, not in its middle."""
        self._fd = _create(self._hidden)
        try:
            _take_space(self._fd, self._num_bytes)
        except OSError as exc:
            if exc.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                os.ftruncate(self._fd, self._num_bytes)
                return
            self.abort()
            if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                where = self._store.url_of(self._key)
                raise out_of_space(self._path, where=where, num_bytes=self._num_bytes) from exc
            raise

    def write_part(
        self, number: int, offset: int, data: Buffer, *, crc32: int | None = None
    ) -> PartReceipt:
        view = memoryview(data).cast("B")
        where = self._store.url_of(self._key)
        if offset + len(view) > self._num_bytes:
            raise StorageError(
                f"part {number} ends at byte {offset + len(view)} of {where}, "
                f"which has {self._num_bytes}",
                url=where,
            )
        with _translated(where):
            _pwrite_all(self._opened(), view, offset)
        return PartReceipt(number, len(view))

    def surviving(self, claims: Sequence[tuple[PartReceipt, int, int | None]]) -> set[int]:
        """Parts whose bytes still have the CRC-32 that they had; they are read again."""
        there: set[int] = set()
        with _translated(self._store.url_of(self._key)):
            fd = self._opened()
            for receipt, offset, crc32 in claims:
                if crc32 is not None and crc32 == _crc_of(fd, offset, receipt.num_bytes):
                    there.add(receipt.number)
        return there

    def listed_parts(self) -> Sequence[PartReceipt]:
        return ()

    def commit(self, parts: Sequence[PartReceipt]) -> ObjectInfo:
        where = self._store.url_of(self._key)
        check_parts(parts, num_bytes=self._num_bytes, where=where)
        with _translated(where):
            fd = self._opened()
            os.fsync(fd)
            stored = os.fstat(fd).st_size
            if stored != self._num_bytes:
                raise wrong_size(where, self._num_bytes, stored)
            self._close()
            publish(self._hidden, self._path)
        return self._store.info(self._key)

    def abort(self) -> None:
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._hidden)

    def __del__(self) -> None:
        self._close()  # one that was only attached is committed elsewhere

    def _opened(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self._hidden, os.O_RDWR | os.O_CLOEXEC)
            return self._fd

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _take_space(fd: int, num_bytes: int) -> None:
    """Give a file its size, and its room on the disk where that costs nothing."""
    if num_bytes and hasattr(os, "posix_fallocate") and not _is_in_memory(fd):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    free = os.fstatvfs(fd)
    if num_bytes > free.f_bavail * free.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)


def _is_in_memory(fd: int) -> bool:
    """Whether a file is on a tmpfs (Linux), where taking room means to write it all."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as mounts:
            rows = [line.split() for line in mounts]
    except OSError:
        return False
    return any(row[2] == number and row[row.index("-") + 1] == "tmpfs" for row in rows)


def _crc_of(fd: int, offset: int, num_bytes: int) -> int:
    crc = 0
    for start in range(offset, offset + num_bytes, _BUFFER_BYTES):
        data = os.pread(fd, min(_BUFFER_BYTES, offset + num_bytes - start), start)
        crc = int(isal_zlib.crc32(data, crc))
    return crc


def hidden_path(path: str, token: str) -> str:
    """Where a file's bytes stand until it is published: beside it, never listed."""
    folder, name = os.path.split(path)
    short = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return os.path.join(folder, f".{short}.{token}.ckptool-part")


def is_hidden_name(name: str) -> bool:
    """Whether a name is that of a file that is still being written."""
    return _HIDDEN.fullmatch(name) is not None


def split_hidden_name(name: str) -> tuple[str, str | None]:
    """The name that a hidden file is to get and its token; None for any other file."""
    match = _HIDDEN.fullmatch(name)
    return (match.group(1), match.group(2)) if match else (name, None)


def write_hidden(path: str, data: Buffer, *, where: str) -> str:
    """Write and sync a hidden file beside ``path``; returns its path."""
    hidden = hidden_path(path, secrets.token_hex(8))
    fd = _create(hidden)
    try:
        view = memoryview(data).cast("B")
        _pwrite_all(fd, view, 0)
        os.fsync(fd)
        if os.fstat(fd).st_size != len(view):
            raise wrong_size(where, len(view), os.fstat(fd).st_size)
    except BaseException:
        os.unlink(hidden)
        raise
    finally:
        os.close(fd)
    return hidden


def publish(hidden: str, path: str, *, if_absent: bool = False) -> None:
    """Give a synced file its name; with ``if_absent``, FileExistsError when it is taken."""
    if if_absent:
        _link(hidden, path)
    else:
        os.replace(hidden, path)
    sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Make names in a folder survive a crash; file systems that cannot are left alone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def _link(hidden: str, path: str) -> None:
    try:
        os.link(hidden, path)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here: taking the name first keeps two writers apart.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        os.replace(hidden, path)


def _create(hidden: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    folder = os.path.dirname(hidden)
    for _ in range(10):
        _make_folder(folder)
        # Another process may remove the folder, still empty, in between.
        with contextlib.suppress(FileNotFoundError):
            return os.open(hidden, flags, 0o666)
    return os.open(hidden, flags, 0o666)


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        sync_folder(parent)


def _pwrite_all(fd: int, view: memoryview, offset: int) -> None:
    """Write all of it, at most to the next multiple of 128 KiB of the file at a time, as cp does.

    For a larger write Linux takes larger page-cache folios, up to 2 MiB. A virtual machine with
    free page reporting has given blocks of that size back to its host, which must find memory for
    each one again: one export took 0.9 to 6 s so. Folios of 128 KiB come from what is in use.
    """
    done = 0
    while done < len(view):
        at = offset + done
        room = _WRITE_BYTES - at % _WRITE_BYTES
        done += os.pwrite(fd, view[done : done + room], at)
    _start_writeback(fd, offset, len(view))


def _start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin with what was written, or the sync at the end waits for all of it.

    Linux starts to write dirty pages that nobody needs any more, and does not wait for them.
    """
    if num_bytes >= _BUFFER_BYTES and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice, which a file system need not take
            os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise translate(exc, verb="write", where=where) from exc
