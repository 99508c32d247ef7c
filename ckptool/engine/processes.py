"""Spawned processes, each with a few threads: all cores, without one interpreter's lock.

Processes are spawned, never forked: clients of object stores do not survive a fork. A process
that dies fails the tasks that it had, and with them the run.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from ckptool.engine.executors import WorkerRecipe, build_worker
from ckptool.engine.tasks import Task
from ckptool.engine.worker import StepResult
from ckptool.errors import CkptoolError

__all__ = ["Processes"]


class Processes:
    """``num_processes`` children that share ``num_jobs`` threads between them."""

    def __init__(self, recipe: WorkerRecipe, *, num_jobs: int, num_processes: int) -> None:
        num_processes = max(1, min(num_processes, num_jobs))
        threads = -(-num_jobs // num_processes)
        self._num_jobs = threads * num_processes
        self._children = [_Child(recipe, threads) for _ in range(num_processes)]

    @property
    def num_jobs(self) -> int:
        return self._num_jobs

    def submit(self, task: Task) -> Future[StepResult]:
        return min(self._children, key=lambda child: child.num_open).submit(task)

    def close(self) -> None:
        for child in self._children:
            child.tell_to_end()
        for child in self._children:
            child.stop()


class _Child:
    """One process, its pipe, and the futures of what it was given."""

    def __init__(self, recipe: WorkerRecipe, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, recipe, num_threads), daemon=True
        )
        resource_tracker.ensure_running()  # it would end the block on its way
        # blocked and not ignored: the parent still gets its Ctrl-C, and the child never does
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._open: dict[int, Future[StepResult]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._reaping = threading.Lock()
        self._dead = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, task: Task) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            number = next(self._numbers)
            if self._dead:
                future.set_exception(self._death())
                return future
            self._open[number] = future
        try:
            self._pipe.send((number, task))
        except OSError:
            self._fail_open()
        return future

    def tell_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def stop(self) -> None:
        """Wait for what it is doing, and end it where that takes too long."""
        with self._reaping:
            self._process.join(30)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._reader.join(5)
        self._pipe.close()

    def _read(self) -> None:
        while True:
            try:
                number, result, error = self._pipe.recv()
            except (EOFError, OSError):
                self._fail_open()
                return
            with self._lock:
                future = self._open.pop(number)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _fail_open(self) -> None:
        with self._lock:
            self._dead = True
            lost, self._open = list(self._open.values()), {}
        for future in lost:
            future.set_exception(self._death())

    def _death(self) -> CkptoolError:
        with self._reaping:  # of two threads that wait for a child, one never learns its code
            self._process.join(5)
            code = self._process.exitcode
        return CkptoolError(
            f"a worker process died with exit code {code}",
            hint="out of memory? a smaller --max-memory or --jobs, or --executor threads",
        )


def _serve(pipe: Connection, recipe: WorkerRecipe, num_threads: int) -> None:
    """The child's life: take tasks, run them on threads, send what came of them.

    A Ctrl-C goes to the whole group; the parent decides, and its end closes the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = build_worker(recipe)
    lock = threading.Lock()

    def do(number: int, task: Task) -> None:
        result, error = None, None
        try:
            result = worker.do(task)
        except CkptoolError as caught:
            error = caught
        except Exception as caught:  # any class, for the parent to raise: it may not pickle
            error = CkptoolError(f"{type(caught).__name__}: {caught}")
        answer: Any = (number, result, error)
        with lock, contextlib.suppress(OSError):
            pipe.send(answer)

    with ThreadPoolExecutor(num_threads) as pool:
        while True:
            try:
                order = pipe.recv()
            except (EOFError, OSError):
                break
            if order is None:
                break
            pool.submit(do, *order)
        pool.shutdown(wait=True, cancel_futures=True)
