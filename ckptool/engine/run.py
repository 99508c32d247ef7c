"""Runs a byte plan: hands tasks to workers under a memory budget, and keeps the ledger.

Nothing is visible when it returns: the caller commits. A failure anywhere stops the run and
raises; what was not proved by then is read again for its CRC alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from ckptool.engine.cast import CastCount
from ckptool.engine.cutting import Cut, choose_size, cuts_of, groups_of, memory_of
from ckptool.engine.executors import Executor, Threads, WorkerRecipe, open_executor
from ckptool.engine.how import How
from ckptool.engine.journal import Journal
from ckptool.engine.ledger import Ledger, Piece, join_crcs
from ckptool.engine.normal import Normaliser
from ckptool.engine.sinks import InTurn, Writing
from ckptool.engine.tasks import CopyTask, ProveTask, StreamTask, Task, WriteTask
from ckptool.engine.worker import MIN_PROVE_BYTES, PROVE_BYTES, StepResult, Worker
from ckptool.formats.crc import crc32_combine
from ckptool.model import Extent
from ckptool.planning.parts import Step
from ckptool.planning.plan import Check, Output, Payload, PayloadCrcs, Plan
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage.base import Store

__all__ = ["How", "RunReport", "run_plan"]

IN_ORDER_JOB_BYTES = 16 << 20  # of the budget, which makes parts of a quarter of it


@dataclass
class RunReport:
    """What a run did. ``objects`` has, per output key, its length and CRC-32 where known.

    ``num_bytes_read`` and ``num_bytes_sent`` went through us, ``num_bytes_copied`` did not.
    ``payload_crcs`` has, by output key, those of payloads that it closes with a tail.
    ``unverifiable`` payloads have no stored CRC; ``trusted`` ones the server copied unread.
    """

    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_bytes_sent: int = 0
    num_bytes_copied: int = 0
    num_parts: int = 0
    num_parts_kept: int = 0
    payloads_proved: int = 0
    unverifiable: list[Check] = field(default_factory=list)
    trusted: list[Check] = field(default_factory=list)
    casts: dict[str, CastCount] = field(default_factory=dict)
    objects: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    payload_crcs: dict[str, PayloadCrcs] = field(default_factory=dict)


def run_plan(
    plan: Plan,
    *,
    source: Store,
    dest: Store,
    writing: Writing,
    how: How,
    streams: Sequence[Payload] = (),
    journal: Journal | None = None,
    progress: Progress = NO_PROGRESS,
) -> RunReport:
    """Do every step of a plan and prove every payload it used.

    ``streams`` are wrapped items that are copied as they are: they are read once more, in
    order, to be proved. Steps that ``journal`` knows as done are kept.

    Raises DamagedError for the first payload whose bytes are not what its item says,
    StorageError when reading or writing fails, OverBudgetError when no part fits the budget.
    """
    num_jobs = how.num_jobs(source, dest)
    if writing.in_order:  # a few parts of a good size do: they only have to be there in time
        num_jobs = max(1, min(num_jobs, how.max_memory // IN_ORDER_JOB_BYTES))
    spool = how.max_memory // 8
    prove_bytes = max(MIN_PROVE_BYTES, min(PROVE_BYTES, how.max_memory // (4 * num_jobs)))
    normaliser = Normaliser(source, max_memory_bytes=spool)
    executor: Executor
    turns = InTurn(writing) if writing.in_order else None
    if how.executor == "threads" or turns is not None:
        worker = Worker(source, normaliser, turns or writing, prove_bytes=prove_bytes)
        executor = Threads(worker, num_jobs=num_jobs)
    else:
        recipe = WorkerRecipe(source.recipe(), dest.recipe(), spool, prove_bytes)
        executor = open_executor(
            how.executor,
            recipe,
            num_jobs=num_jobs,
            forward_credentials=how.forward_credentials,
        )
    run = _Run(plan, dest, writing, how, executor, journal, progress)
    try:
        return run.run(streams)
    finally:
        if turns is not None:
            turns.stop()
        executor.close()
        normaliser.close()
        run.salvage()


class _Run:
    def __init__(
        self,
        plan: Plan,
        dest: Store,
        writing: Writing,
        how: How,
        executor: Executor,
        journal: Journal | None,
        progress: Progress,
    ) -> None:
        self._plan, self._dest, self._writing = plan, dest, writing
        self._how, self._executor, self._progress = how, executor, progress
        self._journal = journal
        self._ledger = Ledger(plan.checks)
        self._report = RunReport()
        self._sums: dict[int, dict[int, list[Piece]]] = {}
        self._left = [output.num_bytes for output in plan.outputs]
        self._crcs: dict[int, list[Piece]] = {}
        self._active: dict[Future[StepResult], Cut] = {}
        self._held: list[Cut] = []
        self._in_flight_bytes = 0

    def run(self, streams: Sequence[Payload]) -> RunReport:
        self._do_steps()
        self._do_all(StreamTask(payload) for payload in streams)
        self._do_all(self._gaps())
        assert not list(self._ledger.gaps()), "a payload was used and not proved"
        self._report.payloads_proved = self._ledger.proved
        self._report.unverifiable = self._ledger.unverifiable
        self._report.trusted = self._ledger.trusted
        self._report.objects = self._objects()
        return self._report

    def salvage(self) -> None:
        """After a failure, record the parts that were finished all the same."""
        for future, cut in self._active.items():
            done = future.done() and not future.cancelled() and future.exception() is None
            if done and self._journal is not None:
                self._journal.finished(cut.step, future.result())

    def _do_steps(self) -> None:
        num_jobs = self._executor.num_jobs
        cuts = self._cuts()
        cut = next(cuts, None)
        while cut is not None or self._active or self._held:
            ready = next((held for held in self._held if self._is_ready(held.step)), None)
            if ready is not None and self._fits(ready):
                self._held.remove(ready)
                self._submit(ready)
            elif cut is not None and self._fits(cut) and self._may_hold(cut.step, num_jobs):
                if self._keep_finished(cut.step):
                    pass
                elif self._is_ready(cut.step):
                    self._submit(cut)
                else:
                    self._held.append(cut)
                cut = next(cuts, None)
            else:
                self._wait()

    def _cuts(self) -> Iterator[Cut]:
        for index, output in enumerate(self._plan.outputs):
            self._begin(index, output)
            part_bytes = self._part_bytes(index, output)
            yield from cuts_of(index, output, self._dest, self._how, part_bytes=part_bytes)

    def _begin(self, index: int, output: Output) -> None:
        part_bytes = self._part_bytes(index, output)
        groups = groups_of(output, self._dest, self._how, part_bytes=part_bytes)
        if self._journal is not None:
            self._journal.begin(index, output, part_bytes, self._writing, groups=groups)
        else:
            self._writing.open(index, groups=groups)

    def _part_bytes(self, index: int, output: Output) -> int:
        earlier = None if self._journal is None else self._journal.part_bytes(index)
        if earlier is not None:
            return earlier
        return choose_size(output, self._dest, self._how, num_jobs=self._executor.num_jobs)

    def _fits(self, cut: Cut) -> bool:
        if len(self._active) >= self._executor.num_jobs:
            return False
        room = self._how.max_memory // 2
        return not self._active or self._in_flight_bytes + memory_of(cut) <= room

    def _is_ready(self, step: Step) -> bool:
        """Whether all parts that hold payloads of the step's tails are done."""
        starts = [p[0] for tail in step.tails for p in tail.payloads if p[0] < step.start]
        if not starts:
            return True
        first = min(starts)
        unfinished = (cut.step for cut in (*self._active.values(), *self._held))
        return not any(
            other.output == step.output and other.number < step.number and other.end > first
            for other in unfinished
        )

    def _may_hold(self, step: Step, num_jobs: int) -> bool:
        """Whether a step may be looked at: one that is not ready is put aside, a few are.

        What is written in order is handed out in order, too.
        """
        if self._writing.in_order:
            return self._is_ready(step)
        return len(self._held) < num_jobs

    def _keep_finished(self, step: Step) -> bool:
        """Take a step's result from the journal, where it has one."""
        if self._journal is None:
            return False
        result = self._journal.result_of(step)
        if result is None:
            return False
        self._take(step, result)
        self._report.num_parts_kept += 1
        return True

    def _submit(self, cut: Cut) -> None:
        future = self._executor.submit(self._task(cut))
        self._active[future] = cut
        self._in_flight_bytes += memory_of(cut)

    def _task(self, cut: Cut) -> Task:
        step = cut.step
        target = self._writing.target(step.output)
        written = None if self._journal is None else self._journal.listed(step)
        if cut.copied:
            # where a tail needs the CRC, what the server does not tell has to be read
            trust = self._how.trust_server and step.sums[0] is None
            if written is not None and written.checksum is None:
                written = None  # to copy it again costs less than to read it
            return CopyTask(step, target, trust, written)
        known = tuple(
            (start, self._known(step.output, start, min(end, step.start)))
            for tail in step.tails
            for start, end in tail.payloads
            if start < step.start
        )
        return WriteTask(step, target, known, written)

    def _known(self, output: int, start: int, end: int) -> int:
        sums = self._sums[output]
        pieces = sums.get(start, [])
        crc = join_crcs(pieces, start, end)
        assert crc is not None, "a step was submitted before the parts that it needs"
        sums[start] = [(start, end, crc), *(p for p in pieces if p[0] >= end)]
        return crc

    def _wait(self) -> None:
        done, _ = wait(self._active, return_when=FIRST_COMPLETED)
        for future in done:
            cut = self._active.pop(future)
            self._in_flight_bytes -= memory_of(cut)
            result = future.result()
            if self._journal is not None:
                self._journal.finished(cut.step, result)
            self._take(cut.step, result)
            report = self._report
            if result.was_there:
                report.num_parts_kept += 1
            elif not cut.copied:
                report.num_bytes_sent += cut.step.num_bytes
            report.num_bytes_read += result.num_bytes_read
            report.num_bytes_copied += result.num_bytes_copied

    def _take(self, step: Step, result: StepResult) -> None:
        """Count a finished step, whoever did it and when."""
        assert result.receipt is not None
        self._writing.keep(step.output, result.receipt)
        crcs = self._crcs.setdefault(step.output, [])
        if result.crc32 is not None:
            crcs.append((step.start, step.end, result.crc32))
        sums = self._sums.setdefault(step.output, {})
        for payload, start, end, crc in result.sums:
            sums.setdefault(payload, []).append((start, end, crc))
        self._left[step.output] -= step.num_bytes
        if not self._left[step.output]:
            self._close_sums(step.output)
        report = self._report
        for count in result.casts:
            old = report.casts.get(count.entry, CastCount(count.entry, 0, 0))
            report.casts[count.entry] = old + count
        report.num_parts += 1
        report.num_bytes_written += step.num_bytes
        self._prove(result)
        self._progress.advance(step.num_bytes)

    def _prove(self, result: StepResult) -> None:
        for check, start, end, crc in result.proofs:
            self._ledger.add(check, (start, end, crc))
        for check, verified in result.settled:
            self._ledger.settle(check, verified=verified)
        for check in result.trusted:
            self._ledger.trust(check)

    def _do_all(self, tasks: Iterable[Task]) -> None:
        """Do tasks that write nothing, a few at a time."""
        open_tasks: set[Future[StepResult]] = set()
        for task in tasks:
            open_tasks.add(self._executor.submit(task))
            if len(open_tasks) >= 2 * self._executor.num_jobs:
                open_tasks = self._settle_some(open_tasks)
        while open_tasks:
            open_tasks = self._settle_some(open_tasks)

    def _settle_some(self, open_tasks: set[Future[StepResult]]) -> set[Future[StepResult]]:
        done, left = wait(open_tasks, return_when=FIRST_COMPLETED)
        for future in done:
            result = future.result()
            self._report.num_bytes_read += result.num_bytes_read
            self._prove(result)
        return left

    def _gaps(self) -> Iterator[Task]:
        """What no output needed of payloads that were used must be read for their CRC."""
        return iter(
            [
                ProveTask(check.id, Extent(check.extent.key, at, min(at + PROVE_BYTES, end)))
                for check, gaps in self._ledger.gaps()
                for start, end in gaps
                for at in range(start, end, PROVE_BYTES)
            ]
        )

    def _close_sums(self, index: int) -> None:
        """Of an output that is all there, keep only what its payloads' CRC-32s are."""
        output = self._plan.outputs[index]
        crcs = array("q", (self._known(index, start, end) for start, end in output.payloads))
        starts = array("q", (start for start, _ in output.payloads))
        self._report.payload_crcs[output.key] = PayloadCrcs(starts, crcs)
        del self._sums[index]

    def _objects(self) -> dict[str, tuple[int, int | None]]:
        return {
            output.key: (output.num_bytes, _whole_crc(self._crcs.get(index, []), output.num_bytes))
            for index, output in enumerate(self._plan.outputs)
        }


def _whole_crc(pieces: list[Piece], num_bytes: int) -> int | None:
    """The CRC-32 of an object from its parts'; None where a part was copied without one."""
    crc = position = 0
    for start, end, piece in sorted(pieces):
        if start != position:
            return None
        crc = crc32_combine(crc, piece, end - start) if start else piece
        position = end
    return crc if position == num_bytes else None
