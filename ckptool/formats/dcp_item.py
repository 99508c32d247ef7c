"""Items: where a tensor's payload lies and how, and the bytes to put around one.

An item is what ``torch.save`` wrote of one tensor or value: a stored zip (``zip_records``).
A tensor's small pickle tells dtype, shape, strides and storage offset of the record
``data/0``, the payload; the start and the end of an item suffice to find it. A value's pickle
is handed on as bytes, with its tensor records. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ckptool.dtypes import DType
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.partial_bytes import NeedMore, PartialBytes
from ckptool.formats.plain_values import NotPlain, TensorRef, decode_value
from ckptool.formats.tensor_pickle import tensor_pickle
from ckptool.formats.zip_archive import Archive, plan_archive, torch_records
from ckptool.formats.zip_reading import StoredZip

__all__ = [
    "ItemFraming",
    "NeedMore",
    "StorageRange",
    "TensorItem",
    "ValueItem",
    "check_item",
    "encode_item",
    "encode_value_item",
    "parse_tensor_item",
    "parse_value_item",
    "probe_ranges",
]

_PROBE_NUM_BYTES = 4096
_MAX_FRAMING_NUM_BYTES = 16384
_MAX_PICKLE_NUM_BYTES = 1 << 20
_MAX_CACHED_NUM_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TensorItem:
    """How one item stores its tensor; ``payload_offset`` counts from the item's start.

    The payload is the whole storage: the tensor starts ``storage_offset`` elements into it
    and ``strides`` count elements. ``crc32`` is None where the writer left it out. ``conj``
    and ``neg`` say that the bytes are still to be conjugated or negated.
    """

    payload_offset: int
    payload_num_bytes: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    crc32: int | None
    conj: bool
    neg: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, whatever the storage holds besides."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row by row, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True

    @property
    def is_plain(self) -> bool:
        """Whether the payload's bytes are the tensor's, all of them and no more."""
        exact = self.payload_num_bytes == self.num_bytes and self.storage_offset == 0
        return exact and self.is_contiguous and not (self.conj or self.neg)


def probe_ranges(length: int, payload_num_bytes_hint: int | None) -> tuple[int, int]:
    """How many bytes of an item's start and of its end nearly always suffice to parse it.

    ``payload_num_bytes_hint`` is what the index makes one expect.
    """
    framing = length - (payload_num_bytes_hint or 0)
    if payload_num_bytes_hint is None or not 0 < framing <= _MAX_FRAMING_NUM_BYTES:
        framing = _PROBE_NUM_BYTES
    return min(framing, length), min(framing, length)


def parse_tensor_item(
    *, length: int, head: bytes, tail: bytes = b"", whole: bool = False
) -> TensorItem:
    """How an item of ``length`` bytes stores its tensor, from its start and its end.

    ``whole``: all of its framing is proved, also the records that tell nothing of the tensor.
    Raises NeedMore where they are too short (never if they cover the item), DamagedError where
    the item contradicts itself, UnsupportedError for anything but a plain tensor.
    """
    stored = StoredZip(PartialBytes(length=length, head=head, tail=tail))
    _check_byteorder(stored)
    ref = _tensor_ref(stored.read("data.pkl", max_num_bytes=_MAX_PICKLE_NUM_BYTES))
    name = f"data/{ref.record}"
    payload_offset = stored.locate(name)
    payload = stored.record(name)
    if payload.num_bytes != ref.storage_num_bytes:
        raise DamagedError(
            f"record {name!r} at byte {payload_offset} has {payload.num_bytes} bytes, its "
            f"pickle says {ref.storage_num_bytes}",
            offset=payload_offset,
        )
    if whole:
        for other in stored.records:
            if other != name:
                stored.read(other)
    return TensorItem(
        payload_offset=payload_offset,
        payload_num_bytes=payload.num_bytes,
        dtype=ref.dtype,
        shape=ref.shape,
        strides=ref.strides,
        storage_offset=ref.storage_offset,
        crc32=payload.crc32,
        conj=ref.conj,
        neg=ref.neg,
    )


@dataclass(frozen=True, slots=True)
class ItemFraming:
    """All bytes of an item but its payload; a pickle of it is small.

    ``head`` is all that stands before the payload, which starts at a multiple of 64.
    """

    dtype: DType
    shape: tuple[int, ...]
    head: bytes
    archive: Archive

    @property
    def payload_num_bytes(self) -> int:
        return self.archive.records[self.archive.payloads[0]].num_bytes

    @property
    def length(self) -> int:
        return self.archive.length

    @property
    def tail_num_bytes(self) -> int:
        return self.length - self.payload_num_bytes - len(self.head)

    def tail(self, crc32: int) -> bytes:
        """All that stands behind the payload, whose CRC-32 is given."""
        return self.archive.ending([crc32])

    def __reduce__(self) -> Any:
        return _item_framing, (self.dtype, self.shape)


def encode_item(*, dtype: DType, shape: tuple[int, ...]) -> ItemFraming:
    """What torch 2.13's ``torch.save`` writes around a contiguous CPU tensor, byte for byte."""
    return _item_framing(dtype, shape)


