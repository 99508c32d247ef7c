"""The indexes of single ranks (``__R.metadata``) -> one Index of the whole checkpoint.

``use_collectives=False`` writes a metadata per rank with that rank's chunks only, and stores
what is replicated once per rank; a chunk or value that several ranks stored is kept once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckptool.errors import DamagedError
from ckptool.model import Chunks, Entry, Index, Ints, TensorEntry, ValueEntry

__all__ = ["merge_rank_local"]

_Name = TypeVar("_Name")


def merge_rank_local(parts: Sequence[Index]) -> Index:
    """One Index of the parts, given in the order of their ranks; of replicas the first stays.

    Raises DamagedError where parts disagree on an entry's kind, dtype or shape.
    """
    found: dict[str, list[Entry]] = {}
    for part in parts:
        for key, entry in part.entries.items():
            found.setdefault(key, []).append(entry)
    merged: dict[str, Entry] = {}
    num_shared_values = 0
    for key, entries in found.items():
        tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
        values = [entry for entry in entries if isinstance(entry, ValueEntry)]
        if tensors and values:
            raise DamagedError(
                f"entry {key!r} is a tensor for some ranks and a value for others", entry=key
            )
        merged[key] = _tensor(key, tensors) if tensors else _value(values)
        num_shared_values += len(values) > 1
    notes = [note for part in parts for note in part.notes]
    if num_shared_values:
        notes.append(
            f"{num_shared_values} values are stored by more than one rank; "
            "the lowest rank's are taken"
        )
    return Index(
        entries=merged,
        form="dcp-rank-local",
        version=next((part.version for part in parts if part.version is not None), None),
        notes=tuple(notes),
    )


def _value(entries: Sequence[ValueEntry]) -> ValueEntry:
    return next((entry for entry in entries if entry.item is not None), entries[0])


def _tensor(key: str, entries: Sequence[TensorEntry]) -> TensorEntry:
    first = entries[0]
    for entry in entries[1:]:
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise DamagedError(
                f"ranks disagree on tensor {key!r}: {first.dtype} {list(first.shape)} "
                f"and {entry.dtype} {list(entry.shape)}",
                entry=key,
            )
    path = next((entry.path for entry in entries if entry.path is not None), None)
    chunks = _join([entry.chunks for entry in entries])
    return TensorEntry(key, first.dtype, first.shape, chunks, path)


def _join(parts: Sequence[Chunks]) -> Chunks:
    """All chunks in order, each box once: the first that is stored, or the first."""
    files = _numbered(part.files for part in parts)
    transforms = _numbered(part.transforms for part in parts)
    plain = transforms.setdefault((), len(transforms))
    file = np.concatenate([_renumber(part.file, part.files, files) for part in parts])
    transform = np.concatenate(
        [
            np.full(len(part), plain)
            if part.transform is None
            else _renumber(part.transform, part.transforms, transforms)
            for part in parts
        ]
    )
    offsets = np.concatenate([part.offsets for part in parts])
    sizes = np.concatenate([part.sizes for part in parts])
    rows = _first_of_each(offsets, sizes, stored=file >= 0)
    return Chunks(
        offsets=offsets[rows],
        sizes=sizes[rows],
        file=file[rows],
        starts=np.concatenate([part.starts for part in parts])[rows],
        lengths=np.concatenate([part.lengths for part in parts])[rows],
        files=tuple(files),
        transform=transform[rows],
        transforms=tuple(transforms),
    )


def _numbered(tables: Iterable[Iterable[_Name]]) -> dict[_Name, int]:
    numbers: dict[_Name, int] = {}
    for table in tables:
        for name in table:
            numbers.setdefault(name, len(numbers))
    return numbers


def _renumber(column: Ints, table: Sequence[_Name], numbers: dict[_Name, int]) -> Ints:
    new = np.array([*(numbers[name] for name in table), -1], np.int64)
    return new[column]


def _first_of_each(offsets: Ints, sizes: Ints, *, stored: npt.NDArray[np.bool_]) -> Ints:
    boxes = np.concatenate([offsets, sizes], axis=1)
    order = np.lexsort((np.arange(len(boxes)), ~stored))
    if not boxes.shape[1]:
        return order[:1]
    _, first = np.unique(boxes[order], axis=0, return_index=True)
    return np.sort(order[first])
