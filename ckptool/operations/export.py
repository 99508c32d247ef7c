"""export: the model out of a sharded checkpoint, as one file or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptool.engine.journal import JournalHeader
from ckptool.engine.run import How, RunReport
from ckptool.engine.sinks import Writing
from ckptool.errors import (
    RefusedError,
    UsageError,
)
from ckptool.formats.safetensors_file import encode_index
from ckptool.model import Index, TensorEntry
from ckptool.operations.export_target import (
    cast_target,
    check_written,
    destination_of,
    refuse_existing,
    require_codes,
)
from ckptool.operations.open import Checkpoint, open_checkpoint
from ckptool.operations.probe import probe
from ckptool.operations.sound import require_sound
from ckptool.operations.torch_tree import Trees, read_trees
from ckptool.operations.transfer import (
    Transfer,
    discard,
    how_for,
    parts_of,
    require_new_or_resumed,
    transfer,
    transfer_json,
)
from ckptool.planning.chunk_rows import ChunkRows, without_replicas
from ckptool.planning.copies import PartsSummary
from ckptool.planning.digest import plan_digest
from ckptool.planning.export import ExportLayout, plan_layout
from ckptool.planning.export_bytes import plan_safetensors, plan_torch
from ckptool.planning.keys import choose
from ckptool.planning.plan import Plan
from ckptool.progress import NO_PROGRESS, Progress
from ckptool.storage import open_store

__all__ = ["DEFAULT_MAX_FILE_BYTES", "ExportResult", "discard_export", "export"]

DEFAULT_MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export did, or with ``dry_run`` would do.

    ``values_left_out`` maps the keys of chosen values that the format cannot carry to the
    reason. ``report`` is None for a dry run; ``plan`` is None unless items were probed, and
    ``parts`` then says what a dry run would cost.
    """

    source_url: str
    dest_url: str
    layout: ExportLayout
    dry_run: bool
    values_left_out: Mapping[str, str]
    plan: Plan | None
    report: RunReport | None
    parts: PartsSummary | None = None

    def to_json(self) -> dict[str, Any]:
        report = self.report
        return {
            "source": self.source_url,
            "destination": self.dest_url,
            "dry_run": self.dry_run,
            "plan": self.layout.to_json(),
            "values_left_out": dict(self.values_left_out),
            "num_tensors": len(self.layout.tensors),
            "num_tensors_cast": sum(t.dtype != t.source_dtype for t in self.layout.tensors),
            "casts": None
            if report is None
            else {
                key: {"overflows": count.overflows, "underflows": count.underflows}
                for key, count in report.casts.items()
                if count.overflows or count.underflows
            },
            "files": None
            if self.plan is None
            else [{"name": o.key, "num_bytes": o.num_bytes} for o in self.plan.outputs],
            "parts": self.parts and self.parts.to_json(),
            **transfer_json(report),
        }


def export(
    source_url: str,
    dest_url: str,
    *,
    everything: bool = False,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strip_prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    max_file_size: int | None = None,
    format: str | None = None,
    int_keys: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    probe_items: bool = False,
    resume: bool = False,
    how: How | None = None,
    source_options: Mapping[str, Any] | None = None,
    dest_options: Mapping[str, Any] | None = None,
    progress: Progress = NO_PROGRESS,
) -> ExportResult:
    """Write the chosen entries of the checkpoint at ``source_url`` to ``dest_url``.

    Raises UsageError, NoCheckpointError, DamagedError, RefusedError, StorageError; nothing is
    visible at the destination before every byte of it was proved and written.
    """
    if everything and only:
        raise UsageError("--all and --only exclude each other")
    target = cast_target(dtype)
    form = destination_of(dest_url, format, max_file_size)
    if int_keys and form.format != "torch":
        raise UsageError("--int-keys is for torch files; safetensors has no nested keys")
    checkpoint = open_checkpoint(source_url, options=source_options)
    index = checkpoint.index
    choice = choose(
        index,
        everything=everything,
        only=only,
        exclude=exclude,
        strip_prefix=strip_prefix,
        rename=rename,
    )
    layout = plan_layout(
        index,
        choice,
        format=form.format,
        single_file=form.name,
        max_file_num_bytes=max_file_size or DEFAULT_MAX_FILE_BYTES,
        dtype=target,
    )
    require_sound(checkpoint, keys=set(choice.names))
    dest = open_store(form.folder, options=dest_options)
    require_new_or_resumed(
        dest,
        form.journal_key,
        resume=resume,
        refuse_existing=lambda: refuse_existing(dest, form),
    )
    how = how_for(how or How(), checkpoint.store, dest)
    trees = _values(checkpoint, layout, int_keys=int_keys, strict=strict, max_memory=how.max_memory)
    require_codes(layout)
    plan = None
    if probe_items or not dry_run:
        plan = _plan(checkpoint, layout, trees, how.num_jobs(checkpoint.store), progress)
    report = parts = None
    if plan is not None and dry_run:
        parts = parts_of(plan, checkpoint.store, dest, how)
    elif plan is not None:
        request = {"format": form.format, "dtype": dtype, "tensors": len(layout.tensors)}
        header = JournalHeader(
            "export",
            checkpoint.url,
            request,
            plan_digest(plan, server_copy=how.server_copy),
            commits=() if layout.index_name is None else (layout.index_name,),
        )
        job = Transfer(plan, checkpoint.store, dest, how, form.journal_key, header, resume)
        report = _write(job, layout, progress)
    return ExportResult(
        checkpoint.url, dest_url, layout, dry_run, trees.left_out, plan, report, parts
    )


