"""Items -> one shard file in a store, in parts; its size is compared with what was sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from ckptool.errors import CkptoolError, StorageError
from ckptool.formats.crc import crc32, crc32_join
from ckptool.planning.parts import Bounds, choose_part_bytes
from ckptool.storage.base import Assembly, ObjectInfo, PartReceipt, Store
from ckptool.torch.shard_items import (
    Cutter,
    Part,
    ShardResult,
    TensorItem,
    ValueItem,
    file_num_bytes,
)
from ckptool.torch.shard_stream import stream_items

__all__ = ["OnPart", "threads_within", "write_shard_file"]

OnPart = Callable[[int, bool], None]
_READ_BYTES = 16 << 20


def write_shard_file(
    store: Store,
    key: str,
    items: Sequence[TensorItem | ValueItem],
    *,
    image: memoryview | None = None,
    compress: bool = False,
    num_threads: int = 8,
    verify_after_write: bool = False,
    on_open: Callable[[str], None] = lambda token: None,
    on_part: OnPart = lambda number, is_last: None,
    should_stop: Callable[[], CkptoolError | None] = lambda: None,
) -> ShardResult:
    """Write the file and compare what is stored with what was sent.

    ``image``, writable, already holds every payload at its place in the file: heads and tails
    are then written into it and parts are uploaded from it without a copy. ``on_open`` learns
    an assembly's token before its first part; ``on_part`` gets each part's number before it is
    sent, and whether it is the last; ``verify_after_write`` reads the file back where the store
    did not check our checksums;
    ``should_stop`` is asked between parts, and its error raised. On any failure the upload is
    aborted and the error raised. With ``compress``, items are compressed where that pays, and
    the file is sent in order, because its length is known only afterwards.
    """
    if compress:
        num_bytes = file_num_bytes(items)
        writer = store.open_stream(key, num_bytes=num_bytes + num_bytes // 128)
        sent = stream_items(
            writer, items, num_threads=num_threads, on_piece=on_part, should_stop=should_stop
        )
        shard = ShardResult(key, sent.num_bytes, sent.crc32, "size", sent.items)
        return _compared(store, shard, sent.info, verify_after_write=verify_after_write)
    num_bytes = file_num_bytes(items)
    part_bytes = _part_bytes(store, num_bytes)
    cutter = Cutter(items, num_bytes=num_bytes, part_bytes=part_bytes, image=image)
    if num_bytes <= cutter.part_bytes:
        info, verified = _put_whole(store, key, cutter, image, on_part)
    elif store.capabilities.assembly:
        info, verified = _assemble(
            store, key, cutter, num_bytes, image, num_threads, on_open, on_part, should_stop
        )
    else:
        info, verified = _stream(store, key, cutter, image, on_part, should_stop)
    whole = crc32_join(cutter.crcs)
    shard = ShardResult(key, num_bytes, whole, verified, tuple(cutter.results))
    return _compared(store, shard, info, verify_after_write=verify_after_write)


def threads_within(budget: int | None, *, num_threads: int, part_bytes: int) -> int:
    """How many parts may be sent at once, so that all that are in memory fit; at least one.

    A thread holds a part and, where that is joined, its fragments; two more parts wait.
    """
    if budget is None:
        return num_threads
    return max(1, min(num_threads, (budget // part_bytes - 2) // 2))


def _compared(
    store: Store, shard: ShardResult, info: ObjectInfo, *, verify_after_write: bool
) -> ShardResult:
    if info.num_bytes != shard.num_bytes:
        raise StorageError(
            f"{store.url_of(shard.key)} has {info.num_bytes} bytes, {shard.num_bytes} were sent",
            hint="save again; look for another program that writes there",
        )
    if not verify_after_write or shard.verified == "checksum":
        return shard
    _read_back(store, shard.key, shard.num_bytes, shard.crc32)
    return replace(shard, verified="checksum")


def _read_back(store: Store, key: str, num_bytes: int, wanted: int) -> None:
    found = 0
    for start in range(0, num_bytes, _READ_BYTES):
        end = min(start + _READ_BYTES, num_bytes)
        found = crc32(store.read(key, start=start, end=end), found)
    if found != wanted:
        raise StorageError(
            f"{store.url_of(key)} reads back with CRC-32 {found:#010x}, {wanted:#010x} was sent",
            hint="nothing was committed; the storage or the way to it alters bytes",
        )


def _put_whole(
    store: Store, key: str, cutter: Cutter, image: memoryview | None, on_part: OnPart
) -> tuple[ObjectInfo, str]:
    (part,) = cutter.parts()
    on_part(0, True)
    data = part.data(image) if part.num_bytes else memoryview(b"")
    return store.put(key, data), "size"


def _stream(
    store: Store,
    key: str,
    cutter: Cutter,
    image: memoryview | None,
    on_part: OnPart,
    should_stop: Callable[[], CkptoolError | None],
) -> tuple[ObjectInfo, str]:
    writer = store.open_stream(key, num_bytes=cutter.num_bytes)
    try:
        for part in cutter.parts():
            _raise(should_stop())
            on_part(part.number, cutter.is_last(part))
            writer.write(part.data(image))
        return writer.commit(), "size"
    except BaseException:
        writer.abort()
        raise


def _assemble(
    store: Store,
    key: str,
    cutter: Cutter,
    num_bytes: int,
    image: memoryview | None,
    num_threads: int,
    on_open: Callable[[str], None],
    on_part: OnPart,
    should_stop: Callable[[], CkptoolError | None],
) -> tuple[ObjectInfo, str]:
    assembly = store.open_assembly(key, num_bytes=num_bytes)
    receipts: list[PartReceipt] = []
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ckptool-part")
    pending: set[Future[PartReceipt]] = set()
    try:
        on_open(assembly.token)
        for part in cutter.parts():
            _raise(should_stop())
            while len(pending) > num_threads:
                pending = _collect(pending, receipts)
                _raise(should_stop())
            on_part(part.number, cutter.is_last(part))
            pending.add(pool.submit(_send, assembly, part, image))
        while pending:
            _raise(should_stop())
            pending = _collect(pending, receipts)
        receipts.sort(key=lambda receipt: receipt.number)
        return assembly.commit(receipts), _verified(receipts)
    except BaseException:
        for future in pending:
            future.cancel()
        pool.shutdown(wait=True)
        assembly.abort()
        raise
    finally:
        pool.shutdown(wait=True)


def _send(assembly: Assembly, part: Part, image: memoryview | None) -> PartReceipt:
    crc = crc32_join(part.crcs)
    return assembly.write_part(part.number, part.offset, part.data(image), crc32=crc)


def _collect(
    pending: set[Future[PartReceipt]], receipts: list[PartReceipt]
) -> set[Future[PartReceipt]]:
    done, rest = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
    receipts.extend(future.result() for future in done)
    return set(rest)


def _verified(receipts: Sequence[PartReceipt]) -> str:
    return "checksum" if all(receipt.checksum is not None for receipt in receipts) else "size"


def _part_bytes(store: Store, num_bytes: int) -> int:
    limits = store.part_limits
    bounds = Bounds(limits.min_bytes, limits.max_bytes, limits.max_parts)
    return choose_part_bytes(num_bytes, bounds=bounds, preferred=limits.preferred_bytes)


def _raise(error: CkptoolError | None) -> None:
    if error is not None:
        raise error
