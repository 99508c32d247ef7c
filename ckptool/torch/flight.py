"""A save that goes on while the training does: one thread, one outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ckptool.errors import CkptoolError
from ckptool.torch.devices import same_device
from ckptool.torch.reports import SaveReport

__all__ = ["Flight"]


class Flight:
    """Runs ``work`` in a thread; ``report`` is what is known of the save before it ends."""

    def __init__(self, work: Callable[[], SaveReport], report: SaveReport) -> None:
        self._work, self.report = work, report
        self._started = time.monotonic()
        self._error: CkptoolError | None = None
        self._enter = same_device()
        self._thread = threading.Thread(target=self._fly, name="ckptool-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the save ended, within ``timeout_s``."""
        self._thread.join(timeout_s)
        return self.done

    def outcome(self) -> tuple[SaveReport, CkptoolError | None]:
        """The final report, and the error of a save that failed; after it ended."""
        return self.report, self._error

    def _fly(self) -> None:
        try:
            self._enter()
            self.report = self._work()
        except Exception as error:
            if not isinstance(error, CkptoolError):
                error = CkptoolError(f"{type(error).__name__}: {error}")
            self._error = error
            seconds = time.monotonic() - self._started
            self.report = replace(self.report, seconds=seconds, error=str(self._error))
