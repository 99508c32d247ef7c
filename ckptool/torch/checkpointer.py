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
from types import TracebackType
from typing import Any

from ckptool.errors import NoCheckpointError, RefusedError, UsageError
from ckptool.storage import open_store
from ckptool.torch.group import Group
from ckptool.torch.loading import choose_entries, load_entries
from ckptool.torch.local_state import flatten
from ckptool.torch.news import News
from ckptool.torch.opening import open_together
from ckptool.torch.reports import LoadReport, SaveReport
from ckptool.torch.retention import Retention, abort_stale_uploads, committed_steps
from ckptool.torch.save_run import SaveContext
from ckptool.torch.saver import Saver

__all__ = ["Checkpointer"]


_MODES = ("async", "sync")


class Checkpointer:
    """The steps of one run. Collective to make; works without torch.distributed, too.

    ``root`` is a path or any fsspec URL, ``storage_options`` what fsspec takes for it.
    ``keep_last`` and ``keep_every`` let older steps go after each commit (both None: keep
    all). ``process_timeout_s`` bounds how long a rank that shows no progress is waited for.
    ``layout`` is what the manifest says of the parallel layout. Planning, news and commits run
    over gloo groups of its own, never the training's.

    ``mode``: "async" stages a save in host memory (as much as this rank's share of the state,
    kept between saves) and uploads it from a process beside this one while the training goes
    on; "sync" stages and uploads part after part while the training waits, and returns once
    it is committed. ``max_staging_bytes`` is for hosts too small for the whole share: a save that
    needs more is made in "sync" mode, with no more parts of 16 MiB in memory at once than fit in
    it, four at least ("zstd" holds back 64 MiB besides).

    ``when_busy``: a save that finds another one in flight waits for it ("wait") or is left out
    ("skip"). ``on_failure``: a failed save is raised by the next call ("raise") or logged
    ("warn"); the last good step is untouched.
    ``storage_deadline_s`` bounds how long a request that fails is tried again;
    ``verify_after_write`` reads files back where the store does not check our checksums.
    ``compress``: "zstd" compresses the items that get at least a tenth smaller, in DCP's own
    ``stream.zstd/1`` form (stock torch reads it from 2.8 on); files are then sent in order, and
    who needs a part of a compressed item has to read all of it.
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
        mode: str = "async",
        when_busy: str = "wait",
        on_failure: str = "raise",
        max_staging_bytes: int | None = None,
        num_threads: int = 8,
        storage_deadline_s: float = 300.0,
        verify_after_write: bool = False,
        compress: str | None = None,
    ) -> None:
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        self._mode = _one_of("mode", mode, _MODES)
        _one_of("when_busy", when_busy, ("wait", "skip"))
        _one_of("on_failure", on_failure, ("raise", "warn"))
        if compress is not None:
            _one_of("compress", compress, ("zstd",))
        options = {"ckptool_deadline_s": storage_deadline_s, **(storage_options or {})}
        self._store = open_store(root, options=options)
        self._group = Group(timeout_s=process_timeout_s)
        self._in_flight = Group(timeout_s=process_timeout_s)
        if self._group.size > 1 and not self._store.capabilities.shared:
            raise RefusedError(
                f"{self._store.url} is seen by one process only, and there are "
                f"{self._group.size} ranks",
                hint="give a folder that all hosts share, or an object store",
            )
        self._news = News(self._group)
        context = SaveContext(
            run=self._store,
            group=self._in_flight,
            news=self._news,
            timeout_s=process_timeout_s,
            layout=layout or {},
            retention=Retention(keep_last, keep_every),
            num_threads=num_threads,
            verify_after_write=verify_after_write,
            compress=compress,
            max_staging_bytes=max_staging_bytes,
        )
        self._saver = Saver(
            context,
            self._group,
            skip_when_busy=when_busy == "skip",
            raise_failures=on_failure == "raise",
            max_staging_bytes=max_staging_bytes,
        )
        self._group.from_rank_0(lambda: abort_stale_uploads(self._store))

    @property
    def url(self) -> str:
        """The run's root."""
        return self._store.url

    def prepare(
        self, state: Mapping[str, Any], *, rank_state: Mapping[str, Any] | None = None
    ) -> None:
        """Make ready for the first save: plan it, allocate and pin memory, start the uploader.

        Optional; without it the first save waits for these.
        """
        self._saver.prepare(state, rank_state or {})

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        rank_state: Mapping[str, Any] | None = None,
        mode: str | None = None,
        deadline_s: float | None = None,
    ) -> SaveReport:
        """Save ``state``, as it is now, as a step.

        Call it right after ``optimizer.step()``. In "async" mode it returns while the save is
        in flight: parameters and moments are copied until the next ``optimizer.step()``, which
        waits for that; ``finished``, ``wait`` or the next save tell how it ended. In "sync"
        mode it returns once the step is committed.

        Values in ``state`` must be equal on all ranks; what belongs to one rank goes into
        ``rank_state``, with the rank in its key. Raises the same error on every rank, and then
        nothing was committed.

        ``deadline_s`` is for a save before the job is taken away: it waits for the save in
        flight or makes a new one with the memory that is staged already, and returns by then;
        ``committed`` says whether it made it.
        """
        chosen = _one_of("mode", mode or self._mode, _MODES)
        return self._saver.save(step, state, rank_state or {}, mode=chosen, deadline_s=deadline_s)

    def finished(self) -> list[SaveReport]:
        """Reports of the saves that ended since the last call; not collective."""
        return self._saver.poll()

    def wait_staged(self) -> None:
        """Return when parameters may be edited by hand without harm to the save in flight."""
        self._saver.wait_staged()

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
        self.wait()
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
        """Return when no save is in flight; raises what it failed with."""
        self._saver.wait()

    def close(self) -> None:
        """Finish what is in flight, end the uploader and leave the groups.

        A process that ends without it waits for the save in flight, too, and logs its failure.
        """
        try:
            self.wait()
        finally:
            self._saver.close()
            self._news.close()
            self._group.close()
            self._in_flight.close()

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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}, not one of {', '.join(allowed)}")
    return value
