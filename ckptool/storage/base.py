"""What a store is: keys and bytes under one root URL, and what it can do.

Stores know nothing of tensors. A key is relative to the root, with ``/`` between its parts,
and is always literal (``[``, ``*`` and ``?`` mean themselves). Every method raises only
StorageError and its children (or RefusedError for what a store cannot do); foreign exceptions
are translated in one place, with ``from``. Transient failures are retried with jitter inside.
All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from ckptool.errors import RefusedError
from ckptool.model import Extent

__all__ = [
    "Assembly",
    "Buffer",
    "Capabilities",
    "CopyingAssembly",
    "Listing",
    "ObjectInfo",
    "PartLimits",
    "PartReceipt",
    "PendingUpload",
    "Store",
    "StoreRecipe",
    "StreamWriter",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store declares that it can do.

    ``shared``: other processes see the same objects. ``assembly``: parts of one object may be
    written in any order, by any process. ``server_copy``: a part may be a range of another
    object, copied by the server. ``conditional_put``: a put can be refused when the key is
    there. ``checksums``: the store verifies and keeps a CRC-32 that we send.
    ``append``: bytes can be added to an object that is there.
    """

    shared: bool
    assembly: bool
    server_copy: bool = False
    conditional_put: bool = False
    checksums: bool = False
    append: bool = False


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object; ``modified`` in UTC, None where the store does not say."""

    key: str
    num_bytes: int
    modified: datetime | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """One level of a tree: the objects of a folder and the names of its sub-folders."""

    objects: tuple[ObjectInfo, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """What is known of a written part: JSON-able, so that a journal can keep it.

    ``number`` counts from 0 in the order of the object; ``token`` is the store's own (an S3
    ETag); ``checksum`` is the CRC-32 that the server computed or verified, None without one;
    ``md5`` what a listing tells of it in its stead.
    """

    number: int
    num_bytes: int
    token: str | None = None
    checksum: int | None = None
    md5: str | None = None


class StreamWriter(Protocol):
    """Sequential writing of an object of unknown length; nothing is visible before commit."""

    def write(self, data: Buffer) -> None: ...

    def commit(self) -> ObjectInfo:
        """Make the whole object visible; raises StorageError when its stored size differs."""

    def abort(self) -> None:
        """Leave nothing behind; safe to call twice, and after commit."""


class Assembly(Protocol):
    """Writing of an object of known length in parts, in any order, from any thread.

    Nothing is visible under the object's key before ``commit``. ``token`` is a picklable,
    secret-free value with which ``Store.attach_assembly`` opens the same assembly in another
    process.
    """

    @property
    def token(self) -> str: ...

    def write_part(
        self, number: int, offset: int, data: Buffer, *, crc32: int | None = None
    ) -> PartReceipt:
        """Write the bytes at ``offset``; part ``number`` starts there, and parts tile the object.

        ``crc32`` is of ``data``, where the caller has it: sent along for the server to verify.
        """

    def surviving(self, claims: Sequence[tuple[PartReceipt, int, int | None]]) -> set[int]:
        """Which of these parts, (receipt, offset, CRC-32), are still there unaltered.

        Raises ObjectMissingError when nothing of the assembly is there any more.
        """

    def listed_parts(self) -> Sequence[PartReceipt]:
        """The parts that the store itself lists; empty where it keeps no such list."""

    def commit(self, parts: Sequence[PartReceipt]) -> ObjectInfo:
        """Make the object visible; raises StorageError when a part is missing or sizes differ."""

    def abort(self) -> None:
        """Leave nothing behind; safe to call twice."""


class CopyingAssembly(Assembly, Protocol):
    """What an assembly of a store with ``server_copy`` also can."""

    def copy_part(self, number: int, source_url: str, *, start: int, end: int) -> PartReceipt:
        """A part that the server copies from bytes ``[start, end)`` of another object.

        ``checksum`` is the CRC-32 that the server computed of it, None where it gives none.
        """


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An object that somebody began to write and neither committed nor aborted.

    ``token`` is the ``Assembly.token``; ``started`` in UTC, None where the store does not say.
    """

    key: str
    token: str
    started: datetime | None


class Store(Protocol):
    """Objects under one root."""

    @property
    def url(self) -> str:
        """The root as the user gave it, without secrets or a trailing slash."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def part_limits(self) -> PartLimits: ...

    def url_of(self, key: str) -> str:
        """The full URL of a key, for messages."""

    def child(self, key: str) -> Store:
        """The same store rooted at a folder below."""

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Every object below ``prefix`` (a folder), recursively; empty when there is none."""

    def list_level(self, prefix: str = "") -> Listing:
        """One level below ``prefix`` (a folder); empty when there is none."""

    def info(self, key: str) -> ObjectInfo:
        """Raises ObjectMissingError when the object is not there."""

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Bytes ``[start, end)``, all of them or ShortReadError; ``end`` None is the object's."""

    def read_many(self, extents: Sequence[Extent]) -> Sequence[bytes]:
        """Several ranges at once, in the order asked for; any failure raises."""

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        """Fill ``buffer`` (of exactly the extent's length) with the extent's bytes."""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        """Write a whole object at once, atomically: it is there whole, or not at all.

        With ``if_absent``, raises NotEmptyError when the key is there; where the store has no
        conditional put, by looking first.
        """

    def append(self, key: str, data: Buffer) -> None:
        """Add bytes to the end of an object; only with the ``append`` capability."""

    def open_stream(
        self, key: str, *, num_bytes: int | None = None, max_memory: int | None = None
    ) -> StreamWriter:
        """``num_bytes``: what the object will have at most; with it all parts have one size.

        ``max_memory``: what of it may be held, as far as the store's smallest parts allow.
        """

    def open_assembly(self, key: str, *, num_bytes: int) -> Assembly:
        """Raises RefusedError without the ``assembly`` capability."""

    def attach_assembly(self, key: str, token: str, *, num_bytes: int) -> Assembly:
        """The same assembly, opened by another process."""

    def list_uploads(self, prefix: str = "") -> Sequence[PendingUpload]:
        """What was begun below ``prefix`` (a folder) and not finished, by live writers or dead."""

    def abort_upload(self, key: str, token: str) -> None:
        """Drop what a writer left; one that is gone is no error."""

    def copies_from(self, other: Store) -> bool:
        """Whether parts of our objects can be ranges of its objects, copied by the server."""

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def recipe(self) -> StoreRecipe:
        """What another process of this machine opens the same store with; holds the options."""


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Bounds of an assembly's parts, in bytes; the last part may be smaller than the minimum."""

    min_bytes: int
    max_bytes: int
    max_parts: int
    preferred_bytes: int

    def part_bytes(self, num_bytes: int) -> int:
        """The size of equal parts for an object of ``num_bytes``, in whole MiB above preferred.

        Raises RefusedError when no number of parts can hold it.
        """
        least = -(-num_bytes // self.max_parts)
        if least > self.max_bytes:
            raise RefusedError(
                f"an object of {num_bytes} bytes is too large: the store takes {self.max_parts} "
                f"parts of {self.max_bytes} bytes",
                hint="split it over more files: --max-file-size, or more ranks",
                num_bytes=num_bytes,
            )
        if least <= self.preferred_bytes:
            return self.preferred_bytes
        return min(self.max_bytes, -(-least // 2**20) * 2**20)


@dataclass(frozen=True, slots=True)
class StoreRecipe:
    """URL and storage options; never written to a plan, a journal or a log."""

    url: str
    options: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"StoreRecipe(url={self.url!r}, options=<{len(self.options)} hidden>)"
