"""Runs a script on several ranks of this machine, as torchrun would, and collects how they end.

The store is hosted here, so that a rank may be killed, or make its process group anew, as often
as a test likes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """How one rank ended; ``code`` is negative for a signal."""

    code: int
    output: str


class Ranks:
    """Running ranks; leave the ``with`` block and none of them is left."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_ranks: int,
        env: Mapping[str, str] | None = None,
        restart: int = 0,
    ) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._logs = [tempfile.TemporaryFile() for _ in range(num_ranks)]  # noqa: SIM115
        shared = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(self._logs)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for log in self._logs:
            log.close()

    def signal(self, number: int, *, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].send_signal(number)

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        with open(f"/proc/self/fd/{self._logs[rank].fileno()}", "rb") as log:
            return log.read().decode(errors="replace")

    def wait(self, *, timeout_s: float, together: bool = False) -> list[Ended]:
        """Every rank's end; raises when one is still there after ``timeout_s``.

        With ``together``, the first rank that fails ends the others.
        """
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes):
            failed = [process for process in self.processes if process.poll()]
            if (failed and together) or time.monotonic() > deadline:
                logs = "\n".join(self.output(rank)[-4000:] for rank in range(len(self._logs)))
                raise TimeoutError(f"ranks failed or did not end in {timeout_s} s:\n{logs}")
            time.sleep(0.05)
        return [
            Ended(process.returncode, self.output(rank))
            for rank, process in enumerate(self.processes)
        ]


def run_jobs(
    jobs: Sequence[Mapping[str, Any]], *, num_ranks: int, folder: Path, timeout_s: float = 240
) -> list[dict[str, Any]]:
    """Train several configurations one after the other in one set of processes.

    Each job has a ``name``, a ``config`` tree and perhaps ``start_from``, a step to copy first.
    The results are each rank's, by job name: its exit ``code``.
    """
    plan = folder / f"jobs-{num_ranks}-{len(jobs)}.json"
    plan.write_text(json.dumps(list(jobs)))
    worker = str(ROOT / "tests" / "trainer_worker.py")
    with Ranks([worker, str(plan)], num_ranks=num_ranks) as ranks:
        ranks.wait(timeout_s=timeout_s, together=True)
    return [json.loads(Path(f"{plan}.{rank}").read_text()) for rank in range(num_ranks)]


def metric(run: Path, name: str) -> dict[int, float]:
    """A number of each step, from a run's metrics; the last word counts."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if line["event"] == "step"}


def losses(run: Path) -> dict[int, float]:
    return metric(run, "loss")


SIGKILLED = -signal.SIGKILL
