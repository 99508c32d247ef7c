"""The exports of a job, one at a time: in this call, or in flight beside the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from ckptool.errors import StorageError, UsageError
from ckptool.operations.export import DEFAULT_MAX_FILE_BYTES
from ckptool.operations.export_target import (
    cast_target,
    require_codes,
)
from ckptool.torch.flight import Flight
from ckptool.torch.group import Group
from ckptool.torch.image import Image
from ckptool.torch.live_commit import LiveJob
from ckptool.torch.live_exchange import GlooExchange, choose_exchange, common_device
from ckptool.torch.live_plan import (
    Wishes,
    choose_shares,
    plan_live,
)
from ckptool.torch.live_report import ExportReport, planned_report
from ckptool.torch.live_request import live_destination, look_at, open_together
from ckptool.torch.live_run import run_live
from ckptool.torch.live_slots import SlotsMemory
from ckptool.torch.live_source import FromTensors, Snapshots
from ckptool.torch.local_state import LocalShard
from ckptool.torch.news import News
from ckptool.torch.shares import Share

__all__ = ["DEFAULT_MAX_MEMORY", "LiveExporter"]

log = logging.getLogger("ckptool")

DEFAULT_MAX_MEMORY = 256 << 20
_MODES = ("snapshot", "stop")


class LiveExporter:
    """Exports of one job, at most one at a time; collective to make, to use and to close.

    Keeps its staging memory and its buffers between exports, and gloo groups of its own.
    ``on_failure``: an export in flight that failed is raised by the next call ("raise") or
    logged ("warn"). ``storage_deadline_s`` bounds how long a request that fails is tried again.
    """

    def __init__(
        self,
        *,
        process_timeout_s: float = 300.0,
        storage_deadline_s: float = 300.0,
        on_failure: str = "raise",
    ) -> None:
        if on_failure not in ("raise", "warn"):
            raise UsageError(f"on_failure is {on_failure!r}, not one of raise, warn")
        self._timeout_s, self._deadline_s = process_timeout_s, storage_deadline_s
        self._raise = on_failure == "raise"
        self._group: Group | None = Group(timeout_s=process_timeout_s)
        self._news = News(self._group)
        self._snapshots, self._memory = Snapshots(), SlotsMemory()
        self._flight: Flight[ExportReport] | None = None
        self._finished: list[ExportReport] = []
        self._number = 0

    @property
    def staged_bytes(self) -> int:
        """Host memory that is kept for snapshots."""
        return self._snapshots.num_bytes

    def export(
        self,
        model: nn.Module | Mapping[str, Any],
        destination: str,
        *,
        dtype: str | None = None,
        everything: bool = False,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
        strip_prefix: str | None = None,
        rename: Mapping[str, str] | None = None,
        max_file_size: int | None = None,
        max_memory: int = DEFAULT_MAX_MEMORY,
        storage_options: Mapping[str, Any] | None = None,
        mode: str = "snapshot",
        rank_by_rank: bool = False,
        beside: Mapping[str, bytes] | None = None,
    ) -> ExportReport:
        """Export the model as it is now; see ``export_live``.

        In "snapshot" mode it returns while the export is in flight: call it right after
        ``optimizer.step()``; ``finished`` or ``wait`` tell how it ended. It waits for an export
        that is still in flight.
        """
        started = time.monotonic()
        if mode not in _MODES:
            raise UsageError(f"mode is {mode!r}, not one of {', '.join(_MODES)}")
        if everything and only:
            raise UsageError("everything and only exclude each other")
        self.wait()
        group = self._ready_group()
        form = live_destination(destination, max_file_size, beside)
        options = {"ckptool_deadline_s": self._deadline_s, **(storage_options or {})}
        store = open_together(form, options, group)
        wishes = Wishes(
            cast_target(dtype), everything, tuple(only), tuple(exclude), strip_prefix, rename
        )
        in_order = rank_by_rank or not store.capabilities.assembly
        held, shards = look_at(model, group)
        plan = plan_live(
            held,
            wishes,
            single_file=form.name,
            max_file_num_bytes=max_file_size or DEFAULT_MAX_FILE_BYTES,
            limits=store.part_limits,
            max_memory=max_memory,
            writer=0 if in_order else None,
            require=require_codes,
        )
        self._number += 1
        job = LiveJob(
            attempt=f"export-{self._number}",
            plan=plan,
            dest=store,
            beside=beside or {},
            group=group,
            news=self._news,
            timeout_s=self._timeout_s,
            max_memory=max_memory,
        )
        report = planned_report(destination, mode, plan, rank_by_rank=in_order)
        chosen = [shards[number] for number in plan.chosen[group.rank]]
        if mode == "stop":
            return self._stop(job, chosen, report, started)
        return self._fly(job, chosen, report, started)

    def prepare(
        self,
        model: nn.Module | Mapping[str, Any],
        *,
        everything: bool = False,
        only: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> None:
        """Make the staging memory ready, and pin it, before the first snapshot waits for it."""
        self.wait()
        group = self._ready_group()
        held, shards = look_at(model, group)
        wishes = Wishes(None, everything, tuple(only), tuple(exclude))
        _, chosen, shares = choose_shares(held, wishes)
        self._stage(group, [shards[number] for number in chosen[group.rank]], shares[group.rank])

    def finished(self) -> list[ExportReport]:
        """Reports of the exports that ended since the last call; not collective."""
        if self._flight is not None and self._flight.done:
            self._land()
        found, self._finished = self._finished, []
        return found

    def wait_staged(self) -> None:
        """Return when parameters may be edited by hand without harm to the export in flight."""
        self._snapshots.fence()

    def wait(self) -> None:
        """Return when no export is in flight; raises what it failed with."""
        if self._flight is not None:
            self._flight.wait()
            self._land()

    def cancel(self, *, timeout_s: float) -> None:
        """Break off the export in flight, on all ranks, and wait for that; not collective."""
        if self._flight is None:
            return
        error = StorageError("the export was broken off", hint="export the step again")
        self._news.fail(f"export-{self._number}", error)
        if self._flight.wait(timeout_s):
            self._flight.outcome()
            self._flight = self._group = None

    def close(self) -> None:
        """Finish what is in flight, give the memory back and leave the groups."""
        try:
            self.wait()
        finally:
            self._snapshots.close()
            self._memory.close()
            self._news.close()
            if self._group is not None:
                self._group.close()

    def __enter__(self) -> LiveExporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stop(
        self, job: LiveJob, shards: Sequence[LocalShard], report: ExportReport, started: float
    ) -> ExportReport:
        """Export from the tensors themselves, in this call."""
        group = job.group
        device = common_device(group, on_gpu=any(shard.tensor.is_cuda for shard in shards))
        source = FromTensors(shards, job.plan.shares[group.rank], device=device)
        exchange = choose_exchange(group, device)
        try:
            totals = run_live(job, source, exchange, self._memory)
        except BaseException:
            self._group = None
            raise
        seconds = time.monotonic() - started
        return replace(report, committed=True, blocked_s=seconds, seconds=seconds, **totals)

    def _fly(
        self, job: LiveJob, shards: Sequence[LocalShard], report: ExportReport, started: float
    ) -> ExportReport:
        """Stage the tensors as they are now, and export that beside the caller."""
        shares = job.plan.shares[job.group.rank]
        image = self._stage(job.group, shards, shares)
        source = self._snapshots.take(shards, shares, image)
        exchange = GlooExchange(job.group)
        blocked_s = time.monotonic() - started
        report = replace(
            report, staged_bytes=self.staged_bytes, blocked_s=blocked_s, seconds=blocked_s
        )
        work = partial(run_live, job, source, exchange, self._memory)
        name = f"the export to {report.url}"
        self._flight = Flight(work, report, name=name, started=started)
        return report

    def _stage(self, group: Group, shards: Sequence[LocalShard], shares: Sequence[Share]) -> Image:
        """Make the staging memory ready on every rank, or on none."""
        images: list[Image] = []

        def prepare() -> bytes:
            images.append(self._snapshots.prepare(shards, shares))
            return b""

        group.together(prepare)
        return images[0]

    def _ready_group(self) -> Group:
        """The group; a new one after an export that failed, which closed it on every rank."""
        if self._group is None:
            self._group = Group(timeout_s=self._timeout_s)
        return self._group

    def _land(self) -> None:
        """Take the outcome of the export that ended."""
        assert self._flight is not None
        report, error = self._flight.outcome()
        self._flight = None
        self._finished.append(report)
        if error is None:
            return
        self._group = None
        if self._raise:
            raise error
        log.error("the export to %s failed: %s", report.url, error)
