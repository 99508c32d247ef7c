"""Turns the end of a run into ``exit.json`` in the run, and into an exit code.

torchrun exits with 1 whatever its ranks say, so the outcome stands in the run as well. On a
failure the rank that failed first writes it: the others only see the consequences.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ckptool.errors import CkptoolError
from ckptool.storage import open_store
from trainer.config import Config

__all__ = [
    "DONE",
    "EXIT_NAME",
    "FAILED",
    "NON_FINITE",
    "PREEMPTED",
    "PREEMPTED_UNSAVED",
    "Outcome",
    "OutcomeWriter",
]

EXIT_NAME = "exit.json"
DONE, FAILED, PREEMPTED, PREEMPTED_UNSAVED, NON_FINITE = 0, 1, 75, 76, 77
_NAMES = {
    DONE: "done",
    FAILED: "failed",
    PREEMPTED: "preempted-saved",
    PREEMPTED_UNSAVED: "preempted-not-saved",
    NON_FINITE: "stopped-by-nan",
}
_WRITE_TIMEOUT_S = 5.0

log = logging.getLogger("trainer")


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``committed_step`` is the newest known to be committed by this run."""

    exit_code: int
    step: int
    committed_step: int | None = None
    reason: str | None = None


class OutcomeWriter:
    """Writes one outcome of one (re)start, whichever rank comes first."""

    def __init__(self, config: Config, store: Store, *, rank: int) -> None:
        self._config, self._store, self._rank = config, store, rank

    def write(self, outcome: Outcome) -> None:
        """Never raises, and takes five seconds at most: the process is about to end."""
        if not self._is_first(outcome):
            return
        thread = threading.Thread(target=self._put, args=(outcome,), daemon=True)
        thread.start()
        thread.join(_WRITE_TIMEOUT_S)

    def read(self) -> Mapping[str, Any]:
        """What an earlier start left, empty where nothing readable is there."""
        try:
            document = json.loads(self._open().read(EXIT_NAME))
        except (CkptoolError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def _is_first(self, outcome: Outcome) -> bool:
        try:
            mine = f"{self._rank}"
            return self._store.compare_set("outcome", "", mine) in (mine, mine.encode())
        except (dist.DistStoreError, RuntimeError):
            return True

    def _put(self, outcome: Outcome) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        document = {
            "schema": "trainer.exit/1",
            "outcome": _NAMES[outcome.exit_code],
            **asdict(outcome),
            "rank": self._rank,
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "time": now,
        }
        try:
            self._open().put(EXIT_NAME, json.dumps(document, indent=1).encode() + b"\n")
        except CkptoolError as error:
            log.warning("cannot write %s: %s", EXIT_NAME, error)

    def _open(self) -> Any:
        return open_store(self._config.run.root, options=self._config.checkpoint.storage_options)