def discard_export(dest_url: str, *, dest_options: Mapping[str, Any] | None = None) -> None:
    """Abort and remove what an interrupted export left; RefusedError where there is none."""
    form = destination_of(dest_url, None, None)
    discard(open_store(form.folder, options=dest_options), form.journal_key)


def _values(
    checkpoint: Checkpoint, layout: ExportLayout, *, int_keys: bool, strict: bool, max_memory: int
) -> Trees:
    if layout.format == "torch":
        trees = read_trees(checkpoint, layout, int_keys=int_keys, max_memory=max_memory)
    else:
        reason = "safetensors holds tensors only"
        trees = Trees({}, {}, dict.fromkeys(layout.values, reason))
    if strict and trees.left_out:
        key, reason = next(iter(trees.left_out.items()))
        raise RefusedError(
            f"--strict: {len(trees.left_out)} values cannot be carried, the first is {key}: "
            f"{reason}",
            hint="leave them out with --exclude, or run without --strict",
            entries=dict(trees.left_out),
        )
    return trees


def _plan(
    checkpoint: Checkpoint, layout: ExportLayout, trees: Trees, num_jobs: int, progress: Progress
) -> Plan:
    chunks = _chunks(checkpoint.index, layout)
    found = probe(
        checkpoint.store,
        chunks,
        jobs=num_jobs,
        payloads=checkpoint.payloads,
        progress=progress,
    )
    sources, checks = found.by_entry(), found.checks
    if layout.format == "torch":
        files, records = trees.by_file, trees.records
        return plan_torch(layout, trees=files, records=records, sources=sources, checks=checks)
    metadata = {"format": "pt"}
    return plan_safetensors(layout, sources=sources, checks=checks, metadata=metadata)


def _chunks(index: Index, layout: ExportLayout) -> ChunkRows:
    """The chunks of all tensors; of replicas the first, and no empty ones."""
    chosen = []
    for tensor in layout.tensors:
        entry = index.entries[tensor.key]
        assert isinstance(entry, TensorEntry)
        rows = without_replicas(entry.chunks)
        rows = rows[entry.chunks.sizes[rows].all(axis=1)]
        chosen.append((entry, rows, np.zeros(len(rows), bool)))
    return ChunkRows(chosen)


def _write(job: Transfer, layout: ExportLayout, progress: Progress) -> RunReport:
    dest, plan = job.dest, job.plan

    def finish(report: RunReport) -> None:
        check_written(dest, layout, plan)
        if layout.index_name is not None:
            total = sum(tensor.num_bytes for tensor in layout.tensors)
            dest.put(layout.index_name, encode_index(layout.weight_map(), total_num_bytes=total))

    progress.start("export", num_bytes=plan.num_bytes)
    writing = Writing(dest, plan.outputs)
    report = transfer(job, writing=writing, finish=finish, progress=progress)
    progress.finish()
    return report
