"""Hands a live, sharded model to inference: one consolidated export, written by all ranks.

    export_live(model, "s3://bucket/llama8b/hf", dtype="bfloat16")

No rank ever holds the model: parts go through a few buffers, and each rank writes what it
holds. The files are, byte for byte, those that ``ckptool export`` makes of a checkpoint saved
at the same step. A training loop that wants to go on meanwhile keeps a LiveExporter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckptool.errors import CkptoolError, RefusedError, StorageError, UnsupportedError, UsageError
from ckptool.operations.export import DEFAULT_MAX_FILE_BYTES
from ckptool.operations.export_target import (
    Destination,
    cast_target,
    destination_of,
    refuse_existing,
    require_codes,
)
from ckptool.operations.transfer import require_new_or_resumed
from ckptool.storage import open_store
from ckptool.storage.base import Store
from ckptool.torch.devices import same_device
from ckptool.torch.group import Group
from ckptool.torch.live_exchange import GlooExchange, choose_exchange
from ckptool.torch.live_plan import LivePlan, Wishes, holdings_json, plan_live, read_holdings
from ckptool.torch.live_run import LiveJob, run_live
from ckptool.torch.live_slots import SlotsMemory
from ckptool.torch.live_source import FromTensors, LiveSource, Snapshots
from ckptool.torch.local_state import LocalShard, flatten
from ckptool.torch.news import News

__all__ = ["DEFAULT_MAX_MEMORY", "ExportReport", "LiveExporter", "export_live"]

log = logging.getLogger("ckptool")

DEFAULT_MAX_MEMORY = 256 << 20
_MODES = ("snapshot", "stop")


@dataclass(frozen=True)
class ExportReport:
    """What a live export did; counts are of all ranks together.

    ``files`` maps names to bytes. ``num_bytes_travelled`` went from one rank to another.
    ``casts`` names the tensors of which a cast overflowed or underflowed elements.
    ``blocked_s`` is how long the call held the caller, ``seconds`` how long all of it took; of
    an export in flight both are what is known so far, and it is not ``committed``. ``error`` is
    why an export failed, where failures are not raised.
    """

    url: str
    mode: str
    files: Mapping[str, int]
    num_tensors: int
    num_tensors_cast: int
    num_bytes: int
    num_bytes_travelled: int
    num_parts: int
    rank_by_rank: bool
    staged_bytes: int
    committed: bool = False
    casts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    blocked_s: float = 0.0
    seconds: float = 0.0
    error: str | None = None


def export_live(
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
    process_timeout_s: float = 300.0,
) -> ExportReport:
    """Write a model that lives on these ranks as safetensors; collective.

    ``model`` is a module, which counts as the checkpoint entry ``model``, or a state dict as it
    would be saved. ``destination`` is a folder, or one file that ends in ``.safetensors``, on
    any storage. ``dtype``, ``everything`` (``--all``), ``only``, ``exclude``, ``strip_prefix``,
    ``rename`` and ``max_file_size`` mean what they mean to ``ckptool export``.

    ``max_memory`` bounds the bytes in flight on a rank. ``mode`` "snapshot" copies this rank's
    share of the model to host memory first, and what travels goes over gloo; "stop" reads the
    tensors where they are, and what travels goes from GPU to GPU. ``rank_by_rank``: rank 0
    writes all, in order, from what one rank after the other sends; so it is anyway on storage
    that takes only that. ``beside`` are small files for the same folder.

    Returns once the export is complete. Raises the same error on every rank, and then nothing
    is visible and the model is as it was.
    """
    with LiveExporter(process_timeout_s=process_timeout_s) as exporter:
        report = exporter.export(
            model,
            destination,
            dtype=dtype,
            everything=everything,
            only=only,
            exclude=exclude,
            strip_prefix=strip_prefix,
            rename=rename,
            max_file_size=max_file_size,
            max_memory=max_memory,
            storage_options=storage_options,
            mode=mode,
            rank_by_rank=rank_by_rank,
            beside=beside,
        )
        if report.committed:
            return report
        exporter.wait()
        return exporter.finished()[-1]


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
        self._flight: _Flight | None = None
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
        form = _form(destination, max_file_size, beside)
        options = {"ckptool_deadline_s": self._deadline_s, **(storage_options or {})}
        store = _open_together(form, options, group)
        wishes = Wishes(
            cast_target(dtype), everything, tuple(only), tuple(exclude), strip_prefix, rename
        )
        in_order = rank_by_rank or not store.capabilities.assembly
        held: list[LocalShard] = []

        def look() -> bytes:
            state = model if isinstance(model, Mapping) else {"model": get_model_state_dict(model)}
            flat = flatten(state)
            held.extend(flat.shards)
            return holdings_json(flat)

        plan = plan_live(
            read_holdings(group.together(look)),
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
        shards = [held[number] for number in plan.chosen[group.rank]]
        source = self._source(job, shards, mode)
        report = replace(
            _planned(destination, mode, plan, rank_by_rank=in_order),
            staged_bytes=self.staged_bytes if mode == "snapshot" else 0,
        )
        if mode == "stop":
            exchange = choose_exchange(group, source.device)
            totals = self._run(lambda: run_live(job, source, exchange, self._memory))
            seconds = time.monotonic() - started
            return replace(report, committed=True, blocked_s=seconds, seconds=seconds, **totals)
        blocked_s = time.monotonic() - started
        report = replace(report, blocked_s=blocked_s, seconds=blocked_s)
        gloo = GlooExchange(group)
        self._flight = _Flight(lambda: run_live(job, source, gloo, self._memory), report, started)
        return report

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
            self._flight.wait(None)
            self._land()

    def cancel(self, *, timeout_s: float) -> None:
        """Break off the export in flight, on all ranks, and wait for that; not collective."""
        if self._flight is None:
            return
        error = StorageError("the export was broken off", hint="export the step again")
        self._news.fail(f"export-{self._number}", error)
        if self._flight.wait(timeout_s):
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

    def _source(self, job: LiveJob, shards: Sequence[LocalShard], mode: str) -> LiveSource:
        """This rank's bytes, staged as they are now unless they are read in place."""
        shares = job.plan.shares[job.group.rank]
        if mode == "stop":
            return FromTensors(shards, shares)
        images: list[Any] = []

        def prepare() -> bytes:
            images.append(self._snapshots.prepare(shards, shares))
            return b""

        job.group.together(prepare)
        return self._snapshots.take(shards, shares, images[0])

    def _ready_group(self) -> Group:
        """The group; a new one after an export that failed, which closed it on every rank."""
        if self._group is None:
            self._group = Group(timeout_s=self._timeout_s)
        return self._group

    def _run(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return work()
        except BaseException:
            self._group = None
            raise

    def _land(self) -> None:
        """Take the outcome of the export that ended."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self._finished.append(flight.report)
        if flight.error is None:
            return
        self._group = None
        if self._raise:
            raise flight.error
        log.error("the export to %s failed: %s", flight.report.url, flight.error)


class _Flight:
    """An export that goes on while the training does, in a thread."""

    def __init__(
        self, work: Callable[[], dict[str, Any]], report: ExportReport, started: float
    ) -> None:
        self._work, self.report, self._started = work, report, started
        self.error: CkptoolError | None = None
        self._enter = same_device()
        self._thread = threading.Thread(target=self._fly, name="ckptool-export", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None) -> bool:
        """Whether it ended, within ``timeout_s``."""
        self._thread.join(timeout_s)
        return self.done

    def _fly(self) -> None:
        changes: dict[str, Any] = {}
        try:
            self._enter()
            changes = {**self._work(), "committed": True}
        except Exception as error:
            if not isinstance(error, CkptoolError):
                error = CkptoolError(f"{type(error).__name__}: {error}")
            self.error = error
            changes = {"error": str(error)}
        seconds = time.monotonic() - self._started
        self.report = replace(self.report, seconds=seconds, **changes)


def _form(
    destination: str, max_file_size: int | None, beside: Mapping[str, bytes] | None
) -> Destination:
    form = destination_of(destination, None, max_file_size)
    if form.format != "safetensors":
        raise UnsupportedError(
            f"{destination}: a live export writes safetensors only",
            hint="name a folder or a .safetensors file; ckptool export makes a .pt of a checkpoint",
        )
    if beside and form.name is not None:
        raise UsageError(f"{destination} is one file: nothing is written beside it")
    return form


def _open_together(form: Destination, options: Mapping[str, Any], group: Group) -> Store:
    """The destination on every rank, where nothing stands yet."""
    opened: list[Store] = []

    def open_it() -> bytes:
        store = open_store(form.folder, options=options)
        if group.size > 1 and not store.capabilities.shared:
            raise RefusedError(
                f"{store.url} is seen by one process only, and there are {group.size} ranks",
                hint="give a folder that all hosts share, or an object store",
            )
        opened.append(store)
        return b""

    group.together(open_it)
    (store,) = opened
    group.from_rank_0(
        lambda: require_new_or_resumed(
            store,
            form.journal_key,
            resume=False,
            refuse_existing=lambda: refuse_existing(store, form),
        )
    )
    return store


def _planned(url: str, mode: str, plan: LivePlan, *, rank_by_rank: bool) -> ExportReport:
    tensors = plan.layout.tensors
    return ExportReport(
        url=url,
        mode=mode,
        files={output.key: output.num_bytes for output in plan.plan.outputs},
        num_tensors=len(tensors),
        num_tensors_cast=sum(tensor.dtype != tensor.source_dtype for tensor in tensors),
        num_bytes=plan.plan.num_bytes,
        num_bytes_travelled=plan.num_bytes_travelling,
        num_parts=len(plan.parts),
        rank_by_rank=rank_by_rank,
        staged_bytes=0,
    )
