"""How a plan is run: the limits and choices that leave its result as it is."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckptool.storage.base import Store

__all__ = ["How"]

REMOTE_JOBS = 16


@dataclass(frozen=True, slots=True)
class How:
    """How a plan is run: buffers of ``max_memory`` bytes at most, ``jobs`` steps at once.

    ``executor`` is "threads", "processes" or "dask:ADDRESS". ``server_copy``: ranges are copied
    by the store itself. ``trust_server`` waives reading what it copied without a CRC-32.
    """

    max_memory: int = 1 << 30
    jobs: int | None = None
    executor: str = "threads"
    server_copy: bool = False
    trust_server: bool = False
    forward_credentials: bool = False

    def num_jobs(self, *stores: Store) -> int:
        """What ``--jobs`` says, or what suits the stores."""
        if self.jobs is not None:
            return self.jobs
        remote = any(s.capabilities.server_copy or not s.capabilities.assembly for s in stores)
        return REMOTE_JOBS if remote else min(8, 2 * (os.cpu_count() or 1))
