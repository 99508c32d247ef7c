"""Patience: which failures are tried again, after how long, and when to give up."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ckptool.storage.errors import Failure, classify

__all__ = ["DEADLINE_S", "Patience", "retry", "retry_async"]

T = TypeVar("T")

DEADLINE_S = 300.0

_FIRST_DELAY_S = 0.1
_BRIEF_TRIES = 7
_UNREACHABLE_S = 6.0

_log = logging.getLogger("ckptool.storage")


@dataclass(slots=True)
class Patience:
    """The tries of one request: delays double from 0.1 s, jittered, until ``deadline_s``.

    The longest delay is an eighth of the deadline, so that at least six tries fit. An endpoint
    that never answered (``reached`` is False) is given up after 6 s: its address is wrong.
    """

    deadline_s: float
    reached: bool = True
    tries: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        return self.started + self.deadline_s - time.monotonic()

    def next_delay_s(self, failure: Failure) -> float | None:
        """How long to wait before trying again, None to give up."""
        self.tries += 1
        limit_s = self.remaining_s
        if failure is Failure.FINAL or (failure is Failure.BRIEF and self.tries >= _BRIEF_TRIES):
            return None
        if failure is Failure.UNREACHABLE and not self.reached:
            limit_s = min(limit_s, limit_s - self.deadline_s + _UNREACHABLE_S)
        if limit_s <= 0:
            return None
        longest_s = max(_FIRST_DELAY_S, min(20.0, self.deadline_s / 8))
        delay_s = min(longest_s, _FIRST_DELAY_S * 2.0 ** min(self.tries - 1, 20))
        return min(limit_s, delay_s * random.uniform(0.5, 1.0))


def retry(attempt: Callable[[], T], *, patience: Patience, what: str) -> T:
    """Call ``attempt`` until it succeeds or patience ends; then its last exception is raised."""
    while True:
        try:
            return attempt()
        except Exception as exc:
            delay_s = patience.next_delay_s(classify(exc))
            if delay_s is None:
                raise
            _say(what, exc, delay_s)
        time.sleep(delay_s)


async def retry_async(
    attempt: Callable[[], Awaitable[T]],
    *,
    patience: Patience,
    what: str,
    on_failure: Callable[[Exception], Awaitable[None]] | None = None,
) -> T:
    """As ``retry``, inside an event loop; ``on_failure`` runs before the next try."""
    while True:
        try:
            return await attempt()
        except Exception as exc:
            delay_s = patience.next_delay_s(classify(exc))
            if delay_s is None:
                raise
            _say(what, exc, delay_s)
            failed = exc
        await asyncio.sleep(delay_s)
        if on_failure is not None:
            await on_failure(failed)


def _say(what: str, exc: BaseException, delay_s: float) -> None:
    _log.info("%s failed, trying again in %.1f s: %s", what, delay_s, exc)
