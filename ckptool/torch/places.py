"""Where the payload of a stored chunk lies, and how much of it a read can verify.

From our index at once; else from the head and the tail of the item, which one coalesced round
of small reads brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptool.dtypes import DType
from ckptool.errors import CkptoolError, DamagedError
from ckptool.formats.dcp_item import NeedMore, TensorItem, parse_tensor_item, probe_ranges
from ckptool.model import Extent, Item
from ckptool.planning.reads import coalesce
from ckptool.storage.base import Store

__all__ = ["Place", "parse_item", "probe_places"]

_MAX_GAP = 1024
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """The payload of one item; ``start`` counts from the start of its file.

    ``block_crc32s`` are of ``block_num_bytes`` each, empty where there are none.
    """

    start: int
    num_bytes: int
    strides: tuple[int, ...]
    storage_offset: int = 0
    crc32: int | None = None
    conj: bool = False
    neg: bool = False
    plain: bool = True
    block_num_bytes: int = 0
    block_crc32s: Sequence[int] = ()


def probe_places(
    store: Store, wanted: Sequence[tuple[str, Item, DType, tuple[int, ...]]]
) -> tuple[list[Place], int]:
    """The place of each (entry, item, dtype, chunk's sizes), and how many bytes were fetched."""
    extents: list[Extent] = []
    for _, item, dtype, sizes in wanted:
        head, tail = probe_ranges(item.length, _num_bytes(dtype, sizes))
        extents.append(Extent(item.file, item.offset, item.offset + head))
        extents.append(Extent(item.file, item.end - tail, item.end))
    groups = coalesce(extents, max_gap=_MAX_GAP, max_bytes=_MAX_BYTES)
    pieces: list[bytes] = [b""] * len(extents)
    for (extent, members), data in zip(
        groups, store.read_many([extent for extent, _ in groups]), strict=True
    ):
        for member in members:
            start = extents[member].start - extent.start
            pieces[member] = data[start : start + extents[member].num_bytes]
    num_bytes = sum(extent.num_bytes for extent, _ in groups)
    places = []
    for number, (key, item, dtype, sizes) in enumerate(wanted):
        head_bytes, tail_bytes = pieces[2 * number], pieces[2 * number + 1]
        found, more = _parse(store, key, item, head_bytes, tail_bytes)
        num_bytes += more
        places.append(_place(store, key, item, found, dtype, sizes))
    return places, num_bytes


def parse_item(
    store: Store, key: str, item: Item, data: bytes, *, dtype: DType, sizes: tuple[int, ...]
) -> Place:
    """The place inside an item that is at hand as a whole, counted from its start."""
    found, _ = _parse(store, key, Item(item.file, 0, len(data)), data, b"")
    return _place(store, key, Item(item.file, 0, len(data)), found, dtype, sizes)


def _parse(store: Store, key: str, item: Item, head: bytes, tail: bytes) -> tuple[TensorItem, int]:
    fetched = 0
    while True:
        try:
            return parse_tensor_item(length=item.length, head=head, tail=tail), fetched
        except NeedMore as need:
            middle = item.offset + need.head_num_bytes
            head = store.read(item.file, start=item.offset, end=middle)
            tail = store.read(item.file, start=item.end - need.tail_num_bytes, end=item.end)
            fetched += len(head) + len(tail)
        except CkptoolError as error:
            raise type(error)(
                f"{key}: {error.message}, in the item at byte {item.offset} of "
                f"{store.url_of(item.file)}",
                hint=error.hint or "ckptool validate --read-data says what else is damaged",
                **{**error.facts, "entry": key, "file": item.file},
            ) from error


def _place(
    store: Store, key: str, item: Item, found: TensorItem, dtype: DType, sizes: tuple[int, ...]
) -> Place:
    if (found.dtype, found.shape) != (dtype, sizes):
        raise DamagedError(
            f"{key}: the index says {dtype} {list(sizes)}, the item at byte {item.offset} of "
            f"{store.url_of(item.file)} holds {found.dtype} {list(found.shape)}",
            hint="ckptool validate --read-data says what else is damaged",
            entry=key,
            file=item.file,
            offset=item.offset,
        )
    return Place(
        item.offset + found.payload_offset,
        found.payload_num_bytes,
        found.strides,
        found.storage_offset,
        found.crc32,
        found.conj,
        found.neg,
        found.is_plain,
    )


def _num_bytes(dtype: DType, sizes: tuple[int, ...]) -> int:
    num_bytes = dtype.itemsize
    for size in sizes:
        num_bytes *= size
    return num_bytes
