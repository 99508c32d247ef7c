"""Runs a byte plan: hands steps to workers under a memory budget, and keeps the ledger.

Nothing is visible when it returns: the caller commits. A failure anywhere stops the run and
raises; what was not proved by then is read again for its CRC alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from ckptool.engine.cast import CastCount
from ckptool.engine.ledger import Ledger, Piece, join_crcs
from ckptool.engine.normal import Normaliser
from ckptool.engine.sinks import Writing
from ckptool.engine.worker import StepResult, Worker
from ckptool.errors import OverBudgetError
from ckptool.formats.crc import crc32_combine
from ckptool.model import Extent
from ckptool.planning.parts import Bounds, Step, choose_part_bytes, cut_output
from ckptool.planning.plan import Check, Payload, Place, Plan
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage.base import Store

__all__ = ["Budget", "RunReport", "run_plan"]

LOCAL_PART_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be in flight: buffers of ``max_memory_bytes``, ``num_jobs`` steps at once."""

    max_memory_bytes: int
    num_jobs: int

    @classmethod
    def of(cls, *, max_memory: int, jobs: int | None, stores: tuple[Store, ...]) -> Budget:
        """The budget of a user's ``--max-memory`` and ``--jobs``; None picks what suits."""
        remote = any(
            store.capabilities.server_copy or not store.capabilities.assembly for store in stores
        )
        picked = jobs or (16 if remote else min(8, 2 * (os.cpu_count() or 1)))
        return cls(max_memory, picked)


@dataclass
class RunReport:
    """What a run did. ``objects`` has, per output key, its length and CRC-32."""

    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_parts: int = 0
    payloads_proved: int = 0
    unverifiable: list[Check] = field(default_factory=list)
    casts: dict[str, CastCount] = field(default_factory=dict)
    objects: dict[str, tuple[int, int]] = field(default_factory=dict)


