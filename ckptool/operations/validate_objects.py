"""An opened checkpoint and its listing -> findings: is every item inside a file that is there?

Missing and short files are each named once, with all that they hold; files that nothing
refers to are notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ckptool.model import Ints
from ckptool.operations.inspect import describe_files
from ckptool.operations.open import Checkpoint
from ckptool.planning.findings import ERROR, NOTE, WARNING, Finding, subject_name
from ckptool.planning.item_ranges import ItemRanges

__all__ = ["check_files", "check_objects"]


def check_objects(checkpoint: Checkpoint, ranges: ItemRanges) -> Iterator[Finding]:
    """Compare what the index names with what one listing showed."""
    yield from check_files(checkpoint, ranges)
    yield from _check_orphans(checkpoint)
    yield from _check_manifest(checkpoint)


def check_files(checkpoint: Checkpoint, ranges: ItemRanges) -> Iterator[Finding]:
    """Files that items need and that are missing or too short, each once."""
    sizes = np.array([checkpoint.sizes.get(f, -1) for f in ranges.files], np.int64)
    end = ranges.start + ranges.length
    outside = end > sizes[ranges.file] if len(ranges) else np.zeros(0, bool)
    for number in np.unique(ranges.file[outside]).tolist():
        rows = np.flatnonzero(outside & (ranges.file == number))
        rows = rows[np.argsort(ranges.start[rows], kind="stable")]
        name, size = ranges.files[number], int(sizes[number])
        need = int(end[rows].max())
        make = _missing_file if size < 0 else _short_file
        yield make(name, size, need, _keys(ranges, rows), ranges, rows)


def _missing_file(
    name: str, size: int, need: int, keys: tuple[str, ...], ranges: ItemRanges, rows: Ints
) -> Finding:
    message = f"{name}{_rank(name)} is missing; it holds {_holds(keys, len(rows))}"
    return Finding("missing-file", ERROR, message, file=name, entries=keys)


def _short_file(
    name: str, size: int, need: int, keys: tuple[str, ...], ranges: ItemRanges, rows: Ints
) -> Finding:
    key, box = ranges.whose(int(rows[0]))
    what = "is empty" if size == 0 else f"ends at byte {size}"
    message = (
        f"{name}{_rank(name)} {what}, but its items reach byte {need}; beyond the end: "
        f"{_holds(keys, len(rows))}, first {subject_name(key, box)} at byte "
        f"{int(ranges.start[rows[0]])}"
    )
    return Finding(
        "short-file", ERROR, message, entry=key, box=box, file=name, offset=size, entries=keys
    )


def _check_orphans(checkpoint: Checkpoint) -> Iterator[Finding]:
    for file in describe_files(checkpoint):
        if file.role == "orphan":
            message = f"nothing refers to {file.name} ({file.num_bytes} bytes)"
            yield Finding("orphan", NOTE, message, file=file.name)


def _check_manifest(checkpoint: Checkpoint) -> Iterator[Finding]:
    manifest = checkpoint.manifest
    if manifest is None:
        return
    for name, facts in manifest.objects.items():
        said, found = facts.num_bytes, checkpoint.sizes.get(name)
        if found is None:
            message = f"the manifest lists {name} of {said} bytes, which is not there"
            yield Finding("manifest-differs", WARNING, message, file=name)
        elif found != said:
            message = f"{name} has {found} bytes, the manifest says {said}"
            yield Finding("manifest-differs", WARNING, message, file=name, offset=min(found, said))


def _keys(ranges: ItemRanges, rows: Ints) -> tuple[str, ...]:
    owners = dict.fromkeys(ranges.owner[rows].tolist())
    return tuple(ranges.entries[i].key for i in owners)


def _holds(keys: Sequence[str], num_items: int) -> str:
    some = ", ".join(repr(k) for k in keys[:4]) + (", ..." if len(keys) > 4 else "")
    items = "1 item" if num_items == 1 else f"{num_items} items"
    return f"{items} of {some}"


def _rank(name: str) -> str:
    """Whose file it is, where the usual name tells: a help for people, nothing relies on it."""
    match = re.match(r"(?:.*/)?__(\d+)_\d+", name)
    return f" (by its name, of rank {match[1]})" if match else ""
