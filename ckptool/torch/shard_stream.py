"""Items -> the bytes of a shard file in order, each compressed where that pays.

A compressed item is wrapped as a whole in one zstd stream, DCP's own ``stream.zstd/1``. An item
is tried if its first MiB gets a tenth smaller; what it gives is held back, and is taken only if
the whole item gets a tenth smaller, too. An item larger than what can be held back is judged
by so much of it. Memory stays within that and a few blocks. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zstandard

from ckptool.errors import CkptoolError
from ckptool.formats.ckpt_index import BLOCK_BYTES
from ckptool.formats.crc import crc32, crc32_join
from ckptool.formats.zstd_stream import ZSTD, open_compressor
from ckptool.storage.base import ObjectInfo, StreamWriter
from ckptool.torch.shard_items import ItemResult, TensorItem, ValueItem

__all__ = ["Streamed", "stream_items"]

_WORTH = 0.9
_MIN_BYTES = 64 << 10
_SAMPLE_BYTES = 1 << 20
_HELD_BYTES = 64 << 20


@dataclass(frozen=True)
class Streamed:
    """What was sent; where each item stands is known only now."""

    info: ObjectInfo
    num_bytes: int
    crc32: int
    items: tuple[ItemResult, ...]


def stream_items(
    writer: StreamWriter,
    items: Sequence[TensorItem | ValueItem],
    *,
    num_threads: int,
    on_piece: Callable[[int, bool], None] = lambda number, is_last: None,
    should_stop: Callable[[], CkptoolError | None] = lambda: None,
) -> Streamed:
    """Write all items and commit; aborts and raises on any failure.

    ``on_piece`` gets the number of each piece of at most 4 MiB before it is compressed or
    sent, and whether it is one of the last item's end; ``should_stop`` is asked before each.
    """
    packer = _Packer(writer, num_threads, on_piece, should_stop)
    try:
        results = [packer.pack(item, is_last=item is items[-1]) for item in items]
        return Streamed(writer.commit(), packer.num_bytes, packer.crc32, tuple(results))
    except BaseException:
        writer.abort()
        raise


class _Packer:
    def __init__(
        self,
        writer: StreamWriter,
        num_threads: int,
        on_piece: Callable[[int, bool], None],
        should_stop: Callable[[], CkptoolError | None],
    ) -> None:
        self.num_bytes = self.crc32 = 0
        self._writer, self._on_piece, self._should_stop = writer, on_piece, should_stop
        self._compressor = open_compressor(num_threads=num_threads)
        self._num_pieces = 0

    def pack(self, item: TensorItem | ValueItem, *, is_last: bool) -> ItemResult:
        start = self.num_bytes
        if _looks_worth_it(item) and self._compressed(item, is_last=is_last):
            return ItemResult(start, self.num_bytes - start, transforms=(ZSTD,))
        blocks: list[tuple[int, int]] = []
        for piece in self._pieces(item, blocks, is_last=is_last):
            self._send(piece)
        length = self.num_bytes - start
        if isinstance(item, ValueItem):
            return ItemResult(start, length)
        payload_start = start + len(item.framing().head)
        crcs = tuple(crc for crc, _ in blocks)
        return ItemResult(start, length, payload_start, crc32_join(blocks), crcs)

    def _compressed(self, item: TensorItem | ValueItem, *, is_last: bool) -> bool:
        """Send the item compressed; False, and nothing sent, where that does not pay."""
        frame = self._compressor.compressobj()
        held: list[bytes] = []
        taken, is_judged = 0, False
        for piece in self._pieces(item, [], is_last=is_last):
            held.append(frame.compress(piece))
            taken += len(piece)
            if not is_judged and taken >= _HELD_BYTES:
                held.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))  # what it owes
                if sum(map(len, held)) > _WORTH * taken:
                    return False
                is_judged = True
            if is_judged:
                self._send_all(held)
        held.append(frame.flush())
        if not is_judged and sum(map(len, held)) > _WORTH * taken:
            return False
        self._send_all(held)
        return True

    def _pieces(
        self, item: TensorItem | ValueItem, blocks: list[tuple[int, int]], *, is_last: bool
    ) -> Iterator[bytes | memoryview]:
        """The item's bytes in order; ``blocks`` gets CRC-32 and length of each payload block."""
        if isinstance(item, ValueItem):
            self._note(is_last)
            yield item.data
            return
        framing = item.framing()
        yield framing.head
        num_bytes = framing.payload_num_bytes
        for start in range(0, num_bytes, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, num_bytes)
            self._note(is_last and end == num_bytes)
            data = item.payload(start, end)
            blocks.append((crc32(data), end - start))
            yield data
        yield framing.tail(crc32_join(blocks))

    def _note(self, is_last: bool) -> None:
        error = self._should_stop()
        if error is not None:
            raise error
        self._on_piece(self._num_pieces, is_last)
        self._num_pieces += 1

    def _send_all(self, held: list[bytes]) -> None:
        for data in held:
            self._send(data)
        held.clear()

    def _send(self, data: bytes | memoryview) -> None:
        if len(data):
            self._writer.write(data)
            self.crc32 = crc32(data, self.crc32)
            self.num_bytes += len(data)


def _looks_worth_it(item: TensorItem | ValueItem) -> bool:
    if isinstance(item, ValueItem):
        sample: bytes | memoryview = memoryview(item.data)[:_SAMPLE_BYTES]
    else:
        num_bytes = item.framing().payload_num_bytes
        if num_bytes < _MIN_BYTES:
            return False
        sample = item.payload(0, min(num_bytes, _SAMPLE_BYTES))
    if len(sample) < _MIN_BYTES:
        return False
    return len(open_compressor(num_threads=1).compress(sample)) <= _WORTH * len(sample)
