"""From an item's headers to a payload that a plan can use, with the check that proves it. Pure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckptool.errors import DamagedError
from ckptool.formats.crc import crc32_combine
from ckptool.formats.dcp_item import TensorItem
from ckptool.formats.payloads import Payloads
from ckptool.formats.safetensors_shards import PAYLOAD
from ckptool.model import Box, Extent, Ints, Item, TensorEntry
from ckptool.planning.chunk_rows import ChunkRows, Wanted
from ckptool.planning.made import Lazy, Made
from ckptool.planning.plan import Check, Payload

__all__ = ["Source", "Sources", "needs_probe", "source_of"]


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
    want: Wanted,
    header: TensorItem | None,
    *,
    check_id: int,
    framing: tuple[int, int] | None = None,
) -> Source:
    """The source of one chunk; ``header`` is None for items that are wrapped or bare.

    ``framing`` has the CRC-32s of what stands before the payload and behind it.

    Raises DamagedError when the item holds another dtype or shape than the index says.
    """
    entry, box, item = want.entry, want.box, want.item
    if header is None and item.transforms == (PAYLOAD,):
        return _bare(entry, box, item, check_id)
    if header is None:
        payload = Payload(item, entry.dtype, box, None, check_id, entry.key)
        return Source(payload, _whole_check(payload), None)
    _compare(entry, box, item, header)
    begin = item.offset + header.payload_offset
    stored = Extent(item.file, begin, begin + header.payload_num_bytes)
    plain = header.is_contiguous and not (header.conj or header.neg)
    start = begin + header.storage_offset * entry.dtype.itemsize if plain else None
    check = Check(check_id, stored, header.crc32, entry.key, box)
    payload = Payload(item, entry.dtype, box, start, check_id, entry.key)
    return Source(payload, check, stored, _item_crc(item, header, framing))


class Sources(Lazy[Source]):
    """The sources of many chunks, in columns, each made as it is asked for.

    The check of source i has the id i. int64 ``[n]`` each, -1 for what is not there: ``start`` of
    a plain payload in its file, ``stored_start`` and ``stored_end`` of the whole stored payload,
    its ``crc32``, and ``item_crc32``.
    """

    def __init__(self, chunks: ChunkRows) -> None:
        self.chunks = chunks
        self.start = _unknown(len(chunks))
        self.stored_start, self.stored_end = _unknown(len(chunks)), _unknown(len(chunks))
        self.crc32, self.item_crc32 = _unknown(len(chunks)), _unknown(len(chunks))

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Source]:
        return itertools.chain.from_iterable(map(self.of_entry, range(len(self.chunks.entries))))

    def _element(self, index: int) -> Source:
        return self._made(int(self.chunks.owner[index]), index, index + 1)[0]

    def of_entry(self, number: int) -> list[Source]:
        """Those of the chunks of entry ``number``."""
        return self._made(number, *self.chunks.firsts[number : number + 2].tolist())

    def _made(self, number: int, first: int, last: int) -> list[Source]:
        """Sources ``[first, last)``, all of entry ``number``."""
        entry, here = self.chunks.entries[number], slice(first, last)
        columns = (self.start, self.stored_start, self.stored_end, self.crc32, self.item_crc32)
        numbers = zip(*(column[here].tolist() for column in columns), strict=True)
        found = []
        for i, chunk, (start, begin, end, crc32, item_crc32) in zip(
            range(first, last), entry.chunks.at(self.chunks.row[here]), numbers, strict=True
        ):
            item, box = chunk.item, chunk.box
            assert item is not None, "the structure was checked"
            payload = Payload(item, entry.dtype, box, _known(start), i, entry.key)
            if begin < 0:
                found.append(Source(payload, _whole_check(payload), None))
                continue
            stored = Extent(item.file, begin, end)
            check = Check(i, stored, _known(crc32), entry.key, box)
            found.append(Source(payload, check, stored, _known(item_crc32)))
        return found

    def put(self, index: int, source: Source) -> None:
        """Note the source of chunk ``index``."""
        if source.payload.start is not None:
            self.start[index] = source.payload.start
        if source.stored is not None:
            self.stored_start[index] = source.stored.start
            self.stored_end[index] = source.stored.end
        if source.check.crc32 is not None:
            self.crc32[index] = source.check.crc32
        if source.item_crc32 is not None:
            self.item_crc32[index] = source.item_crc32

    def put_indexed(self, number: int, payloads: Payloads) -> None:
        """Note what ``ckpt.index`` tells of the chunks of entry ``number``.

        Only of payloads that are known, plain and with a CRC, and whose items are not to be
        copied whole: then their framing has to be proved too. Raises DamagedError where a payload
        is not of its chunk's size, or not inside its item.
        """
        chunks = self.chunks
        first, last = int(chunks.firsts[number]), int(chunks.firsts[number + 1])
        entry, rows, here = chunks.entries[number], chunks.row[first:last], slice(first, last)
        offset, num_bytes = payloads.offsets[rows], payloads.num_bytes[rows]
        crc32 = payloads.crc32s[rows]
        known = ~chunks.whole[here] & ~entry.chunks.are_wrapped()[rows]
        known &= (offset >= 0) & (num_bytes >= 0) & (crc32 >= 0)
        wanted = entry.chunks.sizes[rows].prod(axis=1, dtype=np.int64) * entry.dtype.itemsize
        bad = known & ((num_bytes != wanted) | (offset + num_bytes > chunks.length[here]))
        if bad.any():
            i = int(np.argmax(bad))
            raise _misplaced(chunks[first + i], int(offset[i]), int(num_bytes[i]))
        begin = np.where(known, chunks.start[here] + offset, -1)
        self.start[here] = self.stored_start[here] = begin
        self.stored_end[here] = np.where(known, begin + num_bytes, -1)
        self.crc32[here] = np.where(known, crc32, -1)

    @property
    def checks(self) -> Sequence[Check]:
        return Made(len(self), self._check, walk=self._all_checks)

    def by_entry(self) -> dict[str, Sequence[Source]]:
        """Those of the chunks of each entry."""
        edges = itertools.pairwise(self.chunks.firsts.tolist())
        return {
            entry.key: Made(
                last - first,
                functools.partial(self._after, first),
                walk=functools.partial(self.of_entry, number),
            )
            for number, (entry, (first, last)) in enumerate(
                zip(self.chunks.entries, edges, strict=True)
            )
        }

    def wrapped_and_whole(self) -> Sequence[Payload]:
        """The payloads of wrapped items that are copied as they are."""
        found = np.flatnonzero(self.chunks.whole & (self.stored_start < 0))
        return Made(len(found), functools.partial(self._payload_of, found))

    def unknown(self) -> Ints:
        """The positions of which nothing is noted, in the order of files and bytes."""
        order = self.chunks.by_place()
        return order[self.stored_start[order] < 0]

    def _check(self, index: int) -> Check:
        return self[index].check

    def _all_checks(self) -> Iterator[Check]:
        return (source.check for source in self)

    def _after(self, first: int, index: int) -> Source:
        return self[first + index]

    def _payload_of(self, positions: Ints, index: int) -> Payload:
        return self[int(positions[index])].payload


def _unknown(length: int) -> Ints:
    return np.full(length, -1, np.int64)


def _known(number: int) -> int | None:
    return None if number < 0 else number


def _misplaced(want: Wanted, offset: int, num_bytes: int) -> DamagedError:
    item, wanted = want.item, want.box.num_elements * want.entry.dtype.itemsize
    return DamagedError(
        f"{want.entry.key} {want.box}: ckpt.index says that its {wanted} bytes are bytes {offset} "
        f"to {offset + num_bytes} of an item of {item.length}",
        hint="remove ckpt.index: .metadata alone will do; then ckptool validate --read-data",
        entry=want.entry.key,
        file=item.file,
        offset=item.offset,
    )


def _whole_check(payload: Payload) -> Check:
    """That of a wrapped item: its payload is proved while it is made normal."""
    whole = Extent(payload.item.file, payload.item.offset, payload.item.end)
    return Check(payload.check, whole, None, payload.entry, payload.box, by_normaliser=True)


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
