"""A sink that compresses new items on the way, in DCP's own ``stream.zstd/1`` form.

Compressed lengths are not known before the bytes are there, so files are written in order, and
where their items stand is known afterwards.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.engine.sinks import Writing
from ckptool.engine.tasks import Target
from ckptool.formats.crc import crc32
from ckptool.formats.zstd_stream import ZSTD, open_compressor
from ckptool.model import Item
from ckptool.planning.copies import PartGroup
from ckptool.planning.parts import Step
from ckptool.planning.plan import Output
from ckptool.storage.base import ObjectInfo, PartReceipt, Store

__all__ = ["Compressing"]


class Compressing(Writing):
    """Writes the outputs of a plan in order; the items in ``fresh`` are compressed.

    ``items`` are those of the plan, by output key and in order. After the run ``placed`` maps
    each of them to where it stands, and ``objects`` has each file's length and CRC-32. About
    half of ``max_memory`` is held here.
    """

    def __init__(
        self,
        dest: Store,
        outputs: Sequence[Output],
        *,
        items: Mapping[str, Sequence[Item]],
        fresh: Collection[Item],
        num_threads: int,
        max_memory: int,
    ) -> None:
        super().__init__(dest, outputs)
        self._items, self._fresh = items, fresh
        self._max_stream_memory = max_memory // 4  # half is for parts that are being made
        self._compressor = open_compressor(num_threads=num_threads, max_memory=max_memory // 4)
        self.placed: dict[Item, Item] = {}
        self.objects: dict[str, tuple[int, int]] = {}
        self._infos: list[ObjectInfo] = []
        self._frame: Any = None
        self._length = self._crc = self._begin = 0

    @property
    def in_order(self) -> bool:
        return True

    def open(self, index: int, *, groups: Sequence[PartGroup] = ()) -> None:
        output = self._outputs[index]
        self._streams[index] = self._dest.open_stream(
            output.key,
            num_bytes=output.num_bytes + output.num_bytes // 128,  # what does not compress grows
            max_memory=self._max_stream_memory,
        )
        self._receipts[index] = []

    def write_part(self, target: Target, step: Step, data: memoryview, crc32: int) -> PartReceipt:
        """Write the next bytes of a file, item by item; closes the file after its last."""
        if step.start == 0:
            self._length = self._crc = 0
        items = self._items[step.key]
        position = step.start
        i = bisect.bisect_right(items, position, key=lambda item: item.offset) - 1
        while position < step.end:
            item = items[i]
            end = min(step.end, item.end)
            self._write(step, item, data[position - step.start : end - step.start], position)
            position, i = end, i + 1
        output = self._outputs[step.output]
        if step.end == output.num_bytes:
            self._infos.append(self._streams[step.output].commit())
            self._committed.append(output.key)
            self.objects[output.key] = (self._length, self._crc)
        return PartReceipt(step.number, step.num_bytes)

    def commit(self, *, published: Callable[[int], None] | None = None) -> list[ObjectInfo]:
        """Every file is visible already; without ``.metadata`` none counts."""
        self._done = True
        return self._infos

    def _write(self, step: Step, item: Item, data: memoryview, position: int) -> None:
        if position == item.offset:
            self._begin = self._length
            self._frame = self._compressor.compressobj() if item in self._fresh else None
        self._send(step.output, data if self._frame is None else self._frame.compress(data))
        if position + len(data) < item.end:
            return
        if self._frame is not None:
            self._send(step.output, self._frame.flush())
        transforms = (*item.transforms, ZSTD) if self._frame is not None else item.transforms
        self.placed[item] = replace(
            item,
            offset=self._begin,
            length=self._length - self._begin,
            transforms=transforms,
        )

    def _send(self, index: int, data: bytes | memoryview) -> None:
        self._streams[index].write(data)
        self._crc = crc32(data, self._crc)
        self._length += len(data)
