"""Turns silence into an end with a reason: a rank that makes no progress says why and exits.

A thread looks twice a second at when the rank last made progress and at whether it was told
to go. It never waits for a collective, so it also ends a rank whose peers are gone.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from trainer.outcome import FAILED, PREEMPTED_UNSAVED
from trainer.preempt import Preemption

__all__ = ["Watchdog"]

_LEAVE_S = 27.0  # torchrun sends SIGKILL 30 s after SIGTERM


class Watchdog:
    """Ends the process through ``report`` (exit code, reason) and ``os._exit``."""

    def __init__(
        self,
        preemption: Preemption,
        *,
        step_timeout_s: float,
        report: Callable[[int, str], None],
    ) -> None:
        self._preemption = preemption
        self._step_timeout_s = step_timeout_s
        self._report = report
        self._doing, self._since = "starting", time.monotonic()
        self._limit_s = 4 * step_timeout_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trainer-watchdog", daemon=True)
        self._thread.start()

    def progress(self, doing: str) -> None:
        """Something was finished; ``doing`` is what comes next."""
        self._doing, self._since = doing, time.monotonic()
        self._limit_s = self._step_timeout_s

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            now, flagged_at = time.monotonic(), self._preemption.flagged_at
            if flagged_at is not None and now - flagged_at > _LEAVE_S:
                reason = f"told to go, and still {self._doing} after {_LEAVE_S:g} s"
                self._end(PREEMPTED_UNSAVED, f"{reason}: a peer is silent or storage is slow")
            elif now - self._since > self._limit_s:
                self._end(
                    FAILED,
                    f"no progress for {self._limit_s:g} s while {self._doing}; "
                    "run.step_timeout_s sets the limit",
                )

    def _end(self, exit_code: int, reason: str) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        self._report(exit_code, reason)
        sys.stderr.flush()
        os._exit(exit_code)
