"""Saves one after another: in this call, or in flight beside the training, at most one of these.

Collectives that the caller's thread makes run on one group, those of a save in flight on
another, so that the two never meet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptool.errors import CkptoolError, OverBudgetError
from ckptool.layout import step_name
from ckptool.torch.beside import Beside
from ckptool.torch.devices import settle
from ckptool.torch.flight import Flight
from ckptool.torch.group import Group
from ckptool.torch.local_state import flatten
from ckptool.torch.reports import SaveReport
from ckptool.torch.save_plan import RankSave, SavePlanner
from ckptool.torch.save_run import InProcess, SaveContext, run_save
from ckptool.torch.staging import Stager, Staging

__all__ = ["Saver"]

log = logging.getLogger("ckptool")


class Saver:
    """``foreground`` is for the caller's thread, ``context.group`` for saves in flight."""

    def __init__(
        self,
        context: SaveContext,
        foreground: Group,
        *,
        skip_when_busy: bool,
        raise_failures: bool,
        max_staging_bytes: int | None,
    ) -> None:
        self._context, self._group = context, foreground
        self._skip, self._raise = skip_when_busy, raise_failures
        self._max_staging_bytes = max_staging_bytes
        self._planner = SavePlanner(foreground)
        self._stager = Stager()
        self._beside: Beside | None = None
        self._flight: Flight[SaveReport] | None = None
        self._last: SaveReport | None = None
        self._finished: list[SaveReport] = []

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        *,
        mode: str,
        deadline_s: float | None,
    ) -> SaveReport:
        """Start a save, or make one; see Checkpointer.save."""
        started = time.monotonic()
        url = self._context.run.url_of(step_name(step))
        report = SaveReport(step, url, False, 0, 0.0, 0.0, mode)
        if deadline_s is not None and (known := self._known(step)) is not None:
            return known if isinstance(known, SaveReport) else self._until(started, deadline_s)
        if not self._make_way(report, deadline_s):
            return replace(report, skipped=True, blocked_s=time.monotonic() - started)
        plan = self._planner.plan(step, flatten(state), flatten(rank_state))
        if mode == "async":
            mode = self._prepare(plan)
        staging = None
        if mode == "async":
            assert self._beside is not None
            staging = self._beside.stage(plan, overlap=deadline_s is None)
            plan = replace(plan, shards=())  # what is staged need not be kept alive
        else:
            settle()  # the thread that saves reads what this one computes
        self._launch(plan, replace(report, mode=mode), staging, started)
        if mode == "sync" or deadline_s is not None:
            return self._until(started, deadline_s)
        assert self._flight is not None
        return self._flight.report

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that ended since the last call; raises what one failed with."""
        if self._flight is not None and self._flight.done:
            self._land()
        found, self._finished = self._finished, []
        return found

    def wait(self) -> None:
        """Return when no save is in flight; raises what it failed with."""
        if self._flight is not None:
            self._flight.wait()
            self._land()

    def wait_staged(self) -> None:
        """Return when the instant of the save in flight is copied."""
        self._stager.fence()

    def prepare(self, state: Mapping[str, Any], rank_state: Mapping[str, Any]) -> None:
        """Plan, allocate and start the uploader before the first save."""
        self.wait()
        self._prepare(self._planner.plan(0, flatten(state), flatten(rank_state)))

    def close(self) -> None:
        """End the uploader; the save in flight must have ended."""
        self._stager.close()
        if self._beside is not None:
            self._beside.close()
            self._beside = None

    def _make_way(self, report: SaveReport, deadline_s: float | None) -> bool:
        """Wait for the save in flight, or say that this one must be skipped."""
        if self._skip and deadline_s is None:
            busy = self._flight is not None and not self._flight.done
            rows = self._group.all_gather(b"1" if busy else b"0")
            if b"1" in rows:
                log.warning("step %d is not saved: another save is in flight", report.step)
                return False
        elif self._flight is not None and not self._flight.done:
            before = self._flight.report.step
            log.warning("the save of step %d waits for that of step %d", report.step, before)
            if not self._flight.wait(deadline_s):
                return False
        if self._flight is not None:
            self._flight.wait()
            self._land()
        return True

    def _prepare(self, plan: RankSave) -> str:
        """Make ready to stage; "sync" where the staging budget is too small on any rank."""
        if self._beside is None:
            context = self._context
            self._beside = Beside(
                context.run, self._stager, rank=self._group.rank, num_threads=context.num_threads
            )
        beside = self._beside

        def prepare() -> bytes:
            budget = self._max_staging_bytes
            if budget is not None and beside.staged_bytes(plan) > budget:
                return b"sync"
            beside.prepare(plan)
            return b"async"

        try:
            modes = self._group.together(prepare)
        except OverBudgetError as error:
            if self._max_staging_bytes is None:
                raise
            log.warning("%s", error)
            return "sync"
        if b"sync" in modes:
            log.warning("staging is over its budget: this save blocks the training")
            return "sync"
        return "async"

    def _launch(
        self, plan: RankSave, report: SaveReport, staging: Staging | None, started: float
    ) -> None:
        worker = self._beside if staging is not None else InProcess()
        assert worker is not None

        def work() -> dict[str, Any]:
            if staging is not None:
                try:
                    staging.wait()
                except CkptoolError as error:
                    self._context.news.fail(plan.attempt, error)
                    raise
            done = run_save(self._context, plan, worker)
            return {"num_bytes": done["num_bytes"], "deleted": tuple(done["deleted"])}

        blocked_s = time.monotonic() - started
        report = replace(report, blocked_s=blocked_s, seconds=blocked_s)
        name = f"the save of step {report.step}"
        self._flight = Flight(work, report, name=name, started=started)

    def _known(self, step: int) -> Flight[SaveReport] | SaveReport | None:
        """The save of ``step`` that is in flight, or is the last one committed."""
        if self._flight is not None and self._flight.report.step == step:
            return self._flight
        last = self._last
        return last if last is not None and last.step == step and last.committed else None

    def _until(self, started: float, deadline_s: float | None) -> SaveReport:
        """The save in flight once it ended; at the deadline as it is then, uncommitted."""
        assert self._flight is not None
        left = None if deadline_s is None else max(0.0, started + deadline_s - time.monotonic())
        if not self._flight.wait(left):
            blocked_s = time.monotonic() - started
            error = f"the save did not finish within {deadline_s:g} s"
            return replace(self._flight.report, error=error, blocked_s=blocked_s, seconds=blocked_s)
        report = self._land()
        self._finished.remove(report)  # returned here
        return replace(report, blocked_s=time.monotonic() - started)

    def _land(self) -> SaveReport:
        """Take the outcome of the save that ended."""
        assert self._flight is not None
        report, error = self._flight.outcome()
        self._flight, self._last = None, report
        self._finished.append(report)
        if error is not None:
            if self._raise:
                raise error
            log.error("the save of step %d failed: %s", report.step, error)
        return report
