"""From an item's headers to a payload that a plan can use, with the check that proves it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.errors import DamagedError
from ckptool.formats.crc import crc32_combine
from ckptool.formats.dcp_item import TensorItem
from ckptool.formats.safetensors_shards import PAYLOAD
from ckptool.model import Box, Extent, Item, TensorEntry
from ckptool.planning.plan import Check, Payload

__all__ = ["Source", "indexed_source", "needs_probe", "source_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """One source chunk ready for a byte plan: its payload and its check.

    ``is_plain``: the payload's bytes stand in the file as they are. ``stored`` is the whole
    stored payload in the file, None where the item is wrapped. ``item_crc32`` is that of the
    whole item, framing included, where both are known.
    """

    payload: Payload
    check: Check
    stored: Extent | None
    item_crc32: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.payload.start is not None


def needs_probe(item: Item) -> bool:
    """Whether an item's own headers say where its payload is; wrapped and bare ones do not."""
    return not item.transforms


def source_of(
    entry: TensorEntry,
    box: Box,
    item: Item,
    header: TensorItem | None,
    *,
    check_id: int,
    framing: tuple[int, int] | None = None,
) -> Source:
    """The source of one chunk; ``header`` is None for items that are wrapped or bare.

    ``framing`` has the CRC-32s of what stands before the payload and behind it.

    Raises DamagedError when the item holds another dtype or shape than the index says.
    """
    if header is None and item.transforms == (PAYLOAD,):
        return _bare(entry, box, item, check_id)
    if header is None:
        whole = Extent(item.file, item.offset, item.end)
        check = Check(check_id, whole, None, entry.key, box, by_normaliser=True)
        return Source(Payload(item, entry.dtype, box, None, check_id, entry.key), check, None)
    _compare(entry, box, item, header)
    begin = item.offset + header.payload_offset
    stored = Extent(item.file, begin, begin + header.payload_num_bytes)
    plain = header.is_contiguous and not (header.conj or header.neg)
    start = begin + header.storage_offset * entry.dtype.itemsize if plain else None
    check = Check(check_id, stored, header.crc32, entry.key, box)
    payload = Payload(item, entry.dtype, box, start, check_id, entry.key)
    return Source(payload, check, stored, _item_crc(item, header, framing))


def indexed_source(
    entry: TensorEntry,
    box: Box,
    item: Item,
    *,
    offset: int,
    num_bytes: int,
    crc32: int,
    check_id: int,
) -> Source:
    """The source of a chunk whose plain payload begins ``offset`` bytes into its item.

    Raises DamagedError where that is not the chunk's size, or not inside the item.
    """
    wanted = box.num_elements * entry.dtype.itemsize
    if num_bytes != wanted or offset + num_bytes > item.length:
        raise DamagedError(
            f"{entry.key} {box}: ckpt.index says that its {wanted} bytes are bytes {offset} to "
            f"{offset + num_bytes} of an item of {item.length}",
            hint="remove ckpt.index: .metadata alone will do; then ckptool validate --read-data",
            entry=entry.key,
            file=item.file,
            offset=item.offset,
        )
    begin = item.offset + offset
    stored = Extent(item.file, begin, begin + num_bytes)
    check = Check(check_id, stored, crc32, entry.key, box)
    return Source(Payload(item, entry.dtype, box, begin, check_id, entry.key), check, stored)


def _item_crc(item: Item, header: TensorItem, framing: tuple[int, int] | None) -> int | None:
    if framing is None or header.crc32 is None:
        return None
    head, tail = framing
    tail_num_bytes = item.length - header.payload_offset - header.payload_num_bytes
    return crc32_combine(
        crc32_combine(head, header.crc32, header.payload_num_bytes), tail, tail_num_bytes
    )


def _bare(entry: TensorEntry, box: Box, item: Item, check_id: int) -> Source:
    num_bytes = box.num_elements * entry.dtype.itemsize
    if item.length != num_bytes:
        raise DamagedError(
            f"{entry.key} {box}: {item.length} bytes are stored at {item.file}:{item.offset}, "
            f"but the box has {num_bytes}",
            hint="ckptool validate lists all findings",
            entry=entry.key,
            file=item.file,
            offset=item.offset,
        )
    stored = Extent(item.file, item.offset, item.end)
    check = Check(check_id, stored, None, entry.key, box)
    return Source(Payload(item, entry.dtype, box, item.offset, check_id, entry.key), check, stored)


def _compare(entry: TensorEntry, box: Box, item: Item, header: TensorItem) -> None:
    if header.dtype == entry.dtype and header.shape == box.sizes:
        return
    raise DamagedError(
        f"{entry.key} {box}: the index says {entry.dtype} {list(box.sizes)}, but the item at "
        f"{item.file}:{item.offset} holds {header.dtype} {list(header.shape)}",
        hint="ckptool validate --read-data lists every such entry",
        entry=entry.key,
        file=item.file,
        offset=item.offset,
    )
