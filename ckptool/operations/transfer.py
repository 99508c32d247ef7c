"""Runs a byte plan to its destination, under a journal: what reshard and export share.

An interruption or a failure keeps what is done and the journal, and says how to go on; a
damaged source leaves nothing, since going on would not help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ckptool.engine.cutting import summarise_plan
from ckptool.engine.journal import Journal, JournalHeader, find_journal
from ckptool.engine.run import How, RunReport, run_plan
from ckptool.engine.sinks import Writing
from ckptool.errors import (
    CkptoolError,
    DamagedError,
    InterruptedByUser,
    RefusedError,
    StorageError,
    UsageError,
)
from ckptool.planning.copies import PartsSummary
from ckptool.planning.plan import Payload, Plan
from ckptool.progress import Progress
from ckptool.storage.base import Store

__all__ = [
    "Transfer",
    "discard",
    "how_for",
    "parts_of",
    "require_new_or_resumed",
    "transfer",
    "transfer_json",
]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What to run and where; ``journal_key`` is None where a run cannot be taken up again."""

    plan: Plan
    source: Store
    dest: Store
    how: How
    journal_key: str | None
    header: JournalHeader
    resume: bool
    streams: Sequence[Payload] = ()


def how_for(how: How, source: Store, dest: Store, *, whole_parts: bool = True) -> How:
    """How to run between two stores: the server copies where it can and parts are its own.

    Raises RefusedError for an executor that cannot see the stores.
    """
    if how.executor != "threads":
        for store in (source, dest):
            if not store.capabilities.shared:
                raise RefusedError(
                    f"{store.url} is not seen by other processes",
                    hint="use --executor threads",
                    url=store.url,
                )
    return replace(how, server_copy=whole_parts and dest.copies_from(source))


def parts_of(plan: Plan, source: Store, dest: Store, how: How) -> PartsSummary:
    """What a plan would cost between two stores."""
    return summarise_plan(plan, dest, how, num_jobs=how.num_jobs(source, dest))


def transfer_json(report: RunReport | None) -> dict[str, Any]:
    """The keys that reshard and export share; all None for a dry run."""
    names = ("unverifiable", "trusted")
    lists = {
        f"payloads_{name}": None
        if report is None
        else sorted({check.entry for check in getattr(report, name)})
        for name in names
    }
    return {
        "num_bytes_written": report and report.num_bytes_written,
        "num_bytes_read": report and report.num_bytes_read,
        "num_bytes_sent": report and report.num_bytes_sent,
        "num_bytes_copied_by_server": report and report.num_bytes_copied,
        "num_parts": report and report.num_parts,
        "num_parts_kept": report and report.num_parts_kept,
        "payloads_verified": report and report.payloads_proved,
        **lists,
    }


def require_new_or_resumed(
    dest: Store, journal_key: str, *, resume: bool, refuse_existing: Callable[[], None]
) -> None:
    """Refuse a destination that holds something, unless it is a run that is to be resumed."""
    header = find_journal(dest, journal_key)
    if resume and header is None:
        raise RefusedError(
            f"there is no interrupted run at {dest.url}: no {journal_key}",
            hint="run the same command without --resume",
            url=dest.url,
        )
    if resume:
        return
    if header is not None:
        raise RefusedError(
            f"an interrupted {header.operation} of {header.source} stands at {dest.url}",
            hint="run the same command with --resume to finish it, or with --discard to remove it",
            url=dest.url,
            journal=dest.url_of(journal_key),
        )
    refuse_existing()


def discard(dest: Store, journal_key: str) -> None:
    """Abort and remove all that an interrupted run left."""
    header = find_journal(dest, journal_key)
    if header is None:
        raise RefusedError(
            f"there is no interrupted run at {dest.url}: no {journal_key}",
            hint="nothing has to be discarded",
            url=dest.url,
        )
    journal = Journal.resume(dest, journal_key, header)
    journal.discard()
    journal.remove()


def transfer(
    job: Transfer,
    *,
    writing: Writing,
    finish: Callable[[RunReport], None],
    progress: Progress,
) -> RunReport:
    """Run the plan, make its outputs visible, and call ``finish`` to commit what they belong to."""
    if writing.in_order and job.resume:
        raise UsageError(f"{job.dest.url} is written in order and cannot be resumed")
    journal = _journal(job, writing)
    with ExitStack() as stack:
        stack.enter_context(writing)
        stack.push(_Keep(job, journal, writing))
        report = run_plan(
            job.plan,
            source=job.source,
            dest=job.dest,
            writing=writing,
            how=job.how,
            streams=job.streams,
            journal=journal,
            progress=progress,
        )
        if journal is not None:
            journal.flush()  # so that what is published from now on is known to be whole
        writing.commit(published=None if journal is None else journal.published)
        finish(report)
        if journal is not None:
            journal.remove()
    return report


def _journal(job: Transfer, writing: Writing) -> Journal | None:
    if job.journal_key is None or writing.in_order or not job.dest.capabilities.shared:
        return None
    if not job.resume:
        return Journal.create(job.dest, job.journal_key, job.header)
    found = find_journal(job.dest, job.journal_key)
    assert found is not None, "it was looked for before"
    if (found.source, found.plan) != (job.header.source, job.header.plan):
        raise RefusedError(
            f"the journal at {job.dest.url_of(job.journal_key)} belongs to another run: "
            f"{found.operation} of {found.source} with {dict(found.request)}, and this is "
            f"{job.header.operation} of {job.header.source} with {dict(job.header.request)}",
            hint="repeat the first command with --resume, or --discard what it left",
            url=job.dest.url,
        )
    journal = Journal.resume(job.dest, job.journal_key, found)
    journal.sweep()
    return journal


class _Keep:
    """Decides at an error whether what is done stays, for --resume, or goes."""

    def __init__(self, job: Transfer, journal: Journal | None, writing: Writing) -> None:
        self._job, self._journal, self._writing = job, journal, writing

    def __call__(self, kind: object, error: BaseException | None, trace: object) -> None:
        journal = self._journal
        if error is None or journal is None:
            return
        if isinstance(error, DamagedError) or not journal.has_parts:
            self._remove(journal, error)
            return
        self._writing.leave()
        try:
            journal.flush()
        finally:  # a store that fails now has told its story already
            self._say(error)

    def _remove(self, journal: Journal, error: BaseException) -> None:
        try:
            self._writing.abort()
            journal.discard()
            journal.remove()
        except StorageError as failed:
            hint = f"something may be left ({failed.message}): --discard removes it"
            _add_hint(error, hint)

    def _say(self, error: BaseException) -> None:
        hint = "run the same command with --resume to go on, or --discard to remove what is done"
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedByUser(
                f"interrupted; what is done is kept at {self._job.dest.url}", hint=hint
            ) from error
        _add_hint(error, hint)


def _add_hint(error: BaseException, hint: str) -> None:
    if isinstance(error, CkptoolError):
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
