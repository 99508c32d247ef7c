"""Reads the heads and tails of items: the second stage of a plan, between index and bytes.

One coalesced pass: the tail of an item and the head of its neighbour are one range. What the
headers say is compared with the index before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptool.engine.located import located
from ckptool.engine.normal import item_blocks
from ckptool.errors import DamagedError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import (
    NeedMore,
    TensorItem,
    parse_tensor_item,
    parse_value_item,
    probe_ranges,
)
from ckptool.formats.payloads import Payloads
from ckptool.model import Extent, Item, ValueEntry
from ckptool.planning.chunk_rows import ChunkRows, Wanted
from ckptool.planning.reads import coalesce
from ckptool.planning.sources import Sources, needs_probe, source_of
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage.base import Store

__all__ = ["probe", "read_value"]

BATCH_ITEMS = 512
MAX_GAP_BYTES = 16 << 10
MAX_READ_BYTES = 4 << 20
MAX_VALUE_BYTES = 1 << 30


def probe(
    store: Store,
    chunks: ChunkRows,
    *,
    jobs: int,
    payloads: Mapping[str, Payloads] | None = None,
    progress: Progress = NO_PROGRESS,
) -> Sources:
    """The sources of chunks, in their order.

    Where ``payloads``, of a ``ckpt.index``, tell place and CRC-32 of a payload, its item is not
    read, unless it is to be copied whole: then its framing has to be proved too.

    Raises DamagedError when an item's headers are broken or disagree with the index.
    """
    sources = Sources(chunks)
    for number, entry in enumerate(chunks.entries):
        known = (payloads or {}).get(entry.key)
        if known is not None:
            sources.put_indexed(number, known)
    order = sources.unknown()
    batches = [order[at : at + BATCH_ITEMS] for at in range(0, len(order), BATCH_ITEMS)]
    progress.start("probe", num_bytes=None)
    with ThreadPoolExecutor(max(1, min(jobs, 8)), thread_name_prefix="probe") as pool:
        for _ in pool.map(lambda batch: _probe_batch(store, sources, batch.tolist()), batches):
            pass
    progress.finish()
    return sources


def read_value(store: Store, entry: ValueEntry) -> bytes:
    """The stored bytes of a value's item, proved against the CRCs of its own records.

    The bytes are as they are stored, wrapped or not.
    """
    item = entry.item
    if item is None:
        raise DamagedError(
            f"{entry.key}: the index lists this value, but nothing is stored for it",
            hint="ckptool validate lists all findings",
            entry=entry.key,
        )
    raw = store.read(item.file, start=item.offset, end=item.end)
    with located(entry.key, None, item):
        parse_value_item(_unwrapped(store, item) if item.transforms else raw)
    return raw


def _unwrapped(store: Store, item: Item) -> bytes:
    return b"".join(item_blocks(store, item, max_bytes=MAX_VALUE_BYTES))


def _probe_batch(store: Store, sources: Sources, batch: Sequence[int]) -> None:
    wanted = {i: sources.chunks[i] for i in batch}
    probed = [i for i in batch if needs_probe(wanted[i].item)]
    headers = dict(zip(probed, _headers(store, [wanted[i] for i in probed]), strict=True))
    for i in batch:
        header = headers.get(i)
        sources.put(
            i,
            source_of(
                wanted[i],
                None if header is None else header.item,
                check_id=i,
                framing=None if header is None else header.framing,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Header:
    """An item's headers, and the CRC-32s of its framing: before the payload and behind it."""

    item: TensorItem
    framing: tuple[int, int] | None


def _headers(store: Store, wanted: Sequence[Wanted]) -> Iterator[_Header]:
    extents: list[Extent] = []
    for want in wanted:
        extents += _ends(want.item, *_first_guess(want))
    parts = _read(store, extents)
    for i, want in enumerate(wanted):
        yield _parse(store, want, parts[2 * i], parts[2 * i + 1])


def _first_guess(want: Wanted) -> tuple[int, int]:
    num_bytes = want.box.num_elements * want.entry.dtype.itemsize
    return probe_ranges(want.item.length, num_bytes)


def _ends(item: Item, head_num_bytes: int, tail_num_bytes: int) -> tuple[Extent, Extent]:
    head_end = min(item.end, item.offset + head_num_bytes)
    tail_start = max(item.offset, item.end - tail_num_bytes)
    return Extent(item.file, item.offset, head_end), Extent(item.file, tail_start, item.end)


def _read(store: Store, extents: Sequence[Extent]) -> list[bytes]:
    groups = coalesce(extents, max_gap=MAX_GAP_BYTES, max_bytes=MAX_READ_BYTES)
    parts: list[bytes] = [b""] * len(extents)
    data = store.read_many([joined for joined, _ in groups])
    for (joined, members), whole in zip(groups, data, strict=True):
        for i in members:
            start = extents[i].start - joined.start
            parts[i] = whole[start : start + extents[i].num_bytes]
    return parts


def _parse(store: Store, want: Wanted, head: bytes, tail: bytes) -> _Header:
    item = want.item
    while True:
        try:
            with located(want.entry.key, want.box, item):
                found = parse_tensor_item(
                    length=item.length, head=head, tail=tail, whole=want.whole
                )
                return _Header(found, _framing(found, item, head, tail))
        except NeedMore as more:
            sizes = (more.head_num_bytes, more.tail_num_bytes)
        head, tail = _read(store, _ends(item, *sizes))


def _framing(found: TensorItem, item: Item, head: bytes, tail: bytes) -> tuple[int, int] | None:
    behind = item.length - found.payload_offset - found.payload_num_bytes
    if len(head) < found.payload_offset or len(tail) < behind:
        return None
    return crc32(head[: found.payload_offset]), crc32(tail[len(tail) - behind :])
