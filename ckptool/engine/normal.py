"""Makes payloads normal: decompressed, C-contiguous, exactly the chunk, with plain signs.

Most items need none of this: their payload is already the chunk's bytes. The few others are
read once, in order, proved on the way, and kept for as long as neighbouring steps want them:
small ones in memory, large ones in a temporary file.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptool.dtypes import DType
from ckptool.engine.located import located
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import NeedMore, TensorItem, parse_tensor_item
from ckptool.formats.zstd_stream import ZSTD
from ckptool.model import Item
from ckptool.planning.plan import Normal, Payload
from ckptool.storage.base import Store

__all__ = ["Normaliser", "item_blocks"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK_BYTES = 4 << 20
FRAMING_BYTES = 1 << 20  # more than the framing of any item
SLICE_BYTES = 2 << 10
MIN_KEPT, MAX_KEPT = 4, 128  # as many as fit the memory and so much of temporary files
MAX_FILE_BYTES = 1 << 30


@dataclass(slots=True)
class _Kept:
    """A normal payload in a file or in memory; ``verified`` is False without a stored CRC."""

    file: IO[bytes]
    num_bytes: int
    lock: threading.Lock
    verified: bool

    def read_into(self, view: memoryview, start: int) -> bool:
        """Fill ``view``; False when others have crowded the payload out meanwhile."""
        with self.lock:
            if self.file.closed:
                return False
            self.file.seek(start)
            view[:] = self.file.read(len(view))
        return True

    def close(self) -> None:
        with self.lock:
            self.file.close()


class Normaliser:
    """Gives ranges of normal payloads; safe to call from several threads."""

    def __init__(self, source: Store, *, max_memory_bytes: int) -> None:
        self._source = source
        self._max_memory_bytes = max_memory_bytes
        self._spool_bytes = max_memory_bytes // MIN_KEPT
        self._memory_bytes = self._file_bytes = 0
        self._kept: OrderedDict[Item, _Kept] = OrderedDict()
        self._locks: dict[Item, threading.Lock] = {}
        self._lock = threading.Lock()

    def read_into(self, normal: Normal, view: memoryview) -> tuple[bool, int]:
        """Fill ``view``; returns whether the payload was verified, and the bytes fetched."""
        payload = normal.payload
        with self._lock:
            lock = self._locks.setdefault(payload.item, threading.Lock())
        with lock:
            kept = self._kept.get(payload.item)
            if kept is not None and kept.read_into(view, normal.start):
                return kept.verified, 0
            kept = self._make(payload)
            kept.read_into(view, normal.start)
            self._keep(payload.item, kept)
        return kept.verified, payload.item.length

    def close(self) -> None:
        """Drop what is kept."""
        with self._lock:
            for kept in self._kept.values():
                kept.close()
            self._kept.clear()

    def _keep(self, item: Item, kept: _Kept) -> None:
        with self._lock:
            self._kept[item] = kept
            self._count(kept, 1)
            while self._is_crowded():
                old = self._kept.popitem(last=False)[1]
                self._count(old, -1)
                old.close()

    def _count(self, kept: _Kept, sign: int) -> None:
        if kept.num_bytes <= self._spool_bytes:
            self._memory_bytes += sign * kept.num_bytes
        else:
            self._file_bytes += sign * kept.num_bytes

    def _is_crowded(self) -> bool:
        crowded = self._memory_bytes > self._max_memory_bytes or self._file_bytes > MAX_FILE_BYTES
        return len(self._kept) > (MIN_KEPT if crowded else MAX_KEPT)

    def _spool(self) -> IO[bytes]:
        return tempfile.SpooledTemporaryFile(max_size=self._spool_bytes)

    def prove(self, payload: Payload) -> bool:
        """Read an item in order; returns whether its payload had a CRC to be proved by."""
        with self._spool() as spool:
            return self._prove_into(spool, payload, whole=True)[1]

    def _make(self, payload: Payload) -> _Kept:
        with self._spool() as spool:
            item, verified = self._prove_into(spool, payload)
            out = self._spool()
            _write_normal(spool, item, payload, out)
        return _Kept(out, payload.num_bytes, threading.Lock(), verified)

    def _prove_into(
        self, spool: IO[bytes], payload: Payload, *, whole: bool = False
    ) -> tuple[TensorItem, bool]:
        length = 0
        with located(payload.entry, payload.box, payload.item):
            for block in item_blocks(self._source, payload.item, max_bytes=_bound(payload)):
                spool.write(block)
                length += len(block)
            item = _parse(spool, length, payload, whole=whole)
            return item, _prove(spool, item)


def item_blocks(source: Store, item: Item, *, max_bytes: int | None) -> Iterator[bytes]:
    """The bytes of an item in order, decompressed where it is compressed.

    ``max_bytes`` bounds what a compressed item may grow to; more raises DamagedError.
    """
    unknown = [name for name in item.transforms if name != ZSTD]
    if unknown:
        raise UnsupportedError(
            f"{item.file}: bytes {item.offset}..{item.end} are wrapped in {unknown[0]!r}, which "
            "is not known",
            hint="a newer ckptool may know it: pip install -U ckptool",
            file=item.file,
            offset=item.offset,
        )
    raw = _raw_blocks(source, item)
    return _decompressed(raw, item, max_bytes) if item.transforms else raw


def _raw_blocks(source: Store, item: Item) -> Iterator[bytes]:
    for start in range(item.offset, item.end, BLOCK_BYTES):
        yield source.read(item.file, start=start, end=min(start + BLOCK_BYTES, item.end))


def _decompressed(raw: Iterator[bytes], item: Item, max_bytes: int | None) -> Iterator[bytes]:
    import zstandard

    decoder = zstandard.ZstdDecompressor().decompressobj()
    total = 0
    try:
        for block in raw:
            # 4 bytes may stand for 128 KiB: feed it in slices
            for at in range(0, len(block), SLICE_BYTES):
                data = decoder.decompress(block[at : at + SLICE_BYTES])
                total += len(data)
                if max_bytes is not None and total > max_bytes:
                    raise DamagedError(f"it decompresses to more than {max_bytes} bytes")
                yield data
    except zstandard.ZstdError as error:
        raise DamagedError(f"it cannot be decompressed: {error}") from error
    if not decoder.eof:
        raise DamagedError("it ends before its zstd stream does")


def _bound(payload: Payload) -> int | None:
    """What a compressed item may hold; its writer stores no more than the chunk."""
    return payload.num_bytes + FRAMING_BYTES


def _parse(spool: IO[bytes], length: int, payload: Payload, *, whole: bool) -> TensorItem:
    head_num_bytes, tail_num_bytes = 4096, 4096
    while True:
        spool.seek(0)
        head = spool.read(min(head_num_bytes, length))
        spool.seek(max(0, length - tail_num_bytes))
        tail = spool.read(min(tail_num_bytes, length))
        try:
            item = parse_tensor_item(length=length, head=head, tail=tail, whole=whole)
        except NeedMore as more:
            head_num_bytes, tail_num_bytes = more.head_num_bytes, more.tail_num_bytes
            continue
        if (item.dtype, item.shape) != (payload.dtype, payload.box.sizes):
            raise DamagedError(
                f"it holds {item.dtype} {list(item.shape)}, but the index says "
                f"{payload.dtype} {list(payload.box.sizes)}"
            )
        return item


def _prove(spool: IO[bytes], item: TensorItem) -> bool:
    if item.crc32 is None:
        return False
    spool.seek(item.payload_offset)
    crc, left = 0, item.payload_num_bytes
    while left:
        block = spool.read(min(left, BLOCK_BYTES))
        crc, left = crc32(block, crc), left - len(block)
    if crc != item.crc32:
        raise DamagedError(
            f"its payload has CRC-32 {crc:08x}, but its record says {item.crc32:08x}: the stored "
            "bytes are damaged"
        )
    return True


def _write_normal(spool: IO[bytes], item: TensorItem, payload: Payload, out: IO[bytes]) -> None:
    """The chunk's elements in row-major order, conj and neg flags resolved."""
    spool.seek(item.payload_offset)
    if item.is_plain:
        left = item.payload_num_bytes
        while left:
            block = spool.read(min(left, BLOCK_BYTES))
            out.write(block)
            left -= len(block)
        return
    itemsize = item.dtype.itemsize
    elements = np.lib.stride_tricks.as_strided(
        _storage(spool, item)[item.storage_offset * itemsize :],
        shape=(*item.shape, itemsize),
        strides=(*(stride * itemsize for stride in item.strides), 1),
        writeable=False,
    )
    for rows in _row_blocks(elements):
        data = np.ascontiguousarray(rows).reshape(-1)
        out.write(_resolved(data, item.dtype, conj=item.conj, neg=item.neg).tobytes())


