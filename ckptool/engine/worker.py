"""Does one step: read, verify, place, write. What any worker of any executor runs.

A step's result is small and JSON-able: the part's receipt, the CRC-32s of the source ranges
that it read, and those of output ranges that later tails need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ckptool.engine.cast import CastCount
from ckptool.engine.ledger import join_crcs
from ckptool.engine.normal import Normaliser
from ckptool.engine.place import Landing, land, landings
from ckptool.engine.tasks import CopyTask, ProveTask, StreamTask, Target, Task, WriteTask
from ckptool.formats.crc import crc32, crc32_combine
from ckptool.model import Extent
from ckptool.planning.parts import Step
from ckptool.planning.plan import Copy, Literal, Normal, Payload, Place, Tail
from ckptool.planning.reads import coalesce
from ckptool.storage.base import PartReceipt, Store

__all__ = ["MIN_PROVE_BYTES", "PROVE_BYTES", "Sink", "StepResult", "Worker"]

MAX_GAP_BYTES = 8 << 10
MAX_READ_BYTES = 16 << 20
MIN_PROVE_BYTES = 256 << 10
PROVE_BYTES = 4 << 20  # read at once for a CRC alone, at most: every job may hold as much


class Sink(Protocol):
    """Takes the bytes of a part; ``target`` names the assembly that it belongs to."""

    def write_part(
        self, target: Target, step: Step, data: memoryview, crc32: int
    ) -> PartReceipt: ...

    def copy_part(self, target: Target, step: Step, source_url: str) -> PartReceipt: ...


@dataclass(slots=True)
class StepResult:
    """What is known after a step.

    ``proofs``: (check id, start, end, CRC-32) of source ranges, in offsets of their object.
    ``sums``: (payload start, start, end, CRC-32) of output ranges. ``settled``: (check id,
    whether its CRC was there to check) of payloads that were proved whole. ``trusted``: checks
    whose bytes the server copied and nobody verified. ``was_there``: the part needed no writing.
    """

    output: int
    number: int
    crc32: int | None
    receipt: PartReceipt | None = None
    start: int = 0
    proofs: list[tuple[int, int, int, int]] = field(default_factory=list)
    sums: list[tuple[int, int, int, int]] = field(default_factory=list)
    settled: list[tuple[int, bool]] = field(default_factory=list)
    casts: list[CastCount] = field(default_factory=list)
    trusted: list[int] = field(default_factory=list)
    num_bytes_read: int = 0
    num_bytes_copied: int = 0
    was_there: bool = False


class Worker:
    """Does tasks against one source and one sink; safe to call from several threads.

    ``prove_bytes`` is how much is read at once for a CRC alone.
    """

    def __init__(
        self, source: Store, normaliser: Normaliser, sink: Sink, *, prove_bytes: int = PROVE_BYTES
    ) -> None:
        self._source, self._normaliser, self._sink = source, normaliser, sink
        self._prove_bytes = prove_bytes
        self._buffers = _Buffers()

    def do(self, task: Task) -> StepResult:
        """Do one task."""
        if isinstance(task, ProveTask):
            return self._prove(task)
        if isinstance(task, StreamTask):
            return self._prove_stream(task.payload)
        if isinstance(task, CopyTask):
            return self._copy(task)
        return self._write(task)

    def _write(self, task: WriteTask) -> StepResult:
        """Make the bytes of a step, prove them as far as a part can, and write them."""
        step = task.step
        result = StepResult(step.output, step.number, 0, start=step.start)
        with self._buffers.of(step.num_bytes) as buffer:
            filling = _Filling(self._source, self._normaliser, step, buffer, result)
            result.crc32 = crc = filling.fill(dict(task.known))
            if task.written is not None and _is_part(task.written, buffer, crc):
                result.receipt, result.was_there = replace(task.written, checksum=crc), True
            else:  # what an earlier run may have left is not what the plan says
                result.receipt = self._sink.write_part(task.target, step, buffer, crc)
        return result

    def _copy(self, task: CopyTask) -> StepResult:
        """Let the server copy a part; its CRC-32 stands for the bytes that we did not see."""
        step = task.step
        (copy,) = step.segments
        assert isinstance(copy, Copy)
        receipt = task.written
        if receipt is None:
            url = self._source.url_of(copy.extent.key)
            receipt = self._sink.copy_part(task.target, step, url)
        result = StepResult(step.output, step.number, None, receipt, step.start)
        result.was_there = task.written is not None
        result.num_bytes_copied = 0 if result.was_there else step.num_bytes
        crc = receipt.checksum
        if crc is None and not task.trust_server:
            crc = self._crc_of(copy.extent)
            result.num_bytes_read += step.num_bytes
        if crc is None:
            result.trusted = [check for _, _, check in copy.proofs]
            return result
        result.crc32 = crc
        ((start, end, check),) = copy.proofs
        result.proofs.append((check, start, end, crc))
        if step.sums[0] is not None:
            result.sums.append((step.sums[0], step.start, step.end, crc))
        return result

    def _crc_of(self, extent: Extent) -> int:
        crc = 0
        with self._buffers.of(min(self._prove_bytes, extent.num_bytes)) as buffer:
            for start in range(extent.start, extent.end, self._prove_bytes):
                end = min(start + self._prove_bytes, extent.end)
                piece = buffer[: end - start]
                self._source.read_into(Extent(extent.key, start, end), piece)
                crc = crc32(piece, crc)
        return crc

    def _prove(self, task: ProveTask) -> StepResult:
        """Read a range that no output needs, for its CRC alone."""
        extent = task.extent
        result = StepResult(-1, -1, 0, num_bytes_read=extent.num_bytes)
        result.proofs.append((task.check, extent.start, extent.end, self._crc_of(extent)))
        return result

    def _prove_stream(self, payload: Payload) -> StepResult:
        """Read a wrapped item in order, for its CRC alone."""
        verified = self._normaliser.prove(payload)
        result = StepResult(-1, -1, 0, num_bytes_read=payload.item.length)
        result.settled.append((payload.check, verified))
        return result


class _Buffers:
    """Buffers that are used again: fresh pages for every part cost more than the copy.

    The one that was given back last goes out first, so that there are no more than were ever
    in use at once, whatever the number of threads.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    @contextmanager
    def of(self, num_bytes: int) -> Iterator[memoryview]:
        """A buffer of so many bytes, of any content, while the block lasts."""
        try:
            kept = self._free.pop()
        except IndexError:
            kept = bytearray()
        if len(kept) < num_bytes:
            kept = bytearray(num_bytes)
        try:
            yield memoryview(kept)[:num_bytes]
        finally:
            self._free.append(kept)


