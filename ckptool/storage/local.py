"""A folder of this machine (or of a shared file system) as a store.

Whole objects are written under a hidden name, synced, renamed, and the folder synced:
after a crash an object is there whole, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from ckptool.errors import NotEmptyError, ShortReadError
from ckptool.model import Extent
from ckptool.storage._keys import check_key, join
from ckptool.storage.base import (
    Buffer,
    Capabilities,
    Listing,
    ObjectInfo,
    PartLimits,
    PendingUpload,
    Store,
    StoreRecipe,
)
from ckptool.storage.errors import translate
from ckptool.storage.local_writers import (
    LocalAssembly,
    LocalStream,
    is_hidden_name,
    publish,
    split_hidden_name,
    sync_folder,
    write_hidden,
)

__all__ = ["LocalStore"]

_CAPABILITIES = Capabilities(shared=True, assembly=True, conditional_put=True, append=True)
_LIMITS = PartLimits(min_bytes=1, max_bytes=2**62, max_parts=2**31, preferred_bytes=16 * 2**20)
_PREAD_BYTES = 2**30


class LocalStore:
    """Objects are the files below one folder, which need not be there yet."""

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None) -> None:
        self._url = url.rstrip("/") or url[:1]
        self._options = dict(options or {})
        path = re.sub(r"^(file|local)://", "", url)
        self._root = os.path.abspath(os.path.expanduser(path))

    def __repr__(self) -> str:
        return f"LocalStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def part_limits(self) -> PartLimits:
        return _LIMITS

    def url_of(self, key: str) -> str:
        return f"{self._url.rstrip('/')}/{key}" if key else self._url

    def child(self, key: str) -> LocalStore:
        return LocalStore(self.url_of(check_key(key)), options=self._options)

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        folder = self._folder(prefix)
        with self._translated("list", prefix):
            found = list(_walk(folder, join(prefix), frozenset()))
        return sorted(found, key=lambda info: info.key)

    def list_level(self, prefix: str = "") -> Listing:
        objects: list[ObjectInfo] = []
        folders: list[str] = []
        with self._translated("list", prefix):
            for entry in _scan(self._folder(prefix)):
                if entry.is_dir():
                    folders.append(entry.name)
                elif (info := _info_of(entry, join(prefix, entry.name))) is not None:
                    objects.append(info)
        objects.sort(key=lambda info: info.key)
        return Listing(tuple(objects), tuple(sorted(folders)))

    def info(self, key: str) -> ObjectInfo:
        with self._translated("read", key):
            status = os.stat(self._path(key))
            if not _is_file(status):
                raise FileNotFoundError(f"no file {self._path(key)}")
            return ObjectInfo(key, status.st_size, _time(status))

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        with self._opened(key) as fd:
            stop = max(start, os.fstat(fd).st_size if end is None else end)
            if stop - start <= _PREAD_BYTES:
                data = os.pread(fd, stop - start, start)
                if len(data) == stop - start:
                    return data
            buffer = bytearray(stop - start)
            self._fill(fd, Extent(key, start, stop), memoryview(buffer))
        return bytes(buffer)

    def read_many(self, extents: Sequence[Extent]) -> Sequence[bytes]:
        return [self.read(e.key, start=e.start, end=e.end) for e in extents]

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        with self._opened(extent.key) as fd:
            self._fill(fd, extent, buffer)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        path = self._path(key)
        with self._translated("write", key):
            if if_absent and os.path.lexists(path):
                raise self._taken(key)
            hidden = write_hidden(path, data, where=self.url_of(key))
            try:
                publish(hidden, path, if_absent=if_absent)
            except FileExistsError as exc:
                raise self._taken(key) from exc
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(hidden)
        return self.info(key)

    def append(self, key: str, data: Buffer) -> None:
        with self._translated("write", key), open(self._path(key), "ab", buffering=0) as file:
            view = memoryview(data).cast("B")
            while len(view):
                view = view[file.write(view) or 0 :]

    def open_stream(
        self, key: str, *, num_bytes: int | None = None, max_memory: int | None = None
    ) -> LocalStream:
        with self._translated("write", key):
            return LocalStream(self, key, path=self._path(key))

    def open_assembly(self, key: str, *, num_bytes: int) -> LocalAssembly:
        assembly = LocalAssembly(
            self, key, path=self._path(key), token=secrets.token_hex(8), num_bytes=num_bytes
        )
        with self._translated("write", key):
            assembly.preallocate()
        return assembly

    def attach_assembly(self, key: str, token: str, *, num_bytes: int) -> LocalAssembly:
        return LocalAssembly(self, key, path=self._path(key), token=token, num_bytes=num_bytes)

    def list_uploads(self, prefix: str = "") -> Sequence[PendingUpload]:
        found: list[PendingUpload] = []
        root = self._folder(prefix)
        with self._translated("list", prefix):
            for folder, _, names in os.walk(root):
                below = join(prefix, folder[len(root) :])
                for name, token in map(split_hidden_name, names):
                    if token is not None:
                        found.append(PendingUpload(join(below, name), token, None))
        return found

    def abort_upload(self, key: str, token: str) -> None:
        with self._translated("abort", key):
            self.attach_assembly(key, token, num_bytes=0).abort()

    def copies_from(self, other: Store) -> bool:
        return False

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translated("delete", key), contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            sync_folder(os.path.dirname(path))
            self._remove_empty(os.path.dirname(path))

    def recipe(self) -> StoreRecipe:
        return StoreRecipe(self._url, self._options)

    def _folder(self, prefix: str) -> str:
        return self._path(join(prefix)) if join(prefix) else self._root

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))

    def _remove_empty(self, folder: str) -> None:
        """Folders that hold nothing do not exist, as on an object store; the root stays."""
        while len(folder) > len(self._root):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def _fill(self, fd: int, extent: Extent, buffer: memoryview) -> None:
        view = buffer.cast("B")
        done = 0
        while done < len(view):
            got = _pread_into(fd, view[done : done + _PREAD_BYTES], extent.start + done)
            if not got:
                raise ShortReadError(
                    f"{self.url_of(extent.key)} ends at byte {extent.start + done}, "
                    f"but bytes {extent.start} to {extent.end} were asked for",
                    hint="the file is shorter than expected: run ckptool validate",
                    url=self.url_of(extent.key),
                    offset=extent.start + done,
                )
            done += got

    def _taken(self, key: str) -> NotEmptyError:
        return NotEmptyError(
            f"{self.url_of(key)} is already there",
            hint="choose another destination, or remove it first",
            url=self.url_of(key),
        )

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        with self._translated("read", key):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield fd
            finally:
                os.close(fd)

    @contextlib.contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise translate(exc, verb=verb, where=self.url_of(key)) from exc


def _pread_into(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    data = os.pread(fd, len(view), offset)
    view[: len(data)] = data
    return len(data)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not is_hidden_name(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(folder: str, key: str, above: frozenset[tuple[int, int]]) -> Iterator[ObjectInfo]:
    """Every file below; ``above`` holds the folders on the way, since links may form a ring."""
    if not os.path.isdir(folder):
        return
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    for entry in _scan(folder):
        if entry.is_dir():
            yield from _walk(entry.path, join(key, entry.name), above | {here})
        elif (info := _info_of(entry, join(key, entry.name))) is not None:
            yield info


def _info_of(entry: os.DirEntry[str], key: str) -> ObjectInfo | None:
    """None for what is no file, or vanished meanwhile, or is a link to nothing."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return None
    return ObjectInfo(key, status.st_size, _time(status)) if _is_file(status) else None


def _is_file(status: os.stat_result) -> bool:
    return (status.st_mode & 0o170000) == 0o100000


def _time(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, tz=timezone.utc)
