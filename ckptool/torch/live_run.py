"""One attempt to export, on all ranks together: round by round, then the commit.

In a round every rank fills one part of its own and hands the others what they need for
theirs, so that parts and pieces of one round are all that is in memory besides what is being
written. A rank that fails goes on with the rounds, without writing, until the ranks agree to
stop: nobody is left waiting for it. Nothing is visible before rank 0 commits, and a failure
anywhere aborts on all ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch

from ckptool.engine.cast import CastCount
from ckptool.engine.sinks import Writing
from ckptool.errors import CkptoolError
from ckptool.formats.crc import crc32
from ckptool.storage.base import PartReceipt
from ckptool.torch.faults import part_fault
from ckptool.torch.live_commit import LiveJob, abort_export, abort_stale, commit_export
from ckptool.torch.live_cuts import LivePart
from ckptool.torch.live_exchange import Exchange
from ckptool.torch.live_fill import Filler
from ckptool.torch.live_slots import Slots, SlotsMemory
from ckptool.torch.live_source import LiveSource
from ckptool.torch.local_state import memory_of

__all__ = ["run_live"]

log = logging.getLogger("ckptool")

_ROUNDS_BETWEEN_LOOKS = 16
_MAX_WRITERS = 8

_Slots: TypeAlias = "Slots[tuple[int, PartReceipt]]"


def run_live(
    job: LiveJob, source: LiveSource, exchange: Exchange, memory: SlotsMemory
) -> dict[str, Any]:
    """Export; what was done, in numbers of all ranks, or the same error on every rank."""
    writing = Writing(job.dest, job.plan.plan.outputs)
    committing = False
    try:
        _open(job, writing)
        slots = _slots(job, writing, source, memory)
        rows = _write_all(job, writing, source, exchange, slots)
        committing = True
        commit_export(job, writing, rows)
    except BaseException as error:
        job.news.fail(job.attempt, error)
        job.group.close()  # whoever waits for this rank stops waiting
        abort_export(job, writing, committing=committing)
        raise
    return _totals(job, rows)


def _open(job: LiveJob, writing: Writing) -> None:
    """Begin every output on rank 0, and take part in it elsewhere."""
    outputs = range(len(job.plan.plan.outputs))

    def attach() -> bytes:
        if job.group.rank and not writing.in_order:
            for index in outputs:
                writing.attach(index, tokens[index])
        return b""

    def begin() -> list[str]:
        abort_stale(job)
        for index in outputs:
            writing.open(index)
        return [writing.target(index).token for index in outputs]

    tokens = job.group.from_rank_0(begin)
    job.group.together(attach)


def _slots(job: LiveJob, writing: Writing, source: LiveSource, memory: SlotsMemory) -> _Slots:
    """Memory for the parts in flight, once the bytes to export are there on every rank."""
    part_bytes = job.plan.part_bytes
    copies = 1 if job.dest.capabilities.assembly and not job.dest.capabilities.server_copy else 2
    num_slots = (job.max_memory // part_bytes - 2) // copies  # a client may hold a body itself
    num_slots = max(1, min(num_slots, _MAX_WRITERS))
    found: list[torch.Tensor] = []

    def prepare() -> bytes:
        found.append(memory.take(num_slots * part_bytes, pin=source.device.type == "cuda"))
        source.wait()
        return b""

    job.group.together(prepare)
    return Slots(found[0], num_slots=num_slots, slot_bytes=part_bytes, in_order=writing.in_order)


def _write_all(
    job: LiveJob, writing: Writing, source: LiveSource, exchange: Exchange, slots: _Slots
) -> list[dict[str, Any]]:
    """Write every part; each rank's receipts and counts."""
    rounds = _Rounds(job, writing, Filler(source, rank=job.group.rank), exchange, slots)
    try:
        rounds.run()
        row = {
            "receipts": [[index, asdict(receipt)] for index, receipt in slots.finish()],
            "casts": [asdict(count) for count in rounds.filler.casts.values()],
        }
        job.news.meet(job.attempt, "written", timeout_s=job.timeout_s)
        return [json.loads(r) for r in job.group.together(lambda: json.dumps(row).encode())]
    except BaseException as error:
        job.news.fail(job.attempt, error)  # the others need not wait for our writers to end
        raise
    finally:
        slots.close()