def _is_part(listed: PartReceipt, data: memoryview, crc: int) -> bool:
    """Whether what the server lists of a part says that it holds these bytes."""
    if listed.checksum is not None:
        return listed.checksum == crc
    return listed.md5 == hashlib.md5(data, usedforsecurity=False).hexdigest()


class _Filling:
    """The bytes of one step on their way into its buffer."""

    def __init__(
        self,
        source: Store,
        normaliser: Normaliser,
        step: Step,
        buffer: memoryview,
        result: StepResult,
    ) -> None:
        self._source, self._normaliser = source, normaliser
        self._step, self._buffer, self._result = step, buffer, result
        self._crc = 0
        self._starts = [0]
        for segment in step.segments:
            self._starts.append(self._starts[-1] + segment.num_bytes)

    def fill(self, known: Mapping[int, int]) -> int:
        """Make all bytes; returns their CRC-32."""
        places = self._fetch()
        for i, segment in enumerate(self._step.segments):
            view = self._view(i)
            if isinstance(segment, Literal):
                view[:] = segment.data
            elif isinstance(segment, Normal):
                self._take_normal(segment.payload.check, segment, view)
            elif isinstance(segment, Place):
                lost = land(segment, places[i], view)
                if lost is not None:
                    self._result.casts.append(lost)
            elif isinstance(segment, Tail):
                view[:] = self._tail(segment, known)
            self._sum(i, view)
        return self._crc

    def _view(self, i: int) -> memoryview:
        return self._buffer[self._starts[i] : self._starts[i + 1]]

    def _fetch(self) -> dict[int, list[tuple[Landing, memoryview]]]:
        """Read all that the step needs: copies into the buffer, landings beside it."""
        extents: list[Extent] = []
        views: list[memoryview] = []
        places: dict[int, list[tuple[Landing, memoryview]]] = {}
        proofs: list[tuple[int, Extent, memoryview]] = []
        for i, segment in enumerate(self._step.segments):
            if isinstance(segment, Copy):
                extents.append(segment.extent)
                views.append(self._view(i))
            elif isinstance(segment, Place):
                arrivals = places[i] = []
                for landing in landings(segment):
                    data = memoryview(bytearray(landing.num_bytes))
                    arrivals.append((landing, data))
                    if landing.payload.start is None:
                        normal = Normal(landing.payload, landing.start, landing.end)
                        self._take_normal(landing.payload.check, normal, data)
                        continue
                    extent = landing.payload.extent(landing.start, landing.end)
                    extents.append(extent)
                    views.append(data)
                    proofs.append((landing.payload.check, extent, data))
        self._read(extents, views)
        for check, extent, data in proofs:
            self._result.proofs.append((check, extent.start, extent.end, crc32(data)))
        return places

    def _read(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
        groups = coalesce(extents, max_gap=MAX_GAP_BYTES, max_bytes=MAX_READ_BYTES)
        self._result.num_bytes_read += sum(joined.num_bytes for joined, _ in groups)
        if len(groups) == 1 and len(groups[0][1]) == 1:
            self._source.read_into(extents[0], views[0])
            return
        for (joined, members), data in zip(
            groups, self._source.read_many([joined for joined, _ in groups]), strict=True
        ):
            whole = memoryview(data)
            for i in members:
                start = extents[i].start - joined.start
                views[i][:] = whole[start : start + extents[i].num_bytes]

    def _take_normal(self, check: int, normal: Normal, view: memoryview) -> None:
        verified, num_bytes_read = self._normaliser.read_into(normal, view)
        self._result.num_bytes_read += num_bytes_read
        self._result.settled.append((check, verified))

    def _tail(self, tail: Tail, known: Mapping[int, int]) -> bytes:
        crcs = []
        for start, end in tail.payloads:
            mine = [(a, b, crc) for p, a, b, crc in self._result.sums if p == start]
            before = self._step.start
            if start < before:
                mine.append((start, min(end, before), known[start]))
            crc = join_crcs(mine, start, end)
            assert crc is not None, "a tail before its payload"
            crcs.append(crc)
        return tail.encode(tuple(crcs))

    def _sum(self, i: int, view: memoryview) -> None:
        """Note the CRC-32s of a segment: of payload ranges, for tails, and of the part."""
        segment = self._step.segments[i]
        begin = self._step.start + self._starts[i]
        crc = self._sum_copy(segment, view) if isinstance(segment, Copy) else crc32(view)
        result = self._result
        self._crc = crc32_combine(self._crc, crc, len(view)) if self._starts[i] else crc
        payload = self._step.sums[i]
        if payload is not None:
            result.sums.append((payload, begin, begin + len(view), crc))

    def _sum_copy(self, copy: Copy, view: memoryview) -> int:
        crc, position = 0, copy.extent.start
        base = copy.extent.start
        for start, end, check in copy.proofs:
            if start > position:
                crc = crc32(view[position - base : start - base], crc)
            piece = crc32(view[start - base : end - base])
            self._result.proofs.append((check, start, end, piece))
            crc = crc32_combine(crc, piece, end - start)
            position = end
        return crc32(view[position - base :], crc)
