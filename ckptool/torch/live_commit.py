"""How an export ends: everything visible at once, the index last, or nothing of it left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptool.engine.sinks import Writing
from ckptool.errors import CkptoolError, ObjectMissingError
from ckptool.formats.safetensors_file import encode_index
from ckptool.operations.export_target import check_written
from ckptool.storage.base import PartReceipt, Store
from ckptool.torch.faults import fault_point
from ckptool.torch.group import Group
from ckptool.torch.live_plan import LivePlan
from ckptool.torch.news import News

__all__ = ["LiveJob", "abort_export", "abort_stale", "commit_export"]

log = logging.getLogger("ckptool")


@dataclass(frozen=True)
class LiveJob:
    """One attempt: what to write where, and who takes part.

    ``beside`` are small files that become visible with the weights.
    """

    attempt: str
    plan: LivePlan
    dest: Store
    beside: Mapping[str, bytes]
    group: Group
    news: News
    timeout_s: float
    max_memory: int


def commit_export(job: LiveJob, writing: Writing, rows: list[dict[str, Any]]) -> None:
    """On rank 0 make everything visible, the index last; the others wait for it."""
    if job.group.rank == 0:
        fault_point("before-metadata", rank=0)
        for row in rows:
            for index, receipt in row["receipts"]:
                writing.keep(index, PartReceipt(**receipt))
        with _ticking(job.news):
            writing.commit()
            check_written(job.dest, job.plan.layout, job.plan.plan)
            for name, data in job.beside.items():
                job.dest.put(name, data)
            layout = job.plan.layout
            if layout.index_name is not None:
                total = sum(tensor.num_bytes for tensor in layout.tensors)
                data = encode_index(layout.weight_map(), total_num_bytes=total)
                job.dest.put(layout.index_name, data)
    try:
        job.news.meet(job.attempt, "committed", timeout_s=job.timeout_s)
    except CkptoolError as error:
        if job.group.rank:
            raise
        log.warning("the export is complete; meanwhile: %s", error)


def abort_export(job: LiveJob, writing: Writing, *, committing: bool) -> None:
    """Leave nothing behind, as far as this rank can."""
    if committing and job.group.rank and 0 not in job.news.gone:
        return  # rank 0 knows how far it came
    try:
        writing.abort()
        if committing and not _is_complete(job):
            for output in job.plan.plan.outputs:
                job.dest.delete(output.key)
            for name in job.beside:
                job.dest.delete(name)
    except CkptoolError as error:
        log.warning("something of the export may be left at %s: %s", job.dest.url, error)


def abort_stale(job: LiveJob) -> None:
    """Drop what an export that died left of the same objects."""
    keys = {output.key for output in job.plan.plan.outputs}
    try:
        for row in job.dest.list_uploads():
            if row.key in keys:
                job.dest.abort_upload(row.key, row.token)
    except CkptoolError as error:
        log.warning("cannot look for what earlier exports left: %s", error)


@contextmanager
def _ticking(news: News) -> Iterator[None]:
    """Tell the others, who wait, that this rank is at work."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(1.0):
            news.progress()

    thread = threading.Thread(target=tick, name="ckptool-export-tick", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _is_complete(job: LiveJob) -> bool:
    """Whether what is committed last is there: then rank 0 died after the commit."""
    last = job.plan.layout.index_name or next(
        reversed(list(job.beside)), job.plan.plan.outputs[-1].key
    )
    try:
        job.dest.info(last)
    except ObjectMissingError:
        return False
    return True
