"""Items -> whether each is whole: its headers, its CRC-32s, and what the index says of it.

Small items that lie side by side are read together; a large one is read from its start and
its end first, then its payload block by block. No more than ``max_memory`` bytes of buffers
are held, and nothing stops at the first fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from threading import Event
from typing import TypeAlias, cast

from ckptool.engine.item_verdict import (
    DAMAGED,
    OK,
    UNVERIFIABLE,
    Checked,
    Subject,
    damaged_payload,
    fault,
    finding_at,
    finding_of,
    settled,
    worst,
)
from ckptool.engine.normal import item_blocks
from ckptool.errors import (
    CkptoolError,
    DamagedError,
    ObjectMissingError,
    ShortReadError,
    UnsupportedError,
)
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import (
    NeedMore,
    TensorItem,
    check_item,
    parse_tensor_item,
    parse_value_item,
    probe_ranges,
)
from ckptool.formats.partial_bytes import PartialBytes
from ckptool.formats.plain_values import NotPlain, decode_value
from ckptool.formats.safetensors_shards import PAYLOAD
from ckptool.formats.zip_reading import StoredZip
from ckptool.model import Item
from ckptool.planning.findings import ERROR, WARNING, Finding
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage.base import Store

__all__ = ["check_items"]

_MAX_BLOCK_BYTES = 8 << 20
_MIN_BLOCK_BYTES = 64 << 10
_MAX_GAP_BYTES = 64 << 10
_FRAMING_BYTES = 1 << 20  # more than the framing of any item

Read: TypeAlias = Callable[[int, int], bytes]


def check_items(
    store: Store,
    subjects: Iterable[Subject],
    *,
    jobs: int,
    max_memory: int,
    progress: Progress = NO_PROGRESS,
) -> Iterator[Checked]:
    """Check items, which come sorted by file and offset; results come in the same order.

    ``progress`` is told of bytes as they come, from any thread.

    Raises StorageError where the store itself fails; an object that is gone or shorter than
    it was listed is a finding.
    """
    block = max(_MIN_BLOCK_BYTES, min(_MAX_BLOCK_BYTES, max_memory // (4 * jobs)))
    spool_bytes = max(block, max_memory // (2 * jobs))
    checker = _Checker(store, block=block, spool_bytes=spool_bytes, progress=progress)
    window: deque[Future[list[Checked]]] = deque()
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="check")
    try:
        for batch in _batches(subjects, block):
            window.append(pool.submit(checker.check, batch))
            if len(window) >= 4 * jobs:
                yield from window.popleft().result()
        while window:
            yield from window.popleft().result()
    finally:
        checker.stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(subjects: Iterable[Subject], block: int) -> Iterator[list[Subject]]:
    """Neighbours whose joined range fits a block; larger or wrapped items alone."""
    batch: list[Subject] = []
    for subject in subjects:
        item = subject.item
        if batch and (
            item.file != batch[0].item.file
            or item.end - batch[0].item.offset > block
            or item.offset - batch[-1].item.end > _MAX_GAP_BYTES
        ):
            yield batch
            batch = []
        batch.append(subject)
    if batch:
        yield batch


class _Checker:
    """Checks batches; safe to call from several threads."""

    def __init__(self, store: Store, *, block: int, spool_bytes: int, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        self._block = block
        self._spool_bytes = spool_bytes
        self.stopped = Event()

    def check(self, batch: Sequence[Subject]) -> list[Checked]:
        first, last = batch[0].item, max(s.item.end for s in batch)
        if last - first.offset > self._block:
            return [self._check(s, self._from_store(s.item)) for s in batch]
        try:
            data = self._store.read(first.file, start=first.offset, end=last)
        except (ObjectMissingError, ShortReadError):
            return [self._check(s, self._from_store(s.item)) for s in batch]
        self._progress.advance(len(data))
        return [self._check(s, _from_bytes(data, s.item.offset - first.offset)) for s in batch]

    def _from_store(self, item: Item) -> Read:
        def read(start: int, end: int) -> bytes:
            data = self._store.read(item.file, start=item.offset + start, end=item.offset + end)
            self._progress.advance(len(data))
            return data

        return read

    def _check(self, subject: Subject, read: Read) -> Checked:
        """One item; every fault that belongs to it becomes a finding."""
        try:
            if subject.item.transforms == (PAYLOAD,):
                return self._check_bare(subject, read)
            if subject.item.transforms:
                return self._check_wrapped(subject, read)
            return self._check_plain(subject, read, subject.item.length)
        except (ObjectMissingError, ShortReadError) as error:
            found = finding_at(subject, "unreadable", ERROR, error.message, 0)
            return Checked(subject, DAMAGED, (found,), 0)
        except (DamagedError, UnsupportedError) as error:
            return fault(subject, error)

    def _check_bare(self, subject: Subject, read: Read) -> Checked:
        """Bytes without framing: nothing tells what they should be."""
        item = subject.item
        if not subject.wants_crc:
            return Checked(subject, UNVERIFIABLE, (), 0)
        crc = self._crc(read, 0, item.length)
        return Checked(subject, UNVERIFIABLE, (), item.length, crc)

    def _check_wrapped(self, subject: Subject, read: Read) -> Checked:
        """An item that is decompressed on the way, into memory or a temporary file."""
        wrapped = cast("Store", _ItemBytes(subject.item, read))
        with SpooledTemporaryFile(max_size=self._spool_bytes) as spool:
            length = 0
            for data in item_blocks(wrapped, subject.item, max_bytes=self._bound(subject)):
                self._stop_here()
                spool.write(data)
                length += len(data)

            def unwrapped(start: int, end: int) -> bytes:
                spool.seek(start)
                return spool.read(end - start)

            checked = self._check_plain(subject, unwrapped, length)
        num_bytes = subject.item.length
        return Checked(subject, checked.status, checked.findings, num_bytes, checked.crc32)

    def _bound(self, subject: Subject) -> int:
        """What a wrapped item may grow to; a value, which says nothing, to the memory bound."""
        if subject.box is None or subject.dtype is None:
            return self._spool_bytes + _FRAMING_BYTES
        return subject.box.num_elements * subject.dtype.itemsize + _FRAMING_BYTES

    def _check_plain(self, subject: Subject, read: Read, length: int) -> Checked:
        if subject.dtype is None:
            return self._check_value(subject, read, length)
        if length <= self._block:
            data = read(0, length)
            return self._check_small(subject, data)
        return self._check_large(subject, read, length)

    def _check_value(self, subject: Subject, read: Read, length: int) -> Checked:
        if length > self._spool_bytes:
            what = f"its {length} bytes are more than --max-memory leaves for one item"
            found = finding_at(subject, "not-checked", WARNING, what, 0)
            return Checked(subject, UNVERIFIABLE, (found,), 0)
        value = parse_value_item(read(0, length))
        try:
            decode_value(value.pickle)
        except (NotPlain, UnsupportedError):
            pass  # whose class nobody here knows; its bytes are proved all the same
        status = UNVERIFIABLE if value.num_unverified else OK
        return Checked(subject, status, (), length)

    def _check_small(self, subject: Subject, data: bytes) -> Checked:
        """An item that is at hand as a whole."""
        errors = check_item(data)
        if errors:
            findings = tuple(finding_of(subject, e) for e in errors)
            return Checked(subject, worst(findings), findings, len(data))
        header = parse_tensor_item(length=len(data), head=data)
        start, end = header.payload_offset, header.payload_offset + header.payload_num_bytes
        crc = header.crc32
        if crc is None and subject.needs_crc:
            crc = crc32(memoryview(data)[start:end])
        return settled(subject, header, len(data), crc)

    def _check_large(self, subject: Subject, read: Read, length: int) -> Checked:
        """An item in blocks: framing from both ends, then the payload."""
        header, stored, num_bytes = _parse_ends(subject, read, length)
        findings = list(_check_framing(subject, stored, header))
        crc = header.crc32
        if header.crc32 is not None or subject.needs_crc:
            crc = self._crc(read, header.payload_offset, header.payload_num_bytes)
            num_bytes += header.payload_num_bytes
        if header.crc32 is not None and crc != header.crc32:
            findings.append(damaged_payload(subject, header, crc))
        verdict = settled(subject, header, num_bytes, crc)
        findings.extend(verdict.findings)
        status = worst(findings) if findings else verdict.status
        return Checked(subject, status, tuple(findings), num_bytes, verdict.crc32)

    def _crc(self, read: Read, start: int, num_bytes: int) -> int:
        crc = 0
        for at in range(start, start + num_bytes, self._block):
            self._stop_here()
            crc = crc32(read(at, min(at + self._block, start + num_bytes)), crc)
        return crc

    def _stop_here(self) -> None:
        if self.stopped.is_set():
            raise CkptoolError("stopped")


@dataclass(frozen=True, slots=True)
class _ItemBytes:
    """Reads of one item as reads of its file, from bytes that may be at hand already."""

    item: Item
    bytes_at: Read

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        assert key == self.item.file
        assert end is not None
        return self.bytes_at(start - self.item.offset, end - self.item.offset)


def _from_bytes(data: bytes, base: int) -> Read:
    def read(start: int, end: int) -> bytes:
        return data[base + start : base + end]

    return read


def _parse_ends(subject: Subject, read: Read, length: int) -> tuple[TensorItem, StoredZip, int]:
    """The headers of a large item, its directory, and how many bytes that took."""
    assert subject.dtype is not None
    assert subject.box is not None
    hint = subject.box.num_elements * subject.dtype.itemsize
    num_head, num_tail = probe_ranges(length, hint)
    while True:
        head, tail = read(0, num_head), read(length - num_tail, length)
        try:
            header = parse_tensor_item(length=length, head=head, tail=tail)
            ends = PartialBytes(length=length, head=head, tail=tail)
            return header, StoredZip(ends), num_head + num_tail
        except NeedMore as more:
            num_head, num_tail = more.head_num_bytes, more.tail_num_bytes


def _check_framing(subject: Subject, stored: StoredZip, header: TensorItem) -> Iterator[Finding]:
    """The small records around a payload, those that are at hand."""
    for name, record in stored.records.items():
        if record.num_bytes == header.payload_num_bytes and name.startswith("data/"):
            continue
        try:
            stored.read(name)
        except NeedMore:
            continue
        except CkptoolError as error:
            yield finding_of(subject, error)
