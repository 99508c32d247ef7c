"""A checkpoint -> findings: its structure, its objects and, when asked, every stored byte.

Findings are handed on as they come, and nothing stops at the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptool.engine.check_items import check_items
from ckptool.engine.item_verdict import DAMAGED, OK, UNVERIFIABLE, Subject
from ckptool.model import TensorEntry
from ckptool.operations.open import Checkpoint, open_checkpoint
from ckptool.operations.replicas import Replicas
from ckptool.operations.validate_objects import check_objects
from ckptool.planning.findings import ERROR, WARNING, Finding
from ckptool.planning.item_ranges import ItemRanges, item_ranges
from ckptool.planning.structure import check_structure
from ckptool.progress import NO_PROGRESS, Progress

__all__ = ["DataCounts", "ValidateReport", "validate", "validate_checkpoint"]

OnFinding = Callable[[Finding], None]

_DEFAULT_MAX_MEMORY = 256 << 20
_DEFAULT_JOBS = 4


@dataclass(frozen=True, slots=True)
class DataCounts:
    """What reading the items showed; ``num_skipped`` were not in the sample, or not readable
    because their file is missing or short.
    """

    num_ok: int = 0
    num_damaged: int = 0
    num_unverifiable: int = 0
    num_skipped: int = 0
    num_bytes_read: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "num_ok": self.num_ok,
            "num_damaged": self.num_damaged,
            "num_unverifiable": self.num_unverifiable,
            "num_skipped": self.num_skipped,
            "num_bytes_read": self.num_bytes_read,
        }


@dataclass(frozen=True, slots=True)
class ValidateReport:
    """All findings of one run; ``data`` is None where no item was read.

    ``remedy`` is the next step for whoever has errors, None without.
    """

    url: str
    step: int | None
    form: str
    num_entries: int
    num_items: int
    findings: tuple[Finding, ...]
    data: DataCounts | None
    remedy: str | None
    notes: tuple[str, ...]

    @property
    def num_errors(self) -> int:
        return sum(f.severity == ERROR for f in self.findings)

    @property
    def num_warnings(self) -> int:
        return sum(f.severity == WARNING for f in self.findings)

    @property
    def is_ok(self) -> bool:
        return self.num_errors == 0

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "step": self.step,
            "form": self.form,
            "ok": self.is_ok,
            "num_entries": self.num_entries,
            "num_items": self.num_items,
            "num_errors": self.num_errors,
            "num_warnings": self.num_warnings,
            "findings": [f.to_json() for f in self.findings],
            "data": None if self.data is None else self.data.to_json(),
            "remedy": self.remedy,
            "notes": list(self.notes),
        }


def validate(
    source_url: str,
    *,
    read_data: bool = False,
    percent: float = 100.0,
    jobs: int = _DEFAULT_JOBS,
    max_memory: int = _DEFAULT_MAX_MEMORY,
    options: Mapping[str, Any] | None = None,
    on_finding: OnFinding | None = None,
    progress: Progress = NO_PROGRESS,
) -> ValidateReport:
    """Check a checkpoint; ``percent`` of its items are read with ``read_data``.

    Raises NoCheckpointError, DamagedError or UnsupportedError where it cannot even be opened.
    """
    return validate_checkpoint(
        open_checkpoint(source_url, options=options),
        read_data=read_data,
        percent=percent,
        jobs=jobs,
        max_memory=max_memory,
        on_finding=on_finding,
        progress=progress,
    )


def validate_checkpoint(
    checkpoint: Checkpoint,
    *,
    read_data: bool,
    percent: float = 100.0,
    jobs: int = _DEFAULT_JOBS,
    max_memory: int = _DEFAULT_MAX_MEMORY,
    on_finding: OnFinding | None = None,
    progress: Progress = NO_PROGRESS,
) -> ValidateReport:
    """Check a checkpoint that is open."""
    findings: list[Finding] = []

    def take(found: Iterator[Finding] | Sequence[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            if on_finding is not None:
                on_finding(finding)

    ranges = item_ranges(checkpoint.index)
    take(checkpoint.findings)
    take(check_structure(checkpoint.index))
    take(check_objects(checkpoint, ranges))
    data = None
    if read_data:
        rows = _readable(checkpoint, ranges)
        data = _read(
            checkpoint, ranges, _sample(ranges, rows, percent),
            jobs=jobs, max_memory=max_memory, take=take, progress=progress,
        )  # fmt: skip
    return ValidateReport(
        url=checkpoint.url,
        step=checkpoint.step,
        form=checkpoint.form,
        num_entries=len(checkpoint.index.entries),
        num_items=len(ranges),
        findings=tuple(findings),
        data=data,
        remedy=_remedy(checkpoint, findings),
        notes=checkpoint.notes,
    )


def _readable(checkpoint: Checkpoint, ranges: ItemRanges) -> Any:
    """Rows of the items that lie inside a file that is there, by file and offset."""
    sizes = np.array([checkpoint.sizes.get(f, -1) for f in ranges.files], np.int64)
    end = ranges.start + ranges.length
    known = (ranges.start >= 0) & (ranges.length >= 0) & (end >= ranges.start)
    rows = np.flatnonzero(known & (end <= sizes[ranges.file])) if len(ranges) else ranges.row
    return rows[np.lexsort((ranges.start[rows], ranges.file[rows]))]


def _sample(ranges: ItemRanges, rows: Any, percent: float) -> Any:
    """The same items each time: those whose place, mixed into 32 bits, is small enough."""
    if percent >= 100 or not len(rows):
        return rows
    place = ranges.start[rows].astype(np.uint64) * np.uint64(1 << 20)
    place += ranges.file[rows].astype(np.uint64)
    mixed = (place ^ (place >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    top = mixed >> np.uint64(32)
    chosen = top < np.uint64(int(percent / 100 * (1 << 32)))
    chosen[np.argmin(top)] = True
    return rows[chosen]


def _read(
    checkpoint: Checkpoint,
    ranges: ItemRanges,
    rows: Any,
    *,
    jobs: int,
    max_memory: int,
    take: Callable[[Sequence[Finding]], None],
    progress: Progress,
) -> DataCounts:
    counts: Counter[str] = Counter()
    replicas = Replicas(ranges)
    num_bytes = int(ranges.length[rows].sum())
    progress.start("validate", num_bytes=num_bytes)
    try:
        subjects = (_subject(checkpoint, ranges, i, replicas) for i in rows.tolist())
        for checked in check_items(
            checkpoint.store, subjects, jobs=jobs, max_memory=max_memory, progress=progress
        ):
            counts[checked.status] += 1
            counts["bytes"] += checked.num_bytes
            take(checked.findings)
            take(replicas.compare(checked))
    finally:
        progress.finish()
    return DataCounts(
        num_ok=counts[OK],
        num_damaged=counts[DAMAGED],
        num_unverifiable=counts[UNVERIFIABLE],
        num_skipped=len(ranges) - len(rows),
        num_bytes_read=counts["bytes"],
    )


def _subject(checkpoint: Checkpoint, ranges: ItemRanges, i: int, replicas: Replicas) -> Subject:
    entry = ranges.entries[int(ranges.owner[i])]
    if not isinstance(entry, TensorEntry):
        return Subject(i, entry.key, ranges.item(i))
    row = int(ranges.row[i])
    payloads = (checkpoint.payloads or {}).get(entry.key)
    return Subject(
        i,
        entry.key,
        ranges.item(i),
        entry.dtype,
        entry.chunks[row].box,
        known_crc=None if payloads is None else payloads[row].crc32,
        wants_crc=replicas.has(i),
    )


def _remedy(checkpoint: Checkpoint, findings: Sequence[Finding]) -> str | None:
    codes = {f.code for f in findings if f.severity == ERROR}
    if not codes:
        return None
    parent = checkpoint.url.rsplit("/", 1)[0]
    if codes <= {"missing-file", "short-file"}:
        return (
            "bring the files that are named here from the hosts or the copy that still has them, "
            f"then run ckptool validate {checkpoint.url} --read-data again"
        )
    return (
        f"take a copy of this step that validates, or an older step: ckptool ls {parent} lists "
        "them, and ckptool validate STEP --read-data proves one"
    )
