"""What is still in flight when the process ends is finished, and its failure told."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["at_exit", "not_at_exit"]

_calls: list[Callable[[], None]] = []
_registered = threading.Event()


def at_exit(call: Callable[[], None]) -> None:
    """Call it when the process ends in an orderly way, while threads can still be started.

    ``atexit`` comes too late: the pools of ``concurrent.futures``, which S3 clients resolve names
    with, take no work by then.
    """
    if not _registered.is_set():
        _registered.set()
        try:
            getattr(threading, "_register_atexit", atexit.register)(_run_all)
        except RuntimeError:
            return  # it is ending already
    _calls.append(call)


def not_at_exit(call: Callable[[], None]) -> None:
    """Take back ``at_exit(call)``."""
    if call in _calls:
        _calls.remove(call)


def _run_all() -> None:
    while _calls:
        _calls.pop()()
