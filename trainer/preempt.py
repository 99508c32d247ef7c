"""Turns a signal on any rank into one step at which all ranks stop together.

A signal handler only sets a flag. At the next step boundary the flagged rank writes into the
TCP store where to stop: a step that no rank can have passed, since ranks are coupled by each
step's collectives. Every rank looks there at every boundary. Arrived, each says so in the
store and waits for the others, for five seconds at most: torchrun sends the survivors of a
crash the same signal as a preemption, and then somebody does not come.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

__all__ = ["AGREE_TIMEOUT_S", "SAVE_TIMEOUT_S", "Preemption", "open_job_store"]

AGREE_TIMEOUT_S = 5.0
SAVE_TIMEOUT_S = 25.0
_OPENED = itertools.count()  # a second run in the same processes must not meet the first's keys
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """The flag of this rank, and the ranks' agreement.

    ``slack_steps`` is how many boundaries another rank may be ahead, plus one: 1 where a
    collective holds its caller (gloo), 2 where the device may be a step behind (NCCL).
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, slack_steps: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._slack_steps = slack_steps
        self._stop_at: int | None = None
        self._old: dict[int, Any] = {}
        self.flagged_at: float | None = None

    def install(self) -> None:
        """Take the signals; only the main thread may, elsewhere this does nothing."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._old[number] = signal.signal(number, self._flag)

    def uninstall(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old.clear()

    def due(self, step: int) -> bool:
        """Whether to stop now, after ``step`` steps; call it at every boundary."""
        try:
            if self.flagged_at is not None and self._stop_at is None:
                proposal = str(step + self._slack_steps)
                self._stop_at = int(self._store.compare_set("stop", "", proposal))
            elif self._stop_at is None and self._store.check(["stop"]):
                self._stop_at = int(self._store.get("stop"))
        except (dist.DistStoreError, RuntimeError, ValueError):
            return self.flagged_at is not None  # the store is gone, and the job with it
        return self._stop_at is not None and step >= self._stop_at

    def agree(self, step: int) -> float | None:
        """The seconds that are left for a save, once all ranks are at this step; None when one
        is silent or elsewhere."""
        since = time.monotonic() - self.flagged_at if self.flagged_at is not None else 0.0
        keys = [f"ready/{rank}" for rank in range(self._world_size)]
        try:
            self._store.set(keys[self._rank], f"{step} {since:.3f}")
            self._store.wait(keys, timedelta(seconds=AGREE_TIMEOUT_S))
            answers = [self._store.get(key).decode().split() for key in keys]
        except (dist.DistStoreError, RuntimeError):
            return None
        if any(int(answer[0]) != step for answer in answers):
            return None
        return SAVE_TIMEOUT_S - _longest(answers)

    def _flag(self, number: int, frame: FrameType | None) -> None:
        if self.flagged_at is None:
            self.flagged_at = time.monotonic()


def open_job_store(world_size: int) -> Store:
    """A connection of our own to the job's store, under a prefix of this (re)start."""
    if world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=AGREE_TIMEOUT_S),
    )
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"trainer/{restart}/{next(_OPENED)}", store)


def _longest(answers: Sequence[Sequence[str]]) -> float:
    return max(float(answer[1]) for answer in answers)
