"""A save or an export that goes on while the training does: one thread, one outcome."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from ckptool.errors import CkptoolError
from ckptool.torch.at_exit import at_exit, not_at_exit
from ckptool.torch.devices import same_device
from ckptool.torch.live_report import ExportReport
from ckptool.torch.reports import SaveReport

__all__ = ["Flight"]

log = logging.getLogger("ckptool")

R = TypeVar("R", SaveReport, ExportReport)


class Flight(Generic[R]):
    """Runs ``work`` in a thread; what it returns are fields of the final report.

    ``report`` is what is known so far, ``name`` what is in flight ("the save of step 3"), and
    ``started`` when its caller called, by the monotonic clock. A process that ends before
    anybody took the outcome waits for it first, and says how it ended.
    """

    def __init__(
        self, work: Callable[[], dict[str, Any]], report: R, *, name: str, started: float
    ) -> None:
        self._work = work
        self.report: R = report
        self._name, self._started = name, started
        self._error: CkptoolError | None = None
        self._enter = same_device()
        self._thread = threading.Thread(target=self._fly, name="ckptool-flight", daemon=True)
        self._thread.start()
        at_exit(self._land_at_exit)

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended, within ``timeout_s``."""
        self._thread.join(timeout_s)
        return self.done

    def outcome(self) -> tuple[R, CkptoolError | None]:
        """The final report, and the error of what failed; after it ended."""
        not_at_exit(self._land_at_exit)
        return self.report, self._error

    def _fly(self) -> None:
        try:
            self._enter()
            changes = {**self._work(), "committed": True}
        except Exception as error:
            if not isinstance(error, CkptoolError):
                error = CkptoolError(f"{type(error).__name__}: {error}")
            self._error = error
            changes = {"error": str(error)}
        seconds = time.monotonic() - self._started
        self.report = replace(self.report, seconds=seconds, **changes)

    def _land_at_exit(self) -> None:
        if not self.done:
            log.warning(
                "the process ends while %s is in flight: waiting for it (close() does)", self._name
            )
            self._thread.join()
        if self._error is not None:
            log.error("%s failed: %s", self._name, self._error)
