"""A Dask cluster as the place where tasks run. The one door to Dask.

Workers open stores of their own with their own credentials: only options without secrets
travel, unless forwarding was asked for over TLS.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ckptool.engine.executors import WorkerRecipe, build_worker
from ckptool.engine.tasks import Task
from ckptool.engine.worker import StepResult, Worker
from ckptool.errors import CkptoolError, RefusedError, UsageError
from ckptool.storage.base import StoreRecipe

__all__ = ["DaskCluster", "without_secrets"]

_TASK_RETRIES = 3
_CONNECT_TIMEOUT_S = 15
_SECRET_WORDS = ("key", "secret", "token", "password", "passwd", "credential", "username", "user")
_PASSWORD_IN_URL = re.compile(r"://[^/@]*:[^/@]*@")
_WORKERS: dict[Any, Worker] = {}


class DaskCluster:
    """Tasks on the workers of the scheduler at ``address``."""

    def __init__(
        self,
        address: str,
        recipe: WorkerRecipe,
        *,
        num_jobs: int,
        forward_credentials: bool = False,
    ) -> None:
        try:
            from distributed import Client
        except ImportError as error:
            raise UsageError(
                "--dask needs the distributed package", hint="pip install 'ckptool[dask]'"
            ) from error
        if forward_credentials and not address.startswith("tls://"):
            raise RefusedError(
                f"credentials are forwarded over TLS only, and {address} is not tls://",
                hint="give the workers credentials of their own",
            )
        self._recipe = recipe if forward_credentials else _public(recipe)
        try:
            self._client = _client(Client, address)
            workers = self._client.scheduler_info()["workers"].values()
            num_threads = sum(int(worker["nthreads"]) for worker in workers)
        except OSError as error:
            raise UsageError(
                f"no Dask scheduler answers at {address}: {error}", hint="check --dask ADDRESS"
            ) from error
        self._num_jobs: int = max(num_jobs, 2 * num_threads)
        self._kept: set[Any] = set()

    @property
    def num_jobs(self) -> int:
        return self._num_jobs

    def submit(self, task: Task) -> Future[StepResult]:
        mine: Future[StepResult] = Future()
        mine.set_running_or_notify_cancel()
        theirs: Any = self._client.submit(
            _run, task, self._recipe, pure=False, retries=_TASK_RETRIES
        )
        self._kept.add(theirs)  # Dask forgets a task whose future nobody holds

        def hand_over(done: Any) -> None:
            self._kept.discard(done)
            try:
                result, error = done.result()
            except Exception as caught:  # whatever Dask raises: the worker was lost for good
                mine.set_exception(CkptoolError(f"a Dask worker failed: {caught}"))
                return
            if error is not None:
                mine.set_exception(error)
            else:
                mine.set_result(result)

        theirs.add_done_callback(hand_over)
        return mine

    def close(self) -> None:
        self._client.cancel(list(self._kept))
        self._client.close()


def _client(client_class: Any, address: str) -> Any:
    """Dask's classes have no types."""
    return client_class(address, timeout=_CONNECT_TIMEOUT_S, set_as_default=False)


def without_secrets(recipe: StoreRecipe) -> StoreRecipe:
    """The same place, with the options that tell nobody anything."""
    return StoreRecipe(recipe.url, _cleaned(dict(recipe.options)))


def _cleaned(value: Any) -> Any:
    """An option without what is named like a secret, and without URLs that hold a password."""
    if isinstance(value, dict):
        return {
            name: _cleaned(some)
            for name, some in value.items()
            if not any(word in str(name).lower() for word in _SECRET_WORDS)
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_cleaned(some) for some in value)
    return None if isinstance(value, str) and _PASSWORD_IN_URL.search(value) else value


def _public(recipe: WorkerRecipe) -> WorkerRecipe:
    return replace(recipe, source=without_secrets(recipe.source), dest=without_secrets(recipe.dest))


def _run(task: Task, recipe: WorkerRecipe) -> tuple[StepResult | None, CkptoolError | None]:
    """On a Dask worker: one worker object per job and process."""
    key = (recipe.source.url, recipe.dest.url)
    worker = _WORKERS.get(key)
    if worker is None:
        _WORKERS.clear()
        worker = _WORKERS[key] = build_worker(recipe)
    try:
        return worker.do(task), None
    except CkptoolError as error:  # returned, not raised: Dask would do it again
        return None, error
