"""Named points of a save where tests make a rank die, fail or hang.

A testing hook, read from ``CKPTOOL_FAULT="POINT:ACTION[:RANK]"``. Points:
``before-first-part``, ``in-part``, ``before-manifest``, ``before-metadata``,
``after-metadata``. Actions: ``kill`` (SIGKILL to the training process of the rank),
``kill-uploader`` (SIGKILL to the process that uploads, where that is another one), ``raise``,
``slow`` (a second's sleep), ``hang``. Without a rank every rank that comes by is hit; without
the variable nothing happens.
"""

from __future__ import annotations

import os
import signal
import time

from ckptool.errors import StorageError

__all__ = ["POINTS", "fault_point", "part_fault"]

POINTS = ("before-first-part", "in-part", "before-manifest", "before-metadata", "after-metadata")


def fault_point(point: str, *, rank: int, owner_pid: int | None = None) -> None:
    """Do what the environment asks for at ``point``; ``owner_pid`` is the rank's own process."""
    spec = os.environ.get("CKPTOOL_FAULT")
    if not spec:
        return
    wanted, action, *who = spec.split(":")
    if wanted != point or (who and int(who[0]) != rank):
        return
    _act(action, point=point, rank=rank, owner_pid=owner_pid or os.getpid())


def part_fault(number: int, is_last: bool, *, rank: int, owner_pid: int | None = None) -> None:
    """The points around a part: ``in-part`` is at any but the first, or at the only one."""
    if number == 0:
        fault_point("before-first-part", rank=rank, owner_pid=owner_pid)
    if number > 0 or is_last:
        fault_point("in-part", rank=rank, owner_pid=owner_pid)


def _act(action: str, *, point: str, rank: int, owner_pid: int) -> None:
    if action == "kill":
        os.kill(owner_pid, signal.SIGKILL)
        time.sleep(3600)
    elif action == "kill-uploader" and owner_pid != os.getpid():
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise StorageError(f"rank {rank} was told to fail {point}")
    elif action == "slow":
        time.sleep(1)
    elif action == "hang":
        time.sleep(3600)
