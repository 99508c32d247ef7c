"""reshard: lay a checkpoint out for another number of ranks, every byte proved on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.engine.compressing import Compressing
from ckptool.engine.journal import JournalHeader
from ckptool.engine.run import How, RunReport
from ckptool.engine.sinks import Writing
from ckptool.errors import RefusedError, StorageError, UsageError
from ckptool.formats.ckpt_index import write_index
from ckptool.formats.dcp_metadata import read_metadata, write_metadata
from ckptool.layout import JOURNAL_NAME, METADATA_NAME
from ckptool.manifest import ObjectFacts
from ckptool.model import Index, ValueEntry
from ckptool.operations.commit import COMMIT_KEYS, commit_checkpoint, refuse_unless_empty
from ckptool.operations.open import Checkpoint, open_checkpoint
from ckptool.operations.probe import probe, read_value
from ckptool.operations.sound import require_sound
from ckptool.operations.transfer import (
    Transfer,
    discard,
    how_for,
    parts_of,
    require_new_or_resumed,
    transfer,
    transfer_json,
)
from ckptool.planning.copies import PartsSummary
from ckptool.planning.digest import plan_digest
from ckptool.planning.reshard import ReshardLayout, plan_layout
from ckptool.planning.reshard_bytes import ReshardBytes, plan_bytes, source_chunks
from ckptool.planning.reshard_index import items_by_file, moved, payload_columns
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage import open_store
from ckptool.storage.base import Store

__all__ = ["ReshardResult", "discard_reshard", "reshard"]


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """What a reshard did, or with ``dry_run`` would do.

    ``report`` and ``metadata_num_bytes`` are None for a dry run; ``planned`` is None unless
    items were probed, and ``parts`` then says what a dry run would cost.
    """

    source_url: str
    dest_url: str
    layout: ReshardLayout
    merge: bool
    dry_run: bool
    planned: ReshardBytes | None
    report: RunReport | None
    metadata_num_bytes: int | None
    parts: PartsSummary | None = None

    def to_json(self) -> dict[str, Any]:
        plan = None if self.planned is None else self.planned.plan
        report = self.report
        return {
            "source": self.source_url,
            "destination": self.dest_url,
            "merge": self.merge,
            "dry_run": self.dry_run,
            "plan": self.layout.to_json(),
            "files": None
            if plan is None
            else [{"name": o.key, "num_bytes": o.num_bytes} for o in plan.outputs],
            "parts": self.parts and self.parts.to_json(),
            **transfer_json(report),
        }


def reshard(
    source_url: str,
    dest_url: str,
    *,
    to: int,
    merge: bool = False,
    compress: str | None = None,
    dry_run: bool = False,
    probe_items: bool = False,
    resume: bool = False,
    how: How | None = None,
    source_options: Mapping[str, Any] | None = None,
    dest_options: Mapping[str, Any] | None = None,
    progress: Progress = NO_PROGRESS,
) -> ReshardResult:
    """Write the checkpoint at ``source_url`` for ``to`` ranks to ``dest_url``.

    Raises NoCheckpointError, DamagedError, NotEmptyError, RefusedError, StorageError; until
    its last moment nothing committed stands at the destination.
    """
    if to < 1:
        raise UsageError(f"--to {to}: a checkpoint needs at least one rank")
    if compress not in (None, "zstd"):
        raise UsageError(f"--compress {compress}: only zstd is known")
    checkpoint = open_checkpoint(source_url, options=source_options)
    dest = open_store(dest_url, options=dest_options)
    require_new_or_resumed(
        dest, JOURNAL_NAME, resume=resume, refuse_existing=lambda: refuse_unless_empty(dest)
    )
    if to > 1 and not dest.capabilities.shared:
        raise RefusedError(
            f"{dest_url} is not seen by other processes, so no second rank could load it",
            hint="reshard to a file:// or s3:// URL, or --to 1",
        )
    require_sound(checkpoint)
    layout = plan_layout(checkpoint.index, num_ranks=to, merge=merge)
    how = how_for(how or How(), checkpoint.store, dest, whole_parts=compress is None)
    planned = None
    if probe_items or not dry_run:
        planned = _plan(checkpoint, layout, how, how.num_jobs(checkpoint.store), progress)
    if dry_run or planned is None:
        parts = None if planned is None else parts_of(planned.plan, checkpoint.store, dest, how)
        return ReshardResult(
            checkpoint.url, dest_url, layout, merge, True, planned, None, None, parts
        )
    request = {"to": to, "merge": merge, "compress": compress}
    header = JournalHeader(
        "reshard",
        checkpoint.url,
        request,
        plan_digest(planned.plan, server_copy=how.server_copy),
        commits=COMMIT_KEYS,
    )
    job = Transfer(
        planned.plan, checkpoint.store, dest, how, JOURNAL_NAME, header, resume, planned.streams
    )
    metadata_num_bytes, report = _write(checkpoint, job, layout, planned, compress, progress)
    return ReshardResult(
        checkpoint.url, dest_url, layout, merge, False, planned, report, metadata_num_bytes
    )


def discard_reshard(dest_url: str, *, dest_options: Mapping[str, Any] | None = None) -> None:
    """Abort and remove what an interrupted reshard left; RefusedError where there is none."""
    discard(open_store(dest_url, options=dest_options), JOURNAL_NAME)


def _plan(
    checkpoint: Checkpoint, layout: ReshardLayout, how: How, num_jobs: int, progress: Progress
) -> ReshardBytes:
    """Probe every item that is used and lay out the bytes."""
    index, store = checkpoint.index, checkpoint.store
    sources = probe(
        store,
        source_chunks(index, layout),
        jobs=num_jobs,
        payloads=checkpoint.payloads,
        progress=progress,
    )
    values = {}
    for key in layout.values:
        value = index.entries[key]
        assert isinstance(value, ValueEntry)
        values[key] = read_value(store, value)
    return plan_bytes(index, layout, sources=sources, values=values, server_copy=how.server_copy)


def _write(
    checkpoint: Checkpoint,
    job: Transfer,
    layout: ReshardLayout,
    planned: ReshardBytes,
    compress: str | None,
    progress: Progress,
) -> tuple[int, RunReport]:
    dest = job.dest
    writing = _writing(dest, planned, compress, job.how)
    committed: list[tuple[Index, int]] = []

    def finish(report: RunReport) -> None:
        index, objects = planned.index, report.objects
        if isinstance(writing, Compressing):
            index, objects = moved(index, writing.placed), dict(writing.objects)
        metadata = write_metadata(index)
        payloads = payload_columns(
            planned.payloads, report.payload_crcs, is_compressed=compress is not None
        )
        commit_checkpoint(
            dest,
            metadata=metadata,
            index_file=write_index(index, payloads=payloads, metadata=metadata),
            objects={key: ObjectFacts(n, crc) for key, (n, crc) in objects.items()},
            step=checkpoint.step,
            layout={"world_size": layout.num_ranks, "written_by": "ckptool reshard"},
            verified="checksum" if dest.capabilities.checksums else "size",
            again=job.resume,
        )
        committed.append((index, len(metadata)))

    progress.start("reshard", num_bytes=planned.plan.num_bytes)
    report = transfer(job, writing=writing, finish=finish, progress=progress)
    progress.finish()
    ((index, metadata_num_bytes),) = committed
    _check(dest, index)
    return metadata_num_bytes, report


def _writing(dest: Store, planned: ReshardBytes, compress: str | None, how: How) -> Writing:
    outputs = planned.plan.outputs
    if compress is None:
        return Writing(dest, outputs)
    return Compressing(
        dest,
        outputs,
        items=items_by_file(planned.index),
        fresh=planned.fresh(),
        num_threads=how.num_jobs(dest),
        max_memory=how.max_memory,
    )


def _check(dest: Store, expected: Index) -> None:
    """Reopen what was written: it must say what was planned, and every item must be there."""
    said = read_metadata(dest.read(METADATA_NAME), name=METADATA_NAME)  # ckpt.index is opened below
    is_same = dict(said.entries) == dict(expected.entries)
    del said  # an index may be large
    reopened = open_checkpoint(dest.url, options=dest.recipe().options)
    is_same &= dict(reopened.index.entries) == dict(expected.entries)
    if not is_same or reopened.findings:
        raise StorageError(
            f"{dest.url} does not read back as what was written",
            hint="remove it and run again; report this with the source's inspect --json",
        )
    require_sound(reopened)
