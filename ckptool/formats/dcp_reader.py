"""The bytes of a DCP ``.metadata`` -> an Index, with chunks in columns.

The pickle runs on stand-ins (dcp_objects.py); what comes out is checked field by field, since
whoever can write a bucket can write this file: every number is a size, every file name stays
inside the checkpoint, every chunk has as many dims as its tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckptool.dtypes import DType
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.dcp_fast import FastMetadataMachine
from ckptool.formats.dcp_objects import (
    ChunkBox,
    Record,
    StorageInfo,
    StorageKey,
    UnknownDtype,
)
from ckptool.formats.pickle_machine import kind_of
from ckptool.layout import METADATA_NAME, is_safe_relative_path
from ckptool.model import Chunks, Entry, Index, Ints, Item, Path, TensorEntry, ValueEntry

__all__ = ["read_metadata"]

_INT64_END = 2**63
_MAX_DIMS = 64

# a tensor's stored chunks by their offsets; a value's only one by None
Places = dict[Any, list[tuple[Any, StorageInfo]]]


def read_metadata(data: bytes, *, name: str = METADATA_NAME) -> Index:
    """The Index that the bytes of a ``.metadata`` (or ``__R.metadata``) give.

    Raises DamagedError for anything truncated, inconsistent or hostile, and UnsupportedError
    for a class or dtype that we do not know; ``name`` is the file's, for messages.
    """
    with _collector_off():
        root = FastMetadataMachine(bytes(data), what=name).run()
        return _Reader(name).index(root)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Millions of new objects, none of them garbage: the collector would only slow them down."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Reader:
    """Turns stand-ins into entries; keeps the tables that all tensors share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files: dict[str, int] = {}
        self.transforms: dict[tuple[str, ...], int] = {(): 0}
        self.notes: list[str] = []

    def index(self, root: Any) -> Index:
        if type(root) is not Record or root.name != "Metadata":
            raise self.damaged(f"it holds {kind_of(root)}, not a Metadata")
        listed = root.fields.get("state_dict_metadata")
        if not isinstance(listed, dict):
            raise self.damaged("it has no state_dict_metadata")
        stored = root.fields.get("storage_data")
        places = self.places(stored)
        paths = root.fields.get("planner_data")
        entries: dict[str, Entry] = {}
        for key, said in listed.items():
            if type(key) is not str:
                raise self.damaged(f"a key of state_dict_metadata is {kind_of(key)}, not a str")
            path = _path(paths.get(key)) if isinstance(paths, dict) else None
            entries[key] = self.entry(key, said, places.pop(key, {}), path)
        self.note_unlisted(places)
        version = root.fields.get("version")
        self.share_tables(entries)
        return Index(
            entries=entries,
            version=version if type(version) is str else None,
            notes=tuple(self.notes),
        )

    def places(self, stored: Any) -> dict[str, Places]:
        """storage_data by key and offsets; empties it on the way."""
        places: dict[str, Places] = {}
        sound: set[tuple[int, ...]] = set()
        if stored is None:
            return places
        if not isinstance(stored, dict):
            raise self.damaged(f"its storage_data is {kind_of(stored)}, not a dict")
        while stored:
            key, info = stored.popitem()
            if type(key) is not StorageKey or type(key.fqn) is not str:
                raise self.damaged(f"a key of storage_data is {kind_of(key)}")
            if type(info) is not StorageInfo:
                raise self.damaged(f"storage_data holds {kind_of(info)} for {key.fqn!r}")
            offset, by_offset = key.offset, places.get(key.fqn)
            if by_offset is None:
                by_offset = places[key.fqn] = {}
            try:
                is_sound = offset is None or offset in sound
            except TypeError:  # something in it can be no key
                is_sound = False
            if not is_sound:
                sound.add(self.check_dims(offset, key.fqn, "an offset in storage_data"))
            if offset in by_offset:
                by_offset[offset].append((key.index, info))
            else:
                by_offset[offset] = [(key.index, info)]
        return places

    def entry(self, key: str, said: Any, places: Places, path: Path | None) -> Entry:
        kind = said.name if type(said) is Record else kind_of(said)
        if kind == "BytesStorageMetadata":
            found = places.pop(None, None)
            item = None if found is None else self.item(key, found[-1][1])
            entry: Entry = ValueEntry(key, item, path)
        elif kind == "TensorStorageMetadata":
            entry = self.tensor(key, said.fields, places, path)
        else:
            raise self.damaged(f"entry {key!r} is {kind}, neither a tensor nor a value")
        if places:
            self.note_unlisted({key: places})
        return entry

    def tensor(
        self, key: str, fields: dict[Any, Any], places: Places, path: Path | None
    ) -> TensorEntry:
        dtype = self.dtype(key, fields.get("properties"))
        shape = self.check_dims(fields.get("size"), key, "its size")
        boxes = fields.get("chunks")
        if type(boxes) is not list:
            raise self.damaged(f"tensor {key!r} has {kind_of(boxes)} for its chunks")
        for box in boxes:
            if type(box) is not ChunkBox:
                raise self.damaged(f"tensor {key!r} has {kind_of(box)} among its chunks")
        offsets = self.columns([box.offsets for box in boxes], key, len(shape), "offsets")
        sizes = self.columns([box.sizes for box in boxes], key, len(shape), "sizes")
        chunks = self.chunks(key, boxes, offsets, sizes, places)
        return TensorEntry(key, dtype, shape, chunks, path)

    def dtype(self, key: str, properties: Any) -> DType:
        fields = properties.fields if type(properties) is Record else {}
        state = fields.get("")
        dtype = state[0] if type(state) is tuple and state else fields.get("dtype")
        if type(dtype) is UnknownDtype:
            raise UnsupportedError(
                f"tensor {key!r} has the dtype torch.{dtype.name}, which we do not know",
                hint="was it written by a newer torch? pip install -U ckptool",
                entry=key,
                dtype=dtype.name,
            )
        if type(dtype) is not DType:
            raise self.damaged(f"tensor {key!r} has no dtype")
        return dtype

    def columns(self, rows: list[Any], key: str, num_dims: int, what: str) -> Ints:
        """int64 ``[n, dims]`` of the chunks' ``what``, each a size."""
        flat: list[Any] = []
        for row in rows:
            if type(row) is not tuple or len(row) != num_dims:
                dims = len(row) if type(row) is tuple else kind_of(row)
                raise self.damaged(
                    f"a chunk of tensor {key!r} has {dims} dims in its {what}, its shape {num_dims}"
                )
            flat.extend(row)
        if not set(map(type, flat)) <= {int}:
            raise self.damaged(f"a chunk of tensor {key!r} has {what} that are no integers")
        try:
            column = np.array(flat, np.int64).reshape(len(rows), num_dims)
        except OverflowError:
            column = np.array([[-1]])
        if column.size and int(column.min()) < 0:
            raise self.damaged(f"a chunk of tensor {key!r} has {what} that are no sizes")
        return column

    def chunks(
        self, key: str, boxes: Sequence[ChunkBox], offsets: Ints, sizes: Ints, places: Places
    ) -> Chunks:
        infos = _match(boxes, places)
        items = [None if info is None else self.place(key, info) for info in infos]
        table = np.array([(-1, 0, 0, 0) if i is None else i for i in items], np.int64)
        file, starts, lengths, transform = table.reshape(len(boxes), 4).T.copy()
        return Chunks(
            offsets=offsets,
            sizes=sizes,
            file=file,
            starts=starts,
            lengths=lengths,
            files=(),
            transform=transform if transform.any() else None,
        )

    def place(self, key: str, info: StorageInfo) -> tuple[int, int, int, int]:
        """File number, offset, length and transform number of a storage info."""
        path, offset, length = info.relative_path, info.offset, info.length
        if not (type(offset) is type(length) is int and offset >= 0 and length >= 0):
            raise self.damaged(f"entry {key!r} has an offset or a length that is no size")
        if offset + length >= _INT64_END:
            raise self.damaged(f"entry {key!r} ends beyond 64 bits")
        file = self.files.get(path) if type(path) is str else None
        if file is None:
            file = self.files[self.check_path(key, path)] = len(self.files)
        wrapped = info.transform_descriptors
        if not wrapped:
            return file, offset, length, 0
        if type(wrapped) not in (list, tuple) or not set(map(type, wrapped)) <= {str}:
            raise self.damaged(f"entry {key!r} has transforms that are no names")
        return (
            file,
            offset,
            length,
            self.transforms.setdefault(tuple(wrapped), len(self.transforms)),
        )

    def item(self, key: str, info: StorageInfo) -> Item:
        _, offset, length, transform = self.place(key, info)
        return Item(info.relative_path, offset, length, list(self.transforms)[transform])

    def check_path(self, key: str, path: Any) -> str:
        if type(path) is not str:
            raise self.damaged(f"entry {key!r} has {kind_of(path)} for its file")
        if not is_safe_relative_path(path):
            raise DamagedError(
                f"{self.name} places {key!r} in {path[:200]!r}, outside the checkpoint",
                hint="it may be hostile: ask where the checkpoint came from",
                entry=key,
                file=path[:200],
            )
        return path

    def check_dims(self, dims: Any, key: str, what: str) -> tuple[int, ...]:
        if type(dims) is not tuple or len(dims) > _MAX_DIMS:
            raise self.damaged(f"entry {key!r} has {kind_of(dims)} for {what}")
        for dim in dims:
            if type(dim) is not int or not 0 <= dim < _INT64_END:
                raise self.damaged(f"entry {key!r} has a dim that is no size in {what}")
        return dims

    def note_unlisted(self, places: dict[str, Places]) -> None:
        for key, by_offset in places.items():
            num_chunks = sum(map(len, by_offset.values()))
            what = "a value" if list(by_offset) == [None] else f"{num_chunks} chunks"
            self.notes.append(f"storage_data places {what} of {key!r} that the index does not list")

    def share_tables(self, entries: dict[str, Entry]) -> None:
        """One tuple of files and one of transforms for all tensors, now that they are whole."""
        files, transforms = tuple(self.files), tuple(self.transforms)
        for entry in entries.values():
            if isinstance(entry, TensorEntry):
                entry.chunks.files, entry.chunks.transforms = files, transforms

    def damaged(self, why: str) -> CkptoolError:
        return DamagedError(f"{self.name} is damaged: {why}")


