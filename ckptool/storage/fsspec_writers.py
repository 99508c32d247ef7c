"""How bytes reach other fsspec protocols: a stream through a temporary file, or memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptool.errors import StorageError
from ckptool.storage.base import Buffer, ObjectInfo, PartReceipt
from ckptool.storage.errors import translate
from ckptool.storage.parts import check_parts

if TYPE_CHECKING:
    from ckptool.storage.fsspec_store import FsspecStore

__all__ = ["ASSEMBLIES", "MemoryAssembly", "SpooledStream"]

ASSEMBLIES: dict[str, bytearray] = {}


class SpooledStream:
    """A stream that is kept in a temporary file until commit."""

    def __init__(self, store: FsspecStore, key: str) -> None:
        self._store = store
        self._key = key
        self._file = tempfile.NamedTemporaryFile(prefix="ckptool-")  # noqa: SIM115
        self._num_bytes = 0

    def write(self, data: Buffer) -> None:
        try:
            self._num_bytes += self._file.write(data)
        except OSError as exc:
            raise translate(exc, verb="write", where=self._file.name) from exc

    def commit(self) -> ObjectInfo:
        with self._closing():
            self._file.flush()
            return self._store.upload_file(self._key, self._file, num_bytes=self._num_bytes)

    def abort(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._file.close()


class MemoryAssembly:
    """Parts placed in a buffer of this process."""

    def __init__(self, store: FsspecStore, key: str, token: str) -> None:
        self._store = store
        self._key = key
        self._token = token

    @property
    def token(self) -> str:
        return self._token

    def write_part(
        self, number: int, offset: int, data: Buffer, *, crc32: int | None = None
    ) -> PartReceipt:
        view = memoryview(data).cast("B")
        target = ASSEMBLIES[self._token]
        if offset + len(view) > len(target):
            raise StorageError(
                f"part {number} ends at byte {offset + len(view)} of "
                f"{self._store.url_of(self._key)}, which has {len(target)}"
            )
        target[offset : offset + len(view)] = view
        return PartReceipt(number, len(view))

    def surviving(self, claims: Sequence[tuple[PartReceipt, int, int | None]]) -> set[int]:
        return {receipt.number for receipt, _, _ in claims}

    def listed_parts(self) -> Sequence[PartReceipt]:
        return ()

    def commit(self, parts: Sequence[PartReceipt]) -> ObjectInfo:
        buffer = ASSEMBLIES[self._token]
        check_parts(parts, num_bytes=len(buffer), where=self._store.url_of(self._key))
        info = self._store.put(self._key, buffer)
        self.abort()
        return info

    def abort(self) -> None:
        ASSEMBLIES.pop(self._token, None)
