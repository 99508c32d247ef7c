"""Progress events -> a bar on stderr: bytes, rate and time left."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from ckptool.cli.output import Output

if TYPE_CHECKING:
    from ckptool.progress import Progress

__all__ = ["progress_for"]


def progress_for(out: Output) -> Progress:
    """A bar where a person watches; elsewhere only its notes are printed."""
    return _Bar(out, is_shown=not out.is_quiet and sys.stderr.isatty())


class _Bar:
    def __init__(self, out: Output, *, is_shown: bool) -> None:
        self._out = out
        self._is_shown = is_shown
        self._lock = threading.Lock()
        self._bar: Any = None

    def start(self, label: str, *, num_bytes: int | None) -> None:
        self.finish()
        if not self._is_shown:
            return
        from tqdm import tqdm

        with self._lock:
            self._bar = tqdm(
                total=num_bytes,
                desc=label,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                leave=False,
                file=sys.stderr,
                dynamic_ncols=True,
            )

    def advance(self, num_bytes: int) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.update(num_bytes)

    def note(self, message: str) -> None:
        with self._lock:
            if self._bar is None:
                self._out.say(message)
            else:
                self._bar.clear()
                self._out.say(message)
                self._bar.refresh()

    def finish(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