def run_plan(
    plan: Plan,
    *,
    source: Store,
    writing: Writing,
    dest: Store,
    budget: Budget,
    streams: Sequence[Payload] = (),
    progress: Progress = NO_PROGRESS,
) -> RunReport:
    """Do every step of a plan and prove every payload it used.

    ``streams`` are wrapped items that are copied as they are: they are read once more, in
    order, to be proved.

    Raises DamagedError for the first payload whose bytes are not what its item says,
    StorageError when reading or writing fails, OverBudgetError when no part fits the budget.
    """
    normaliser = Normaliser(source, max_memory_bytes=budget.max_memory_bytes // 8)
    try:
        run = _Run(plan, source, writing, dest, budget, progress, normaliser)
        return run.run(streams)
    finally:
        normaliser.close()


class _Run:
    def __init__(
        self,
        plan: Plan,
        source: Store,
        writing: Writing,
        dest: Store,
        budget: Budget,
        progress: Progress,
        normaliser: Normaliser,
    ) -> None:
        self._plan, self._writing, self._budget = plan, writing, budget
        self._dest, self._progress = dest, progress
        self._worker = Worker(source, normaliser)
        self._ledger = Ledger(plan.checks)
        self._report = RunReport()
        self._sums: dict[tuple[int, int], list[Piece]] = {}
        self._crcs: dict[int, list[tuple[int, int, int]]] = {}
        self._active: dict[Future[StepResult], Step] = {}
        self._held: list[Step] = []
        self._in_flight_bytes = 0

    def run(self, streams: Sequence[Payload]) -> RunReport:
        num_jobs = 1 if self._writing.in_order else self._budget.num_jobs
        with ThreadPoolExecutor(num_jobs, thread_name_prefix="ckptool") as pool:
            try:
                self._do_steps(pool, num_jobs)
                for result in pool.map(self._worker.prove_stream, streams):
                    self._prove(result)
                self._close_gaps(pool)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        self._report.payloads_proved = self._ledger.proved
        self._report.unverifiable = self._ledger.unverifiable
        self._report.objects = self._objects()
        return self._report

    def _do_steps(self, pool: ThreadPoolExecutor, num_jobs: int) -> None:
        steps = self._steps(num_jobs)
        step = next(steps, None)
        while step is not None or self._active or self._held:
            ready = next((held for held in self._held if self._is_ready(held)), None)
            if ready is not None and self._fits(ready, num_jobs):
                self._held.remove(ready)
                self._submit(pool, ready)
            elif step is not None and self._fits(step, num_jobs) and len(self._held) < num_jobs:
                if self._is_ready(step):
                    self._submit(pool, step)
                else:
                    self._held.append(step)
                step = next(steps, None)
            else:
                self._wait()

    def _steps(self, num_jobs: int) -> Iterator[Step]:
        limits = self._dest.part_limits
        bounds = Bounds(limits.min_bytes, limits.max_bytes, limits.max_parts)
        room = self._budget.max_memory_bytes // (4 * num_jobs)
        for index, output in enumerate(self._plan.outputs):
            part_bytes = choose_part_bytes(
                output.num_bytes, bounds=bounds, preferred=min(limits.preferred_bytes, room)
            )
            if 2 * min(part_bytes, output.num_bytes) > self._budget.max_memory_bytes:
                raise OverBudgetError(
                    f"{output.key}: its parts have {part_bytes} bytes, more than --max-memory "
                    f"{self._budget.max_memory_bytes} leaves room for",
                    hint="give a larger --max-memory, or make smaller files",
                )
            self._writing.open(index)
            yield from cut_output(
                output, index=index, part_bytes=part_bytes, min_bytes=limits.min_bytes
            )

    def _fits(self, step: Step, num_jobs: int) -> bool:
        if len(self._active) >= num_jobs:
            return False
        room = self._budget.max_memory_bytes // 2
        return not self._active or self._in_flight_bytes + _memory(step) <= room

    def _is_ready(self, step: Step) -> bool:
        """Whether all parts that hold payloads of the step's tails are done."""
        starts = [p[0] for tail in step.tails for p in tail.payloads if p[0] < step.start]
        if not starts:
            return True
        first = min(starts)
        unfinished = (*self._active.values(), *self._held)
        return not any(
            other.output == step.output and other.number < step.number and other.end > first
            for other in unfinished
        )

    def _submit(self, pool: ThreadPoolExecutor, step: Step) -> None:
        known = {
            start: self._known(step.output, start, min(end, step.start))
            for tail in step.tails
            for start, end in tail.payloads
            if start < step.start
        }
        future = pool.submit(self._worker.do, step, self._writing, known=known)
        self._active[future] = step
        self._in_flight_bytes += _memory(step)

    def _known(self, output: int, start: int, end: int) -> int:
        pieces = self._sums.get((output, start), [])
        crc = join_crcs(pieces, start, end)
        assert crc is not None, "a step was submitted before the parts that it needs"
        self._sums[output, start] = [(start, end, crc), *(p for p in pieces if p[0] >= end)]
        return crc

    def _wait(self) -> None:
        done, _ = wait(self._active, return_when=FIRST_COMPLETED)
        for future in done:
            step = self._active.pop(future)
            self._in_flight_bytes -= _memory(step)
            self._take(step, future.result())

    def _take(self, step: Step, result: StepResult) -> None:
        assert result.receipt is not None
        self._writing.keep(step.output, result.receipt)
        self._crcs.setdefault(step.output, []).append((step.start, step.end, result.crc32))
        for payload, start, end, crc in result.sums:
            self._sums.setdefault((step.output, payload), []).append((start, end, crc))
        report = self._report
        for count in result.casts:
            old = report.casts.get(count.entry, CastCount(count.entry, 0, 0))
            report.casts[count.entry] = CastCount(
                count.entry,
                old.overflows + count.overflows,
                old.underflows + count.underflows,
            )
        report.num_parts += 1
        report.num_bytes_written += step.num_bytes
        self._prove(result)
        self._progress.advance(step.num_bytes)

    def _prove(self, result: StepResult) -> None:
        self._report.num_bytes_read += result.num_bytes_read
        for check, start, end, crc in result.proofs:
            self._ledger.add(check, (start, end, crc))
        for check, verified in result.settled:
            self._ledger.settle(check, verified=verified)

    def _close_gaps(self, pool: ThreadPoolExecutor) -> None:
        """Read what no output needed of payloads that were used, so that their CRC is known."""
        block = min(LOCAL_PART_BYTES, max(1 << 16, self._budget.max_memory_bytes // 16))
        ranges = [
            (check, Extent(check.extent.key, at, min(at + block, end)))
            for check, gaps in self._ledger.gaps()
            for start, end in gaps
            for at in range(start, end, block)
        ]
        for result in pool.map(lambda r: self._worker.prove(r[0].id, r[1]), ranges):
            self._prove(result)
        assert not list(self._ledger.gaps()), "a payload was used and not proved"

    def _objects(self) -> dict[str, tuple[int, int]]:
        objects = {}
        for index, output in enumerate(self._plan.outputs):
            crc = 0
            for start, end, piece in sorted(self._crcs.get(index, ())):
                crc = crc32_combine(crc, piece, end - start) if start else piece
            objects[output.key] = (output.num_bytes, crc)
        return objects


def _memory(step: Step) -> int:
    """Bytes that a step holds at once: its part, and what is read beside it."""
    extra = sum(
        (segment.last - segment.first) * max((p.dtype.itemsize for p in segment.pieces), default=0)
        for segment in step.segments
        if isinstance(segment, Place)
    )
    return 2 * step.num_bytes + 2 * extra
