"""An opened checkpoint -> a report of what it says it holds; no shard byte is read."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptool.layout import INDEX_NAME, MANIFEST_NAME, is_journal_name
from ckptool.manifest import Manifest, write_manifest
from ckptool.model import Entry, TensorEntry, ValueEntry
from ckptool.operations.inspect_notes import group_of, notes_on
from ckptool.operations.open import Checkpoint, open_checkpoint
from ckptool.planning.findings import Finding
from ckptool.planning.item_ranges import item_ranges

__all__ = [
    "EntryReport",
    "FileReport",
    "InspectReport",
    "Total",
    "describe_files",
    "inspect",
    "inspect_checkpoint",
]


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One key; ``dtype``, ``shape`` and ``num_bytes`` are None for a value.

    ``stored_bytes`` are those of its items, framing included; ``files`` are where they lie.
    """

    key: str
    kind: str
    group: str
    dtype: str | None
    shape: tuple[int, ...] | None
    num_bytes: int | None
    num_chunks: int
    stored_bytes: int
    files: tuple[str, ...]
    transforms: tuple[str, ...]
    path: tuple[str | int, ...] | None

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "kind": self.kind,
            "group": self.group,
            "dtype": self.dtype,
            "shape": None if self.shape is None else list(self.shape),
            "num_bytes": self.num_bytes,
            "num_chunks": self.num_chunks,
            "stored_bytes": self.stored_bytes,
            "files": list(self.files),
            "transforms": list(self.transforms),
            "path": None if self.path is None else list(self.path),
        }


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file: ``role`` is shard, orphan (nothing refers to it), missing (something does, and
    it is not there), metadata, manifest, index, or other.
    """

    name: str
    role: str
    num_bytes: int | None
    referenced_bytes: int
    num_items: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "role": self.role,
            "num_bytes": self.num_bytes,
            "referenced_bytes": self.referenced_bytes,
            "num_items": self.num_items,
        }


@dataclass(frozen=True, slots=True)
class Total:
    """Entries of one group or dtype, and their logical bytes."""

    name: str
    num_entries: int
    num_elements: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_entries": self.num_entries,
            "num_elements": self.num_elements,
            "num_bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class InspectReport:
    """All that the index, the manifest and one listing say.

    ``world_size`` is what the manifest says, None without one: the files do not tell it.
    """

    url: str
    step: int | None
    form: str
    version: str | None
    world_size: int | None
    manifest: Mapping[str, Any] | None
    num_tensors: int
    num_values: int
    num_chunks: int
    num_bytes: int
    stored_bytes: int
    entries: tuple[EntryReport, ...]
    files: tuple[FileReport, ...]
    by_group: tuple[Total, ...]
    by_dtype: tuple[Total, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "step": self.step,
            "form": self.form,
            "version": self.version,
            "world_size": self.world_size,
            "manifest": self.manifest,
            "num_tensors": self.num_tensors,
            "num_values": self.num_values,
            "num_chunks": self.num_chunks,
            "num_bytes": self.num_bytes,
            "stored_bytes": self.stored_bytes,
            "entries": [e.to_json() for e in self.entries],
            "files": [f.to_json() for f in self.files],
            "by_group": [t.to_json() for t in self.by_group],
            "by_dtype": [t.to_json() for t in self.by_dtype],
            "findings": [f.to_json() for f in self.findings],
            "notes": list(self.notes),
        }


def inspect(
    source_url: str,
    *,
    match: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> InspectReport:
    """What a checkpoint holds, by its index; ``match`` keeps the keys of any of its globs."""
    return inspect_checkpoint(open_checkpoint(source_url, options=options), match=match)


def inspect_checkpoint(checkpoint: Checkpoint, *, match: Sequence[str] = ()) -> InspectReport:
    """The report of a checkpoint that is open."""
    index = checkpoint.index
    entries = [e for e in index.entries.values() if _matches(e.key, match)]
    tensors = [e for e in entries if isinstance(e, TensorEntry)]
    reports = tuple(_entry_report(e) for e in entries)
    manifest = checkpoint.manifest
    return InspectReport(
        url=checkpoint.url,
        step=checkpoint.step,
        form=checkpoint.form,
        version=index.version,
        world_size=None if manifest is None else _world_size(manifest),
        manifest=None if manifest is None else json.loads(write_manifest(manifest)),
        num_tensors=len(tensors),
        num_values=len(entries) - len(tensors),
        num_chunks=sum(len(t.chunks) for t in tensors),
        num_bytes=sum(t.num_bytes for t in tensors),
        stored_bytes=sum(r.stored_bytes for r in reports),
        entries=reports,
        files=tuple(describe_files(checkpoint)),
        by_group=tuple(_totals(entries, group_of)),
        by_dtype=tuple(_totals(tensors, lambda e: str(getattr(e, "dtype", "")))),
        findings=checkpoint.findings,
        notes=(*checkpoint.notes, *notes_on(entries)),
    )


def describe_files(checkpoint: Checkpoint) -> Iterator[FileReport]:
    """Every file that is listed or that the index names, by name."""
    ranges = item_ranges(checkpoint.index)
    count = len(ranges.files)
    items = np.bincount(ranges.file, minlength=count)
    referenced = np.zeros(count, np.int64)
    np.add.at(referenced, ranges.file, ranges.length)
    named = {f: (int(items[i]), int(referenced[i])) for i, f in enumerate(ranges.files)}
    for name in sorted(named.keys() | checkpoint.sizes.keys()):
        num_items, num_bytes = named.get(name, (0, 0))
        size = checkpoint.sizes.get(name)
        yield FileReport(name, _role(name, size, num_items), size, num_bytes, num_items)


def _role(name: str, size: int | None, num_items: int) -> str:
    if size is None:
        return "missing"
    if num_items:
        return "shard"
    if name.endswith(".metadata"):
        return "metadata"
    if name == MANIFEST_NAME:
        return "manifest"
    if name == INDEX_NAME:
        return "index"
    return "orphan" if name.endswith(".distcp") or is_journal_name(name) else "other"


def _entry_report(entry: Entry) -> EntryReport:
    if isinstance(entry, ValueEntry):
        item = entry.item
        return EntryReport(
            key=entry.key,
            kind="value",
            group=group_of(entry),
            dtype=None,
            shape=None,
            num_bytes=None,
            num_chunks=0,
            stored_bytes=0 if item is None else item.length,
            files=() if item is None else (item.file,),
            transforms=() if item is None else item.transforms,
            path=entry.path,
        )
    chunks = entry.chunks
    files = np.unique(chunks.file[chunks.file >= 0]).tolist()
    used = [0] if chunks.transform is None else np.unique(chunks.transform).tolist()
    transforms = {t: None for i in used for t in (chunks.transforms[i] if len(chunks) else ())}
    return EntryReport(
        key=entry.key,
        kind="tensor",
        group=group_of(entry),
        dtype=entry.dtype.name,
        shape=entry.shape,
        num_bytes=entry.num_bytes,
        num_chunks=len(chunks),
        stored_bytes=int(chunks.lengths.sum()),
        files=tuple(chunks.files[i] for i in files),
        transforms=tuple(transforms),
        path=entry.path,
    )


def _totals(entries: Iterable[Entry], name_of: Any) -> Iterator[Total]:
    sums: dict[str, list[int]] = {}
    for entry in entries:
        row = sums.setdefault(name_of(entry), [0, 0, 0])
        row[0] += 1
        if isinstance(entry, TensorEntry):
            row[1] += entry.num_elements
            row[2] += entry.num_bytes
    for name, (count, elements, num_bytes) in sorted(sums.items(), key=lambda s: -s[1][2]):
        yield Total(name, count, elements, num_bytes)


def _world_size(manifest: Manifest) -> int | None:
    said = manifest.layout.get("world_size")
    return said if type(said) is int else None


def _matches(key: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(key, g) for g in globs)
