"""A store that counts what goes through it, so that a test can hold requests and bytes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ckptool.model import Extent
from ckptool.storage import (
    Assembly,
    Buffer,
    Capabilities,
    Listing,
    ObjectInfo,
    PartLimits,
    PartReceipt,
    PendingUpload,
    Store,
    StoreRecipe,
    StreamWriter,
)

__all__ = ["RecordingStore"]


class RecordingStore:
    """Passes all calls on; children share the counts of their parent.

    ``requests`` and ``num_bytes`` count by verb (list, info, read, put, write, delete, open,
    copy, commit, abort); each extent of ``read_many`` is one read. ``calls`` keeps
    (verb, key, start, end) in order; keys are relative to the outermost store.
    """

    def __init__(self, store: Store, *, parent: RecordingStore | None = None, prefix: str = ""):
        self.inner = store
        self.requests: Counter[str] = parent.requests if parent else Counter()
        self.num_bytes: Counter[str] = parent.num_bytes if parent else Counter()
        self.calls: list[tuple[str, str, int, int]] = parent.calls if parent else []
        self._lock: threading.Lock = parent._lock if parent else threading.Lock()
        self._prefix = prefix

    def record(self, verb: str, key: str, start: int = 0, end: int = 0) -> None:
        with self._lock:
            self.requests[verb] += 1
            self.num_bytes[verb] += end - start
            self.calls.append((verb, self._prefix + key, start, end))

    def reset(self) -> None:
        """Forget what was counted."""
        with self._lock:
            self.requests.clear()
            self.num_bytes.clear()
            self.calls.clear()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def part_limits(self) -> PartLimits:
        return self.inner.part_limits

    def url_of(self, key: str) -> str:
        return self.inner.url_of(key)

    def child(self, key: str) -> RecordingStore:
        return RecordingStore(self.inner.child(key), parent=self, prefix=f"{self._prefix}{key}/")

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        self.record("list", prefix)
        return self.inner.list(prefix)

    def list_level(self, prefix: str = "") -> Listing:
        self.record("list", prefix)
        return self.inner.list_level(prefix)

    def info(self, key: str) -> ObjectInfo:
        self.record("info", key)
        return self.inner.info(key)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        data = self.inner.read(key, start=start, end=end)
        self.record("read", key, start, start + len(data))
        return data

    def read_many(self, extents: Sequence[Extent]) -> Sequence[bytes]:
        for extent in extents:
            self.record("read", extent.key, extent.start, extent.end)
        return self.inner.read_many(extents)

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        self.record("read", extent.key, extent.start, extent.end)
        self.inner.read_into(extent, buffer)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        self.record("put", key, 0, len(data))
        return self.inner.put(key, data, if_absent=if_absent)

    def append(self, key: str, data: Buffer) -> None:
        self.record("write", key, 0, len(data))
        self.inner.append(key, data)

    def copies_from(self, other: Store) -> bool:
        return self.inner.copies_from(other.inner if isinstance(other, RecordingStore) else other)

    def open_stream(self, key: str, **bounds: int | None) -> RecordingStream:
        self.record("open", key)
        return RecordingStream(self, key, self.inner.open_stream(key, **bounds))

    def open_assembly(self, key: str, *, num_bytes: int) -> RecordingAssembly:
        self.record("open", key)
        return RecordingAssembly(self, key, self.inner.open_assembly(key, num_bytes=num_bytes))

    def attach_assembly(self, key: str, token: str, *, num_bytes: int) -> RecordingAssembly:
        inner = self.inner.attach_assembly(key, token, num_bytes=num_bytes)
        return RecordingAssembly(self, key, inner)

    def list_uploads(self, prefix: str = "") -> Sequence[PendingUpload]:
        self.record("list", prefix)
        return self.inner.list_uploads(prefix)

    def abort_upload(self, key: str, token: str) -> None:
        self.record("abort", key)
        self.inner.abort_upload(key, token)

    def delete(self, key: str) -> None:
        self.record("delete", key)
        self.inner.delete(key)

    def recipe(self) -> StoreRecipe:
        return self.inner.recipe()

    def __getattr__(self, name: str) -> Any:
        """What a store has beyond the protocol passes through uncounted."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class RecordingStream:
    """Counts each write."""

    def __init__(self, store: RecordingStore, key: str, inner: StreamWriter) -> None:
        self._store = store
        self._key = key
        self._inner = inner
        self._position = 0

    def write(self, data: Buffer) -> None:
        length = memoryview(data).nbytes
        self._store.record("write", self._key, self._position, self._position + length)
        self._position += length
        self._inner.write(data)

    def commit(self) -> ObjectInfo:
        self._store.record("commit", self._key)
        return self._inner.commit()

    def abort(self) -> None:
        self._store.record("abort", self._key)
        self._inner.abort()


class RecordingAssembly:
    """Counts each part, written or copied by the server."""

    def __init__(self, store: RecordingStore, key: str, inner: Assembly) -> None:
        self._store = store
        self._key = key
        self._inner: Any = inner

    @property
    def token(self) -> str:
        return str(self._inner.token)

    def write_part(
        self, number: int, offset: int, data: Buffer, *, crc32: int | None = None
    ) -> PartReceipt:
        self._store.record("write", self._key, offset, offset + memoryview(data).nbytes)
        receipt: PartReceipt = self._inner.write_part(number, offset, data, crc32=crc32)
        return receipt

    def copy_part(self, number: int, source_url: str, *, start: int, end: int) -> PartReceipt:
        self._store.record("copy", self._key, start, end)
        receipt: PartReceipt = self._inner.copy_part(number, source_url, start=start, end=end)
        return receipt

    def surviving(self, claims: Sequence[tuple[PartReceipt, int, int | None]]) -> set[int]:
        return self._inner.surviving(claims)

    def listed_parts(self) -> Sequence[PartReceipt]:
        return self._inner.listed_parts()

    def commit(self, parts: Sequence[PartReceipt]) -> ObjectInfo:
        self._store.record("commit", self._key)
        info: ObjectInfo = self._inner.commit(parts)
        return info

    def abort(self) -> None:
        self._store.record("abort", self._key)
        self._inner.abort()
