"""Where tasks run: threads of this process, spawned processes, or a Dask cluster.

All three take the same tasks and give the same results; a task may be done twice, since a part
that is written again is the same part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ckptool.engine.normal import Normaliser
from ckptool.engine.sinks import AttachedSink
from ckptool.engine.tasks import Task
from ckptool.engine.worker import StepResult, Worker
from ckptool.storage import open_recipe
from ckptool.storage.base import StoreRecipe

__all__ = ["Executor", "Threads", "WorkerRecipe", "build_worker", "open_executor"]


class Executor(Protocol):
    """Runs tasks somewhere; ``num_jobs`` of them at once."""

    @property
    def num_jobs(self) -> int: ...

    def submit(self, task: Task) -> Future[StepResult]: ...

    def close(self) -> None:
        """Wait for what runs, drop what waits."""


@dataclass(frozen=True)
class WorkerRecipe:
    """What another process builds a worker from; holds options, so it is never logged."""

    source: StoreRecipe
    dest: StoreRecipe
    spool_num_bytes: int
    prove_bytes: int


def build_worker(recipe: WorkerRecipe) -> Worker:
    """A worker with stores of its own."""
    source = open_recipe(recipe.source)
    normaliser = Normaliser(source, max_memory_bytes=recipe.spool_num_bytes)
    sink = AttachedSink(open_recipe(recipe.dest))
    return Worker(source, normaliser, sink, prove_bytes=recipe.prove_bytes)


class Threads:
    """Threads of this process around one worker."""

    def __init__(self, worker: Worker, *, num_jobs: int) -> None:
        self._do: Callable[[Task], StepResult] = worker.do
        self._num_jobs = num_jobs
        self._pool = ThreadPoolExecutor(num_jobs, thread_name_prefix="ckptool")

    @property
    def num_jobs(self) -> int:
        return self._num_jobs

    def submit(self, task: Task) -> Future[StepResult]:
        return self._pool.submit(self._do, task)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def open_executor(
    kind: str, recipe: WorkerRecipe, *, num_jobs: int, forward_credentials: bool = False
) -> Executor:
    """``processes`` or ``dask:ADDRESS``; imported only when asked for."""
    if kind == "processes":
        from ckptool.engine.processes import Processes

        return Processes(recipe, num_jobs=num_jobs, num_processes=os.cpu_count() or 1)
    from ckptool.engine.dask_cluster import DaskCluster

    return DaskCluster(
        kind.removeprefix("dask:"),
        recipe,
        num_jobs=num_jobs,
        forward_credentials=forward_credentials,
    )
