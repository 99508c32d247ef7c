"""Any other fsspec protocol as a store: written in order by one writer.

Streams are gathered in a local temporary file and uploaded at commit, since few file systems
of fsspec can drop a half-written object. ``memory://`` can also assemble, inside one process.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from ckptool.errors import (
    NotEmptyError,
    ObjectMissingError,
    RefusedError,
    ShortReadError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptool.model import Extent
from ckptool.storage._keys import check_key
from ckptool.storage.base import (
    Assembly,
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
from ckptool.storage.fsspec_writers import ASSEMBLIES, MemoryAssembly, SpooledStream
from ckptool.storage.parts import wrong_size
from ckptool.storage.retry import DEADLINE_S, Patience, retry

__all__ = ["FsspecStore"]

T = TypeVar("T")

_LIMITS = PartLimits(min_bytes=1, max_bytes=2**62, max_parts=2**31, preferred_bytes=16 * 2**20)


class FsspecStore:
    """Objects below a root of one fsspec file system."""

    def __init__(
        self, filesystem: Any, root: str, *, url: str, options: Mapping[str, Any], deadline_s: float
    ) -> None:
        self._fs = filesystem
        self._root = root
        self._url = url
        self._options = options
        self._deadline_s = deadline_s
        protocols = filesystem.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        self._in_memory = "memory" in names
        self._capabilities = Capabilities(shared=not self._in_memory, assembly=self._in_memory)

    @classmethod
    def open(cls, url: str, *, options: Mapping[str, Any] | None = None) -> FsspecStore:
        import fsspec

        given = dict(options or {})
        passed = {k: v for k, v in given.items() if k != "ckptool_deadline_s"}
        passed.setdefault("use_listings_cache", False)
        try:
            filesystem, root = fsspec.core.url_to_fs(url, **passed)
        except ImportError as exc:
            raise UnsupportedError(
                f"{_public(url)} needs a package that is not installed: {exc}",
                hint="install it with pip, then run the same command again",
            ) from exc
        except ValueError as exc:
            raise UsageError(
                f"{_public(url)} cannot be opened: {exc}", hint="check the URL's protocol"
            ) from exc
        deadline_s = float(given.get("ckptool_deadline_s", DEADLINE_S))
        root = root.rstrip("/") or root[:1]
        return cls(filesystem, root, url=url.rstrip("/"), options=given, deadline_s=deadline_s)

    def __reduce__(self) -> Any:
        raise TypeError("a store holds secrets: send its recipe() and open_recipe() it there")

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    @property
    def url(self) -> str:
        return _public(self._url)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def part_limits(self) -> PartLimits:
        return _LIMITS

    def url_of(self, key: str) -> str:
        return _below(self.url, key)

    def child(self, key: str) -> FsspecStore:
        return FsspecStore(
            self._fs,
            self._path(check_key(key)),
            url=_below(self._url, key),
            options=self._options,
            deadline_s=self._deadline_s,
        )

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        def attempt() -> dict[str, Any]:
            try:
                return cast("dict[str, Any]", self._fs.find(self._path(prefix), detail=True))
            except FileNotFoundError:
                return {}

        found = self._try("list", prefix, attempt)
        infos = [self._info(path, detail) for path, detail in found.items()]
        return sorted(infos, key=lambda info: info.key)

    def list_level(self, prefix: str = "") -> Listing:
        folder = self._path(prefix)

        def attempt() -> Sequence[dict[str, Any]]:
            try:
                return cast("Sequence[dict[str, Any]]", self._fs.ls(folder, detail=True))
            except (FileNotFoundError, NotADirectoryError):
                return []

        rows = [r for r in self._try("list", prefix, attempt) if _trim(r["name"]) != _trim(folder)]
        objects = [self._info(r["name"], r) for r in rows if r["type"] != "directory"]
        folders = [_trim(r["name"]).rsplit("/", 1)[-1] for r in rows if r["type"] == "directory"]
        objects.sort(key=lambda info: info.key)
        return Listing(tuple(objects), tuple(sorted(folders)))

    def info(self, key: str) -> ObjectInfo:
        def attempt() -> ObjectInfo:
            detail = self._fs.info(self._path(check_key(key)))
            if detail["type"] == "directory":
                raise FileNotFoundError(f"{self.url_of(key)} is a folder")
            return ObjectInfo(key, int(detail["size"] or 0), _modified(detail))

        return self._try("read", key, attempt)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        path = self._path(check_key(key))

        def attempt() -> bytes:
            if end is not None and end <= start:
                return b""
            data = bytes(self._fs.cat_file(path, start=start or None, end=end))
            if end is not None and len(data) != end - start:
                raise self._short(key, start, end, len(data))
            return data

        return self._try("read", key, attempt)

    def read_many(self, extents: Sequence[Extent]) -> Sequence[bytes]:
        if not self._fs.async_impl:
            return [self.read(e.key, start=e.start, end=e.end) for e in extents]
        wanted = [extent for extent in extents if extent.num_bytes]
        found = iter(self._read_ranges(wanted) if wanted else ())
        return [next(found) if extent.num_bytes else b"" for extent in extents]

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        buffer.cast("B")[:] = self.read(extent.key, start=extent.start, end=extent.end)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        path = self._path(check_key(key))
        if if_absent and self._exists(key):
            raise NotEmptyError(
                f"{self.url_of(key)} is already there",
                hint="choose another destination, or remove it first",
                url=self.url_of(key),
            )
        body = bytes(data)
        self._try("write", key, lambda: self._write(path, lambda: self._fs.pipe_file(path, body)))
        return self._check_size(key, len(body))

    def append(self, key: str, data: Buffer) -> None:
        raise RefusedError(f"{self.url_of(key)} cannot be appended to")

    def open_stream(
        self, key: str, *, num_bytes: int | None = None, max_memory: int | None = None
    ) -> SpooledStream:
        check_key(key)
        return SpooledStream(self, key)

    def open_assembly(self, key: str, *, num_bytes: int) -> Assembly:
        if not self._capabilities.assembly:
            raise RefusedError(
                f"{self.url_of(key)} cannot be written in parts: only s3://, local paths and "
                "memory:// can",
                hint="write it as a stream",
            )
        token = secrets.token_hex(8)
        ASSEMBLIES[token] = bytearray(num_bytes)
        return MemoryAssembly(self, check_key(key), token)

    def attach_assembly(self, key: str, token: str, *, num_bytes: int) -> Assembly:
        if token not in ASSEMBLIES:
            raise StorageError(
                f"{self.url_of(key)} is not being written by this process",
                hint="memory:// is seen by one process only: use threads",
            )
        return MemoryAssembly(self, check_key(key), token)

    def list_uploads(self, prefix: str = "") -> Sequence[PendingUpload]:
        return ()

    def abort_upload(self, key: str, token: str) -> None:
        ASSEMBLIES.pop(token, None)

    def copies_from(self, other: Store) -> bool:
        return False

    def delete(self, key: str) -> None:
        path = self._path(check_key(key))

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        self._try("delete", key, attempt)

    def recipe(self) -> StoreRecipe:
        return StoreRecipe(self._url, self._options)

    def upload_file(self, key: str, file: Any, *, num_bytes: int) -> ObjectInfo:
        """Publish what a temporary file holds."""
        path = self._path(key)

        def attempt() -> None:
            self._fs.put_file(file.name, path)

        self._try("write", key, lambda: self._write(path, attempt))
        return self._check_size(key, num_bytes)

    def _read_ranges(self, extents: Sequence[Extent]) -> Sequence[bytes]:
        """Several ranges at once, where the file system can."""
        paths = [self._path(check_key(extent.key)) for extent in extents]
        starts = [extent.start for extent in extents]
        ends = [extent.end for extent in extents]

        def attempt() -> Sequence[bytes]:
            found = self._fs.cat_ranges(paths, starts, ends, on_error="raise")
            for extent, data in zip(extents, found, strict=True):
                if len(data) != extent.num_bytes:
                    raise self._short(extent.key, extent.start, extent.end, len(data))
            return cast("Sequence[bytes]", found)

        return self._try("read", extents[0].key, attempt)

    def _write(self, path: str, write: Callable[[], Any]) -> None:
        if not self._in_memory:
            with contextlib.suppress(NotImplementedError):
                self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        write()

    def _check_size(self, key: str, num_bytes: int) -> ObjectInfo:
        info = self.info(key)
        if info.num_bytes != num_bytes:
            raise wrong_size(self.url_of(key), num_bytes, info.num_bytes)
        return info

    def _exists(self, key: str) -> bool:
        try:
            self.info(key)
        except ObjectMissingError:
            return False
        return True

    def _short(self, key: str, start: int, end: int, num_bytes: int) -> ShortReadError:
        size = self.info(key).num_bytes
        return ShortReadError(
            f"{num_bytes} bytes came from {self.url_of(key)} at byte {start}, "
            f"{end - start} were asked for; the object has {size}",
            hint="run ckptool validate on the checkpoint",
            url=self.url_of(key),
            offset=start,
            transient=size >= end,
        )

    def _info(self, path: str, detail: Mapping[str, Any]) -> ObjectInfo:
        key = _trim(path)[len(_trim(self._root)) :].strip("/")
        return ObjectInfo(key, int(detail.get("size") or 0), _modified(detail))

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key.strip('/')}".rstrip("/") if key else self._root

    def _try(self, verb: str, key: str, attempt: Callable[[], T]) -> T:
        where = self.url_of(key)
        try:
            return retry(attempt, patience=Patience(self._deadline_s), what=f"{verb} {where}")
        except Exception as exc:
            raise translate(exc, verb=verb, where=where) from exc


def _public(url: str) -> str:
    """A URL without user name and password."""
    if "@" not in url or "::" in url:
        return url
    host = urlsplit(url).netloc
    return url.replace(host, host.rpartition("@")[2], 1) if "@" in host else url


def _below(url: str, key: str) -> str:
    return f"{url.rstrip('/')}/{key}" if key else url


def _trim(path: str) -> str:
    return path.strip("/")


def _modified(detail: Mapping[str, Any]) -> datetime | None:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = detail.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, tz=timezone.utc)
    return None
