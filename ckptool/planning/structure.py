"""An index -> findings: whether its chunks tile each tensor, and its items lie apart.

Nothing is read but the index. All work is on columns, n log n in the number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptool.layout import is_safe_relative_path
from ckptool.model import Box, Chunks, Index, TensorEntry
from ckptool.planning.findings import ERROR, NOTE, Finding, subject_name
from ckptool.planning.item_ranges import ItemRanges, item_ranges
from ckptool.planning.tiling import check_tiling

__all__ = ["check_structure"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_LARGEST = 1 << 58
_MAX_FINDINGS_PER_TENSOR = 1000


def check_structure(index: Index) -> Iterator[Finding]:
    """Everything that is wrong with an index by itself, entry by entry.

    Each tensor's chunks lie inside its shape, are stored, and tile it exactly (chunks of no
    elements are legal, and so is the same box stored more than once); no two items share
    bytes; no item is too short for its chunk.
    """
    for entry in index.entries.values():
        if isinstance(entry, TensorEntry):
            yield from _check_tensor(entry)
        elif entry.item is None:
            message = f"value {entry.key!r} is listed but not stored"
            yield Finding("not-stored", ERROR, message, entry=entry.key)
    yield from _check_items(index)


def _check_tensor(entry: TensorEntry) -> Iterator[Finding]:
    chunks = entry.chunks
    num_dims = len(entry.shape)
    if chunks.offsets.shape[1] != num_dims:
        found = chunks.offsets.shape[1]
        message = f"tensor {entry.key!r} has {num_dims} dims, but its chunks have {found}"
        yield Finding("bad-box", ERROR, message, entry=entry.key)
        return
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) >= _LARGEST:
        message = f"tensor {entry.key!r} has an impossible shape {list(entry.shape)}"
        yield Finding("bad-shape", ERROR, message, entry=entry.key)
        return
    if _is_whole(chunks, entry.shape):
        return
    inside, filled = _place(chunks, entry.shape)
    yield from _check_places(entry, inside, filled)
    live = np.flatnonzero(inside & filled)
    yield from _check_cover(entry, live)


def _is_whole(chunks: Chunks, shape: Sequence[int]) -> bool:
    """The common case at once: stored chunks that follow each other on dim 0."""
    if not len(chunks) or (chunks.file < 0).any():
        return False
    if not shape:
        return len(chunks) == 1
    if chunks.offsets[:, 1:].any() or (chunks.sizes[:, 1:] != np.array(shape[1:], np.int64)).any():
        return False
    order = np.argsort(chunks.offsets[:, 0], kind="stable")
    starts, sizes = chunks.offsets[order, 0], chunks.sizes[order, 0]
    if (sizes < 0).any() or (sizes > shape[0]).any():
        return False
    ends = starts + sizes
    return bool(starts[0] == 0 and ends[-1] == shape[0] and (starts[1:] == ends[:-1]).all())


def _place(chunks: Chunks, shape: Sequence[int]) -> tuple[Bools, Bools]:
    """Per chunk: whether it lies inside the shape, and whether it has elements."""
    full = np.array(shape, np.int64)
    offsets, sizes = chunks.offsets, chunks.sizes
    start_ok = (offsets >= 0) & (offsets <= full)
    room = full - np.where(start_ok, offsets, 0)
    inside = np.all(start_ok & (sizes >= 0) & (sizes <= room), axis=1)
    filled = np.all(sizes != 0, axis=1)
    return np.asarray(inside), np.asarray(filled)


def _check_places(entry: TensorEntry, inside: Bools, filled: Bools) -> Iterator[Finding]:
    for row in np.flatnonzero(~inside)[:_MAX_FINDINGS_PER_TENSOR].tolist():
        chunk = entry.chunks[row]
        severity = ERROR if filled[row] else NOTE
        what = "chunk" if filled[row] else "empty chunk"
        message = f"{what} {chunk.box} of {entry.key!r} lies outside its shape {list(entry.shape)}"
        yield Finding("bad-box", severity, message, entry=entry.key, box=chunk.box)
    lost = np.flatnonzero(filled & (entry.chunks.file < 0))
    for row in lost[:_MAX_FINDINGS_PER_TENSOR].tolist():
        box = entry.chunks[row].box
        message = f"chunk {box} of {entry.key!r} is listed but not stored"
        yield Finding("not-stored", ERROR, message, entry=entry.key, box=box)


def _check_cover(entry: TensorEntry, live: Ints) -> Iterator[Finding]:
    """``live`` are the chunks that lie inside the shape and have elements."""
    chunks = entry.chunks
    boxes = np.concatenate((chunks.offsets[live], chunks.sizes[live]), axis=1)
    if entry.shape:
        _, first, counts = np.unique(boxes, axis=0, return_index=True, return_counts=True)
    else:
        first, counts = np.arange(len(live))[:1], np.array([len(live)])[: len(live)]
    rows = live[first]
    for row, count in zip(rows[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        box = chunks[row].box
        message = f"chunk {box} of {entry.key!r} is stored {count} times"
        yield Finding("duplicate-box", NOTE, message, entry=entry.key, box=box)
    tiling = check_tiling(chunks.offsets[rows], chunks.sizes[rows], shape=entry.shape)
    for box in tiling.missing:
        yield _missing(entry, box)
    for pair in tiling.overlaps:
        first_box, second_box = (chunks[int(rows[i])].box for i in (pair.first, pair.second))
        message = (
            f"chunks {first_box} and {second_box} of {entry.key!r} overlap: both cover {pair.box}"
        )
        yield Finding("overlap", ERROR, message, entry=entry.key, box=pair.box)
    if not tiling.complete:
        message = f"the chunks of {entry.key!r} have too many faults to work out all of them"
        yield Finding("unproven", ERROR, message, entry=entry.key)


def _missing(entry: TensorEntry, box: Box) -> Finding:
    whole = box.sizes == entry.shape
    what = "no chunk of" if whole else f"box {box} of"
    verb = "is listed" if whole else f"is missing ({box.num_elements} elements)"
    message = f"{what} {entry.key!r} {verb}; its shape is {list(entry.shape)}"
    return Finding("missing-box", ERROR, message, entry=entry.key, box=box)


def _check_items(index: Index) -> Iterator[Finding]:
    ranges = item_ranges(index)
    for name in ranges.files:
        if not is_safe_relative_path(name):
            message = f"the index names a file outside the checkpoint: {name!r}"
            yield Finding("unsafe-path", ERROR, message, file=name)
    high = _LARGEST
    bad = (ranges.start < 0) | (ranges.length < 0) | (ranges.start > high) | (ranges.length > high)
    for i in np.flatnonzero(bad).tolist():
        key, box = ranges.whose(i)
        place = f"offset {ranges.start[i]}, length {ranges.length[i]}"
        message = f"{subject_name(key, box)} has an impossible place in its file: {place}"
        yield Finding(
            "bad-item", ERROR, message, entry=key, box=box, file=ranges.files[ranges.file[i]]
        )
    yield from _check_short(index)
    yield from _check_shared(ranges, np.flatnonzero(~bad & (ranges.length > 0)))


def _check_short(index: Index) -> Iterator[Finding]:
    """Items that cannot hold their chunk; compressed ones may be shorter."""
    for entry in index.tensors:
        chunks = entry.chunks
        if chunks.sizes.shape[1] != len(entry.shape):
            continue
        need = chunks.sizes.prod(axis=1) * entry.dtype.itemsize
        short = (chunks.file >= 0) & (chunks.lengths < need)
        if not short.any():
            continue
        for row in np.flatnonzero(short).tolist():
            chunk = chunks[row]
            if chunk.item is None or chunk.item.transforms:
                continue
            message = (
                f"{subject_name(entry.key, chunk.box)} needs {need[row]} bytes, but its item in "
                f"{chunk.item.file} at byte {chunk.item.offset} has {chunk.item.length}"
            )
            yield Finding(
                "short-item", ERROR, message, entry=entry.key, box=chunk.box,
                file=chunk.item.file, offset=chunk.item.offset,
            )  # fmt: skip


def _check_shared(ranges: ItemRanges, live: Ints) -> Iterator[Finding]:
    """Items that share bytes with another; the same chunk listed twice may share its own."""
    order = live[np.lexsort((ranges.start[live], ranges.file[live]))]
    file, start = ranges.file[order], ranges.start[order]
    end = start + ranges.length[order]
    reach, holder = _reach(file, end)
    for i in np.flatnonzero((file[1:] == file[:-1]) & (start[1:] < reach[:-1])).tolist():
        one, two = int(order[holder[i]]), int(order[i + 1])
        first, second = ranges.whose(one), ranges.whose(two)
        if first == second and ranges.start[one] == ranges.start[two]:
            continue
        name = ranges.files[int(file[i + 1])]
        byte = int(start[i + 1])
        both = f"{subject_name(*first)} and {subject_name(*second)}"
        message = f"{both} share bytes of {name} from byte {byte}"
        yield Finding(
            "shared-bytes", ERROR, message, entry=second[0], box=second[1], file=name, offset=byte
        )


def _reach(file: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Running maximum of ``end`` within each file, and the row that holds it."""
    if not len(file):
        return end, end
    first = np.flatnonzero(np.concatenate(([True], file[1:] != file[:-1])))
    if (np.diff(end) > 0)[file[1:] == file[:-1]].all():
        return end, np.arange(len(end))
    reach, holder = end.copy(), np.arange(len(end))
    for low, high in zip(first.tolist(), [*first[1:].tolist(), len(end)], strict=True):
        part = np.maximum.accumulate(end[low:high])
        reach[low:high] = part
        own = np.where(end[low:high] == part, np.arange(low, high), low)
        holder[low:high] = np.maximum.accumulate(own)
    return reach, holder