class _Rounds:
    def __init__(
        self,
        job: LiveJob,
        writing: Writing,
        filler: Filler,
        exchange: Exchange,
        slots: _Slots,
    ) -> None:
        self._job, self._writing, self.filler = job, writing, filler
        self._exchange, self._slots = exchange, slots
        self._rank, self._size = job.group.rank, job.group.size
        self._parts = [job.plan.of_rank(rank) for rank in range(self._size)]
        self._failed: CkptoolError | None = None
        self._buffer: torch.Tensor | None = None
        if filler.device.type == "cuda":
            size = job.plan.part_bytes
            self._buffer = torch.empty(size, dtype=torch.uint8, device=filler.device)

    def run(self) -> None:
        """Do all rounds; raises once the ranks know that one of them failed."""
        mine = self._parts[self._rank]
        for number in range(max(map(len, self._parts))):
            if number % _ROUNDS_BETWEEN_LOOKS == 0:
                self._agree()
            part = mine[number] if number < len(mine) else None
            if part is not None:
                self._attempt(partial(self._before, number))
            self._round(number, part)
        self._agree()

    def _agree(self) -> None:
        """Stop here together, where any rank failed."""
        if self._failed is None:
            self._failed = self._job.news.failure(self._job.attempt)
        flags = self._job.group.all_gather(b"0" if self._failed is None else b"1")
        if b"1" not in flags:
            return
        if self._failed is None:  # its reason is on the way
            self._job.news.meet(self._job.attempt, "failed", timeout_s=self._job.timeout_s)
        assert self._failed is not None
        raise self._failed

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do what may fail on this rank alone; after a failure nothing more is done."""
        if self._failed is not None:
            return
        try:
            work()
        except Exception as error:
            if not isinstance(error, CkptoolError):
                error = CkptoolError(f"{type(error).__name__}: {error}")
            self._failed = error
            self._job.news.fail(self._job.attempt, error)

    def _before(self, number: int) -> None:
        part_fault(number, number + 1 == len(self._parts[self._rank]), rank=self._rank)

    def _round(self, number: int, part: LivePart | None) -> None:
        """Fill and write one part of ours, and serve the others' parts of the same number."""
        slot: list[Any] = []
        if part is not None:
            self._attempt(lambda: slot.extend(self._slots.take()))
        out = self._buffer if self._buffer is not None else (slot[1] if slot else None)
        for shift in range(1, self._size):
            to, source = (self._rank + shift) % self._size, (self._rank - shift) % self._size
            self._swap(number, part, out, to=to, source=source)
        if part is not None:
            self._attempt(lambda: self._finish(part, slot[0], slot[1]))

    def _finish(self, part: LivePart, slot: int, memory: torch.Tensor) -> None:
        ready = self.filler.ready_made(part)
        if ready is None:
            self.filler.own(memory if self._buffer is None else self._buffer, part)
        self._hand_over(part, slot, memory, ready)

    def _swap(
        self, number: int, part: LivePart | None, out: torch.Tensor | None, *, to: int, source: int
    ) -> None:
        theirs = self._parts[to][number] if number < len(self._parts[to]) else None
        going = [] if theirs is None else theirs.from_rank(self._rank)
        coming = [] if part is None else part.from_rank(source)
        if not going and not coming:
            return
        send = receive = None
        if going:
            box: list[torch.Tensor] = []
            self._attempt(lambda: box.append(self.filler.outgoing(going)))
            send = box[0] if box else self._empty(sum(piece.num_bytes for piece in going))
        if coming:
            receive = self._empty(sum(piece.num_bytes for piece in coming))
        self._exchange.swap(send, receive, to=to, source=source)
        if receive is not None and out is not None:
            arrived = receive
            self._attempt(lambda: self.filler.place(out, coming, arrived))

    def _hand_over(
        self, part: LivePart, slot: int, memory: torch.Tensor, ready: torch.Tensor | None
    ) -> None:
        """Let a thread write a filled part."""
        step, event = part.step, None
        data = memory[: step.num_bytes] if ready is None else ready
        if self._buffer is not None:
            data.copy_(self._buffer[: step.num_bytes], non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()

        def write() -> tuple[int, PartReceipt]:
            if event is not None:
                event.synchronize()
            target = self._writing.target(step.output)
            view = memory_of(data)
            receipt = self._writing.write_part(target, step, view, crc32(view))
            self._job.news.progress()
            return step.output, receipt

        self._slots.submit(slot, write)

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.filler.device)


def _totals(job: LiveJob, rows: list[dict[str, Any]]) -> dict[str, Any]:
    casts: dict[str, CastCount] = {}
    for row in rows:
        for count in row["casts"]:
            lost = CastCount(**count)
            before = casts.get(lost.entry)
            casts[lost.entry] = lost if before is None else before + lost
    return {
        "num_parts": sum(len(row["receipts"]) for row in rows),
        "casts": {
            key: {"overflows": lost.overflows, "underflows": lost.underflows}
            for key, lost in casts.items()
            if lost.overflows or lost.underflows
        },
    }
