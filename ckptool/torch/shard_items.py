"""The items of a shard file, cut into its parts, with the CRC-32s of everything on the way.

The file's layout is known before the first byte: items in order, each a head, the payload as
it lies in memory, and a tail with the payload's CRC-32. Every byte is read for a CRC once;
the CRCs of 4 MiB blocks, payloads, parts and the whole file are joined from that one pass.
Nothing here knows torch: a payload is a function from a byte range to memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptool.dtypes import DType
from ckptool.formats.ckpt_index import BLOCK_BYTES
from ckptool.formats.ckpt_index import Payload as PayloadFacts
from ckptool.formats.crc import crc32, crc32_join
from ckptool.formats.dcp_item import ItemFraming, encode_item
from ckptool.model import Item

__all__ = [
    "Cutter",
    "ItemResult",
    "Part",
    "Payload",
    "ShardResult",
    "TensorItem",
    "ValueItem",
    "file_num_bytes",
]

Payload = Callable[[int, int], memoryview]


@dataclass(frozen=True)
class TensorItem:
    """One chunk to store; ``payload(start, end)`` gives its row-major bytes."""

    dtype: DType
    shape: tuple[int, ...]
    payload: Payload

    def framing(self) -> ItemFraming:
        return encode_item(dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True)
class ValueItem:
    """One encoded value."""

    data: bytes


@dataclass(frozen=True)
class ItemResult:
    """Where an item lies in its file; CRC-32s of its payload and of the payload's blocks.

    Of an item that ``transforms`` wrap, only the place is known.
    """

    offset: int
    length: int
    payload_start: int = 0
    payload_crc32: int = 0
    block_crc32s: tuple[int, ...] = ()
    transforms: tuple[str, ...] = ()

    def stored_in(self, file: str) -> Item:
        """The item as an index names it."""
        return Item(file, self.offset, self.length, self.transforms)

    def described(self, num_bytes: int) -> PayloadFacts:
        """What our index says of a payload of ``num_bytes``; of a wrapped one, nothing."""
        if self.transforms:
            return PayloadFacts(None, None)
        offset = self.payload_start - self.offset
        return PayloadFacts(offset, num_bytes, self.payload_crc32, self.block_crc32s)

    def to_json(self) -> list[Any]:
        blocks = list(self.block_crc32s)
        facts = [self.offset, self.length, self.payload_start, self.payload_crc32, blocks]
        return [*facts, list(self.transforms)]

    @classmethod
    def from_json(cls, row: list[Any]) -> ItemResult:
        return cls(row[0], row[1], row[2], row[3], tuple(row[4]), tuple(row[5]))


@dataclass(frozen=True)
class ShardResult:
    """What was stored; ``verified`` is "checksum" where the store checked our checksums."""

    key: str
    num_bytes: int
    crc32: int
    verified: str
    items: tuple[ItemResult, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "num_bytes": self.num_bytes,
            "crc32": self.crc32,
            "verified": self.verified,
            "items": [item.to_json() for item in self.items],
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> ShardResult:
        items = tuple(ItemResult.from_json(item) for item in row["items"])
        return cls(row["key"], row["num_bytes"], row["crc32"], row["verified"], items)


@dataclass
class Part:
    """Bytes of one part, in fragments that are joined only if they do not touch."""

    number: int
    offset: int
    fragments: list[memoryview] = field(default_factory=list)
    crcs: list[tuple[int, int]] = field(default_factory=list)
    num_bytes: int = 0

    def data(self, image: memoryview | None) -> memoryview:
        end = self.offset + self.num_bytes
        if image is not None and end <= len(image):
            return image[self.offset : end]
        if len(self.fragments) == 1:
            return self.fragments[0]
        return memoryview(b"".join(self.fragments))


def file_num_bytes(items: Sequence[TensorItem | ValueItem]) -> int:
    """How long the file will be."""
    return sum(len(i.data) if isinstance(i, ValueItem) else i.framing().length for i in items)


class Cutter:
    """Walks the file once: parts in order, with the CRCs of everything on the way."""

    def __init__(
        self,
        items: Sequence[TensorItem | ValueItem],
        *,
        num_bytes: int,
        part_bytes: int,
        image: memoryview | None,
    ) -> None:
        self.part_bytes = part_bytes
        self.results: list[ItemResult] = []
        self.crcs: list[tuple[int, int]] = []
        self.num_bytes = num_bytes
        self._items, self._image = items, image
        self._offset = 0

    def parts(self) -> Iterator[Part]:
        part = Part(0, 0)
        for fragment, crc in self._fragments():
            part.fragments.append(fragment)
            part.crcs.append((crc, len(fragment)))
            part.num_bytes += len(fragment)
            self.crcs.append((crc, len(fragment)))
            if part.num_bytes == self.part_bytes:
                yield part
                part = Part(part.number + 1, part.offset + part.num_bytes)
        if part.num_bytes or part.number == 0:
            yield part

    def is_last(self, part: Part) -> bool:
        return part.offset + part.num_bytes == self.num_bytes

    def _fragments(self) -> Iterator[tuple[memoryview, int]]:
        for item in self._items:
            start = self._offset
            if isinstance(item, ValueItem):
                yield from self._bytes(item.data)
                self.results.append(ItemResult(start, len(item.data)))
                continue
            framing = item.framing()
            yield from self._bytes(framing.head)
            blocks: list[tuple[int, int]] = []
            yield from self._payload(item, framing.payload_num_bytes, blocks)
            whole = crc32_join(blocks)
            yield from self._bytes(framing.tail(whole))
            crcs = tuple(crc for crc, _ in blocks)
            row = ItemResult(start, framing.length, start + len(framing.head), whole, crcs)
            self.results.append(row)

    def _payload(
        self, item: TensorItem, num_bytes: int, blocks: list[tuple[int, int]]
    ) -> Iterator[tuple[memoryview, int]]:
        at = 0
        while at < num_bytes:
            block_end = min((at // BLOCK_BYTES + 1) * BLOCK_BYTES, num_bytes)
            end = min(block_end, at + self._room())
            data = item.payload(at, end)
            crc = crc32(data)
            if at % BLOCK_BYTES:
                before = blocks.pop()
                blocks.append((crc32_join([before, (crc, end - at)]), before[1] + end - at))
            else:
                blocks.append((crc, end - at))
            self._offset += end - at
            at = end
            yield data, crc

    def _bytes(self, data: bytes) -> Iterator[tuple[memoryview, int]]:
        """Framing or a value; written into the image, which has room for the framing only."""
        view = memoryview(data)
        if self._image is not None and self._offset + len(data) <= len(self._image):
            self._image[self._offset : self._offset + len(data)] = view
        while len(view):
            piece = view[: self._room()]
            view = view[len(piece) :]
            self._offset += len(piece)
            yield piece, crc32(piece)

    def _room(self) -> int:
        return self.part_bytes - self._offset % self.part_bytes
