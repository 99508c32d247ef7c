"""Saves and loads a training state, sharded, in a run of any storage: the part loops use.

    checkpointer = Checkpointer("s3://bucket/run", keep_last=3)
    report = checkpointer.load({"model": ..., "optim": ..., "step": 0})
    ...
    checkpointer.save(step, {"model": ..., "optim": ..., "step": step})
    ...
    checkpointer.close()

Every method but ``latest`` is collective: call it on every rank, in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckptool.errors import NoCheckpointError, RefusedError, UsageError
from ckptool.layout import step_name
from ckptool.storage import open_store
from ckptool.torch.group import Group
from ckptool.torch.loading import choose_entries, load_entries
from ckptool.torch.local_state import flatten
from ckptool.torch.news import News
from ckptool.torch.opening import open_together
from ckptool.torch.retention import Retention, committed_steps, prune
from ckptool.torch.save_plan import SavePlanner
from ckptool.torch.save_run import SaveContext, run_save, upload_in_process

__all__ = ["Checkpointer", "LoadReport", "SaveReport"]


@dataclass(frozen=True)
class SaveReport:
    """What a save did; ``num_bytes`` are those of all ranks' shard files.

    ``blocked_s`` is how long the call held the caller, ``seconds`` how long it took until the
    commit.
    """

    step: int
    url: str
    committed: bool
    num_bytes: int
    blocked_s: float
    seconds: float
    deleted: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadReport:
    """What a load did; bytes are those of all ranks together.

    ``missing`` are the keys that this rank asked for and the checkpoint does not have.
    ``unverified_bytes`` were handed on without a checksum that covered them.
    """

    step: int
    url: str
    missing: tuple[str, ...]
    needed_bytes: int
    fetched_bytes: int
    unverified_bytes: int
    seconds: float

    @property
    def amplification(self) -> float:
        """Bytes fetched for each byte that was needed."""
        return self.fetched_bytes / max(self.needed_bytes, 1)


class Checkpointer:
    """The steps of one run. Collective to make; works without torch.distributed, too.

    ``root`` is a path or any fsspec URL, ``storage_options`` what fsspec takes for it.
    ``keep_last`` and ``keep_every`` let older steps go after each commit (both None: keep
    all). ``process_timeout_s`` bounds how long a rank that shows no progress is waited for.
    ``layout`` is what the manifest says of the parallel layout. Planning, news and commits run
    over a gloo group of its own, never the training's.
    """

    def __init__(
        self,
        root: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        process_timeout_s: float = 300.0,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        self._store = open_store(root, options=storage_options)
        self._retention = Retention(keep_last, keep_every)
        self._group = Group(timeout_s=process_timeout_s)
        if self._group.size > 1 and not self._store.capabilities.shared:
            raise RefusedError(
                f"{self._store.url} is seen by one process only, and there are "
                f"{self._group.size} ranks",
                hint="give a folder that all hosts share, or an object store",
            )
        self._news = News(self._group)
        self._planner = SavePlanner(self._group)
        self._context = SaveContext(self._group, self._news, process_timeout_s, layout or {})

    @property
    def url(self) -> str:
        """The run's root."""
        return self._store.url

    def save(
        self, step: int, state: Mapping[str, Any], *, rank_state: Mapping[str, Any] | None = None
    ) -> SaveReport:
        """Save ``state`` as a step, and return once it is committed.

        Values in ``state`` must be equal on all ranks; what belongs to one rank goes into
        ``rank_state``, with the rank in its key. Raises the same error on every rank, and then
        nothing was committed.
        """
        started = time.monotonic()
        plan = self._planner.plan(step, flatten(state), flatten(rank_state or {}))
        store = self._store.child(step_name(step))
        num_bytes = run_save(
            self._context,
            store,
            plan,
            lambda store, plan: upload_in_process(self._context, store, plan),
        )
        deleted = self._group.from_rank_0(lambda: prune(self._store, self._retention))
        seconds = time.monotonic() - started
        return SaveReport(step, store.url, True, num_bytes, seconds, seconds, tuple(deleted))

    def load(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        rank_state: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        allow_cast: bool = False,
    ) -> LoadReport | None:
        """Fill ``state`` in place from a step, by default the newest; None where there is none.

        Every key of ``state`` must be there (unless ``strict`` is False), every key of
        ``rank_state`` may be missing: ``LoadReport.missing`` names those.
        """
        started = time.monotonic()
        name = self._step_name(step)
        if name is None:
            return None
        store = self._store.child(name)
        opened = open_together(store, self._group)
        parts: list[Any] = []

        def choose() -> bytes:
            shared, own = flatten(state), flatten(rank_state if rank_state is not None else {})
            wanted = choose_entries(opened, shared, own, strict=strict, allow_cast=allow_cast)
            parts.extend([shared, own, wanted])
            return b""

        self._group.together(choose)
        shared, own, wanted = parts
        count = load_entries(store, opened, self._group, wanted)
        shared.finish_load(state)
        if rank_state is not None:
            own.finish_load(rank_state)
        number = step if step is not None else self._number
        return LoadReport(
            step=number,
            url=store.url,
            missing=wanted.missing,
            needed_bytes=count.needed,
            fetched_bytes=count.fetched,
            unverified_bytes=count.unverified,
            seconds=time.monotonic() - started,
        )

    def latest(self) -> int | None:
        """The newest committed step; None where there is none."""
        return max(committed_steps(self._store), default=None)

    def wait(self) -> None:
        """Return when no save is in flight."""

    def close(self) -> None:
        """Finish what is in flight and leave the group."""
        self.wait()
        self._news.close()
        self._group.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _step_name(self, step: int | None) -> str | None:
        """The folder of a step, as all ranks agree; ``_number`` becomes its number."""
        steps = self._group.from_rank_0(lambda: list(committed_steps(self._store).items()))
        found = {int(number): name for number, name in steps}
        if step is None:
            if not found:
                return None
            step = max(found)
        if step not in found:
            raise NoCheckpointError(
                f"no committed step {step} in {self._store.url}",
                hint=f"ckptool ls {self._store.url} shows the steps",
            )
        self._number = step
        return str(found[step])
