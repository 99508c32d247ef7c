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
from ckptool.model import Box, Extent, Item, TensorEntry, ValueEntry
from ckptool.planning.reads import coalesce
from ckptool.planning.sources import Source, indexed_source, needs_probe, source_of
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage.base import Store

__all__ = ["Wanted", "probe", "read_value"]

BATCH_ITEMS = 512
MAX_GAP_BYTES = 16 << 10
MAX_READ_BYTES = 4 << 20
MAX_VALUE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk whose payload a plan needs; ``whole``: the item is copied with its framing.

    ``row`` is its position among the chunks of the entry.
    """

    entry: TensorEntry
    box: Box
    item: Item
    whole: bool = False
    row: int | None = None


def probe(
    store: Store,
    wanted: Sequence[Wanted],
    *,
    jobs: int,
    payloads: Mapping[str, Payloads] | None = None,
    progress: Progress = NO_PROGRESS,
) -> list[Source]:
    """The sources of chunks, in their order; a source's check has its position as id.

    Where ``payloads``, of a ``ckpt.index``, tell place and CRC-32 of a payload, its item is not
    read, unless it is to be copied whole: then its framing has to be proved too.

    Raises DamagedError when an item's headers are broken or disagree with the index.
    """
    sources = [_known(want, payloads or {}, check_id=i) for i, want in enumerate(wanted)]
    order = sorted(
        (i for i, source in enumerate(sources) if source is None),
        key=lambda i: (wanted[i].item.file, wanted[i].item.offset),
    )
    batches = [order[at : at + BATCH_ITEMS] for at in range(0, len(order), BATCH_ITEMS)]
    progress.start("probe", num_bytes=None)
    with ThreadPoolExecutor(max(1, min(jobs, 8)), thread_name_prefix="probe") as pool:
        for batch, found in zip(
            batches,
            pool.map(lambda batch: _probe_batch(store, wanted, batch), batches),
            strict=True,
        ):
            for i, source in zip(batch, found, strict=True):
                sources[i] = source
    progress.finish()
    return [source for source in sources if source is not None]


def _known(want: Wanted, payloads: Mapping[str, Payloads], *, check_id: int) -> Source | None:
    """The source of a chunk whose payload the index tells of, whole, plain and with its CRC."""
    columns = payloads.get(want.entry.key)
    if columns is None or want.row is None or want.whole or not needs_probe(want.item):
        return None
    payload = columns[want.row]
    if payload.offset is None or payload.num_bytes is None or payload.crc32 is None:
        return None
    return indexed_source(
        want.entry,
        want.box,
        want.item,
        offset=payload.offset,
        num_bytes=payload.num_bytes,
        crc32=payload.crc32,
        check_id=check_id,
    )


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


def _probe_batch(store: Store, wanted: Sequence[Wanted], batch: Sequence[int]) -> list[Source]:
    probed = [i for i in batch if needs_probe(wanted[i].item)]
    headers = dict(zip(probed, _headers(store, [wanted[i] for i in probed]), strict=True))
    return [_source(wanted[i], headers.get(i), check_id=i) for i in batch]


@dataclass(frozen=True, slots=True)
class _Header:
    """An item's headers, and the CRC-32s of its framing: before the payload and behind it."""

    item: TensorItem
    framing: tuple[int, int] | None


def _source(want: Wanted, header: _Header | None, *, check_id: int) -> Source:
    return source_of(
        want.entry,
        want.box,
        want.item,
        None if header is None else header.item,
        check_id=check_id,
        framing=None if header is None else header.framing,
    )


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