def _storage(spool: IO[bytes], item: TensorItem) -> Bytes:
    """The stored bytes: mapped where they are in a file, so that none is held for long."""
    rolled = getattr(spool, "_rolled", False)
    if rolled and item.payload_num_bytes:
        spool.flush()
        return np.memmap(
            getattr(spool, "_file"),  # noqa: B009 - numpy wants the real file
            dtype=np.uint8,
            mode="r",
            offset=item.payload_offset,
            shape=(item.payload_num_bytes,),
        )
    return np.frombuffer(spool.read(item.payload_num_bytes), dtype=np.uint8)


def _row_blocks(elements: Bytes) -> Iterator[Bytes]:
    """A few megabytes of rows at a time; the whole of a 0-dim tensor."""
    if elements.ndim == 1:
        yield elements
        return
    num_rows = max(1, BLOCK_BYTES * len(elements) // max(1, elements.size))
    for start in range(0, len(elements), num_rows):
        yield elements[start : start + num_rows]


def _resolved(data: Bytes, dtype: DType, *, conj: bool, neg: bool) -> Bytes:
    """Flip the sign bits that the conj and neg flags stand for (little-endian parts)."""
    if not (conj or neg):
        return data
    data = data.copy()
    part = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
    signs = data[part - 1 :: part]
    if neg:
        signs ^= 0x80
    if conj and dtype.kind == "complex":
        signs[1::2] ^= 0x80
    return data