class StorageRange(NamedTuple):
    """Where a tensor inside a value has its bytes; ``crc32`` is None where none was stored."""

    offset: int
    num_bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class ValueItem:
    """``pickle`` is the record ``data.pkl``; ``storages`` has each ``data/{name}`` by name.

    ``num_unverified`` counts the records without a CRC-32.
    """

    pickle: bytes
    storages: Mapping[str, StorageRange]
    num_unverified: int


def parse_value_item(data: bytes) -> ValueItem:
    """The parts of a whole item; every record's CRC-32 is checked.

    Raises DamagedError where the item contradicts itself, UnsupportedError for a big-endian one.
    """
    stored = StoredZip(PartialBytes(length=len(data), head=data))
    _check_byteorder(stored)
    for name in stored.records:
        stored.read(name)
    storages = {
        name.removeprefix("data/"): StorageRange(stored.locate(name), row.num_bytes, row.crc32)
        for name, row in stored.records.items()
        if name.startswith("data/")
    }
    num_unverified = sum(row.crc32 is None for row in stored.records.values())
    return ValueItem(stored.read("data.pkl"), storages, num_unverified)


def encode_value_item(pickle_bytes: bytes, *, storages: Mapping[str, bytes] | None = None) -> bytes:
    """The item of a value as ``torch.save`` writes it, with its tensors' bytes by record name."""
    contents: dict[str, bytes | int] = dict(storages or {})
    archive = plan_archive(torch_records(pickle_bytes, contents))
    return archive.head


def check_item(data: bytes) -> list[CkptoolError]:
    """What is wrong with a whole item, of a tensor or of a value: every record's place and CRC-32.

    One error for each record at fault; none where all is well.
    """
    try:
        stored = StoredZip(PartialBytes(length=len(data), head=data))
    except CkptoolError as error:
        return [error]
    findings: list[CkptoolError] = []
    for name in stored.records:
        try:
            stored.read(name)
        except CkptoolError as error:
            findings.append(error)
    if not findings:
        try:
            _check_byteorder(stored)
            stored.record("data.pkl")
        except CkptoolError as error:
            findings.append(error)
    return findings


def _check_byteorder(stored: StoredZip) -> None:
    """Raises UnsupportedError for payloads of a big-endian machine."""
    if "byteorder" in stored.records:
        order = stored.read("byteorder", max_num_bytes=64)
        if order != b"little":
            raise UnsupportedError(
                f"the item's byte order is {order.decode('utf-8', 'replace')!r}, not 'little'",
                hint="save it again on a little-endian machine",
            )


@lru_cache(maxsize=1024)
def _item_framing(dtype: DType, shape: tuple[int, ...]) -> ItemFraming:
    num_bytes = math.prod(shape) * dtype.itemsize
    archive = plan_archive(torch_records(tensor_pickle(dtype, shape), {"0": num_bytes}))
    return ItemFraming(dtype, shape, archive.head, archive)


def _tensor_ref(data_pkl: bytes) -> TensorRef:
    """The tensor that the pickle of an item tells; many items have equal pickles."""
    small = len(data_pkl) <= _MAX_CACHED_NUM_BYTES
    return _small_tensor_ref(data_pkl) if small else _decode_tensor(data_pkl)


@lru_cache(maxsize=4096)
def _small_tensor_ref(data_pkl: bytes) -> TensorRef:
    return _decode_tensor(data_pkl)


def _decode_tensor(data_pkl: bytes) -> TensorRef:
    try:
        value = decode_value(data_pkl)
    except NotPlain as error:
        raise UnsupportedError(
            f"the item holds a {error.class_name}, not a plain tensor",
            hint="leave the tensor out, or save it again as a plain tensor",
            class_name=error.class_name,
        ) from error
    if not isinstance(value, TensorRef):
        raise DamagedError(
            f"the item holds a value ({type(value).__name__}) where a tensor is expected"
        )
    return value