def _match(boxes: Sequence[ChunkBox], places: Places) -> list[StorageInfo | None]:
    """The storage info of each chunk; takes what it finds out of ``places``.

    Chunks are found by their offsets. Where several start at the same place, those with
    elements come first: an empty chunk is often recorded at another's offsets.
    """
    infos = [found[0][1] if (found := places.get(box.offsets)) else None for box in boxes]
    shared = len({box.offsets for box in boxes}) < len(boxes)
    if shared or any(len(found) > 1 for found in places.values()):
        infos = _match_shared(boxes, places)
    for box in boxes:
        places.pop(box.offsets, None)
    return infos


def _match_shared(boxes: Sequence[ChunkBox], places: Places) -> list[StorageInfo | None]:
    rows_at: dict[Any, list[int]] = {}
    for row, box in enumerate(boxes):
        rows_at.setdefault(box.offsets, []).append(row)
    infos: list[StorageInfo | None] = [None] * len(boxes)
    for offsets, rows in rows_at.items():
        filled = [row for row in rows if 0 not in boxes[row].sizes] or rows
        found = places.get(offsets, [])
        hinted = {hint: info for hint, info in found if hint in rows} if len(found) > 1 else {}
        for hint, info in hinted.items():
            infos[hint] = info
        if hinted or not found:
            continue
        hint, info = found[0]
        first = boxes[hint if hint in filled else filled[0]].sizes
        for row in filled:
            if boxes[row].sizes == first:
                infos[row] = info
    return infos


def _path(said: Any) -> Path | None:
    if type(said) is not tuple or not set(map(type, said)) <= {str, int}:
        return None
    return said
