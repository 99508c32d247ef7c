"""An export that goes on while the training does: one thread, one outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptool.errors import CkptoolError
from ckptool.torch.devices import same_device
from ckptool.torch.live_report import ExportReport

__all__ = ["LiveFlight"]


class LiveFlight:
    """Runs ``work`` in a thread; ``report`` is what is known of the export so far."""

    def __init__(
        self, work: Callable[[], dict[str, Any]], report: ExportReport, started: float
    ) -> None:
        self._work, self.report, self._started = work, report, started
        self.error: CkptoolError | None = None
        self._enter = same_device()
        self._thread = threading.Thread(target=self._fly, name="ckptool-export", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it ended, within ``timeout_s``."""
        self._thread.join(timeout_s)
        return self.done

    def _fly(self) -> None:
        changes: dict[str, Any] = {}
        try:
            self._enter()
            changes = {**self._work(), "committed": True}
        except Exception as error:
            if not isinstance(error, CkptoolError):
                error = CkptoolError(f"{type(error).__name__}: {error}")
            self.error = error
            changes = {"error": str(error)}
        seconds = time.monotonic() - self._started
        self.report = replace(self.report, seconds=seconds, **changes)
