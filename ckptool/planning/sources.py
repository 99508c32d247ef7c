"""From an item's headers to a payload that a plan can use, with the check that proves it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.errors import DamagedError
from ckptool.formats.dcp_item import TensorItem
from ckptool.formats.safetensors_shards import PAYLOAD
from ckptool.model import Box, Extent, Item, TensorEntry
from ckptool.planning.plan import Check, Payload

__all__ = ["Source", "needs_probe", "source_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """One source chunk ready for a byte plan: its payload and its check.

    ``is_plain``: the payload's bytes stand in the file as they are. ``stored`` is the whole
    stored payload in the file, None where the item is wrapped.
    """

    payload: Payload
    check: Check
    stored: Extent | None

    @property
    def is_plain(self) -> bool:
        return self.payload.start is not None


def needs_probe(item: Item) -> bool:
    """Whether an item's own headers say where its payload is; wrapped and bare ones do not."""
    return not item.transforms


def source_of(
    entry: TensorEntry, box: Box, item: Item, header: TensorItem | None, *, check_id: int
) -> Source:
    """The source of one chunk; ``header`` is None for items that are wrapped or bare.

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
    return Source(Payload(item, entry.dtype, box, start, check_id, entry.key), check, stored)


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
