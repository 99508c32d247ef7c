"""The bytes of a ``ckpt.index`` -> an Index with its payloads; ckpt_index.py has the layout.

Whoever can write a bucket can write this file, with a CRC-32 that fits: every number is checked
before anything is made of it, and what it declares is bounded before it is unpacked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from ckptool.dtypes import dtype_named
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.ckpt_index_writer import COLUMNS, MAGIC, PER_CHUNK, SCHEMA
from ckptool.formats.crc import crc32
from ckptool.formats.packed_columns import PackedColumn, unpack_column
from ckptool.formats.payloads import BLOCK_BYTES, Payloads
from ckptool.layout import is_safe_relative_path
from ckptool.manifest import ObjectFacts
from ckptool.model import Chunks, Entry, Index, Ints, Item, Path, TensorEntry, ValueEntry

__all__ = ["IndexFile", "read_index"]

_MAX_HEADER_BYTES = 1 << 30
_MAX_COLUMN_BYTES = 1 << 32  # of int64, all columns together: some 40 million chunks
_MAX_DIMS = 64
_PYTHON_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    zstandard.ZstdError,
)


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A ``ckpt.index``: the Index, each tensor's payloads, and the ``.metadata`` it goes with."""

    index: Index
    payloads: Mapping[str, Payloads]
    metadata: ObjectFacts

    def agrees_with(self, metadata: bytes) -> bool:
        """Whether it was written beside these bytes of a ``.metadata``."""
        return self.metadata == ObjectFacts(len(metadata), crc32(metadata))


def read_index(data: bytes) -> IndexFile:
    """What the bytes of a ``ckpt.index`` hold; its Index has the form ``ckpt-index``.

    Raises DamagedError for anything cut, changed or inconsistent, UnsupportedError for a later
    version of the format.
    """
    if len(data) >= 8 and data[:7] == MAGIC[:7] and data[:8] != MAGIC:
        raise UnsupportedError(
            f"ckpt.index has version {data[7:8]!r}; this version reads {MAGIC[7:]!r}",
            hint="pip install -U ckptool",
        )
    if len(data) < 16 or data[:8] != MAGIC:
        raise DamagedError("ckpt.index does not begin as one")
    (stored,) = struct.unpack("<I", data[-4:])
    if crc32(memoryview(data)[:-4]) != stored:
        raise DamagedError("ckpt.index is damaged: its CRC-32 is another")
    try:
        return _read(memoryview(data)[8:-4])
    except _PYTHON_ERRORS as error:
        raise DamagedError(f"ckpt.index is damaged: {error}"[:300]) from error


def _read(body: memoryview) -> IndexFile:
    (header_bytes,) = struct.unpack("<I", body[:4])
    header, columns_at = _header(body[4 : 4 + header_bytes]), 4 + header_bytes
    columns = _columns(header["columns"], body[columns_at:])
    files, transforms = _tables(header)
    tensors = [said for said in header["entries"] if "item" not in said]
    _check_columns(columns, tensors, num_files=len(files), num_transforms=len(transforms))
    cutter = _Cutter(columns, files, transforms)
    entries: dict[str, Entry] = {}
    payloads: dict[str, Payloads] = {}
    for said in header["entries"]:
        key, path = _text(said["key"]), _path(said["path"])
        if "item" in said:
            entries[key] = ValueEntry(key, _item(said["item"], files, transforms), path)
        else:
            shape = _shape(said["shape"])
            chunks, payloads[key] = cutter.next_tensor(said["chunks"], len(shape))
            entries[key] = TensorEntry(key, dtype_named(said["dtype"]), shape, chunks, path)
    if len(entries) != len(header["entries"]):
        raise DamagedError("ckpt.index lists a key twice")
    said_of = header["metadata"]
    return IndexFile(
        index=Index(
            entries=entries,
            form="ckpt-index",
            version=None if header["version"] is None else _text(header["version"]),
            notes=tuple(map(_text, header["notes"])),
        ),
        payloads=payloads,
        metadata=ObjectFacts(_size(said_of["num_bytes"]), _crc32(said_of["crc32"])),
    )


def _header(packed: memoryview) -> dict[str, Any]:
    size = zstandard.frame_content_size(packed)
    if not 0 <= size <= _MAX_HEADER_BYTES:
        raise DamagedError("ckpt.index has a header without a size, or one beyond all bounds")
    header = json.loads(zstandard.ZstdDecompressor().decompress(packed))
    if header["schema"] != SCHEMA or header["block_bytes"] != BLOCK_BYTES:
        raise UnsupportedError(
            f"ckpt.index has another schema or block size; this version reads {SCHEMA}",
            hint="pip install -U ckptool",
        )
    return dict(header)


def _columns(said: Sequence[Mapping[str, Any]], data: memoryview) -> dict[str, Ints]:
    packed = [PackedColumn.from_json(column) for column in said]
    if 8 * sum(column.num_rows for column in packed) > _MAX_COLUMN_BYTES:
        raise DamagedError("ckpt.index declares columns beyond all bounds")
    if sum(column.num_bytes for column in packed) != len(data):
        raise DamagedError("ckpt.index has columns of other sizes than its header says")
    columns: dict[str, Ints] = {}
    start = 0
    for column in packed:
        end = start + column.num_bytes
        columns[column.name] = unpack_column(column, data[start:end])
        start = end
    return columns


def _tables(header: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    files = tuple(map(_text, header["files"]))
    for file in files:
        if not is_safe_relative_path(file):
            raise DamagedError(f"ckpt.index names a file outside the checkpoint: {file[:200]!r}")
    return files, tuple(tuple(map(_text, names)) for names in header["transforms"])


def _check_columns(
    columns: Mapping[str, Ints],
    tensors: Sequence[Mapping[str, Any]],
    *,
    num_files: int,
    num_transforms: int,
) -> None:
    counts = [_size(said["chunks"]) for said in tensors]
    dims = [len(_shape(said["shape"])) for said in tensors]
    num_rows = dict.fromkeys(PER_CHUNK, sum(counts))
    num_rows |= dict.fromkeys(
        ("offsets", "sizes"), sum(n * d for n, d in zip(counts, dims, strict=True))
    )
    num_rows["block_crc32s"] = int(columns["block_counts"].sum())
    lowest = dict.fromkeys(COLUMNS, 0)
    lowest |= dict.fromkeys(("file", "payload_offsets", "payload_num_bytes", "payload_crc32s"), -1)
    ends = {"file": num_files, "transform": num_transforms, "payload_crc32s": 2**32}
    ends["block_crc32s"] = 2**32
    for name in COLUMNS:
        column = columns[name]
        if len(column) != num_rows[name]:
            raise DamagedError(f"column {name!r} of ckpt.index has {len(column)} rows")
        if not len(column):
            continue
        if int(column.min()) < lowest[name] or int(column.max()) >= ends.get(name, 2**63):
            raise DamagedError(f"column {name!r} of ckpt.index has a number out of range")
    if (columns["starts"] > 2**62).any() or (columns["lengths"] > 2**62).any():
        raise DamagedError("ckpt.index places an item beyond 64 bits")
    blocks = columns["block_counts"]
    expected = -(-columns["payload_num_bytes"] // BLOCK_BYTES)
    if ((blocks != 0) & (blocks != expected)).any():
        raise DamagedError("ckpt.index has more or fewer block CRCs than blocks")


class _Cutter:
    """Cuts the columns of all tensors into those of each, in order."""

    def __init__(
        self,
        columns: Mapping[str, Ints],
        files: tuple[str, ...],
        transforms: tuple[tuple[str, ...], ...],
    ) -> None:
        self.columns = columns
        self.files = files
        self.transforms = transforms
        self.is_wrapped = bool(columns["transform"].any()) or transforms[:1] != ((),)
        self.block_starts = np.concatenate([[0], np.cumsum(columns["block_counts"])])
        self.row = 0
        self.box_row = 0

    def next_tensor(self, num_chunks: int, num_dims: int) -> tuple[Chunks, Payloads]:
        rows = slice(self.row, self.row + num_chunks)
        box_rows = slice(self.box_row, self.box_row + num_chunks * num_dims)
        self.row, self.box_row = rows.stop, box_rows.stop
        own = {name: self.columns[name][rows] for name in PER_CHUNK}
        offsets, sizes = (
            np.ascontiguousarray(self.columns[name][box_rows].reshape(num_dims, num_chunks).T)
            for name in ("offsets", "sizes")
        )
        chunks = Chunks(
            offsets=offsets,
            sizes=sizes,
            file=own["file"],
            starts=own["starts"],
            lengths=own["lengths"],
            files=self.files,
            transform=own["transform"] if self.is_wrapped else None,
            transforms=self.transforms,
        )
        payloads = Payloads(
            offsets=own["payload_offsets"],
            num_bytes=own["payload_num_bytes"],
            crc32s=own["payload_crc32s"],
            block_starts=self.block_starts[rows.start : rows.stop + 1],
            block_crc32s=self.columns["block_crc32s"],
        )
        return chunks, payloads


def _item(said: Any, files: Sequence[str], transforms: Sequence[tuple[str, ...]]) -> Item | None:
    if said is None:
        return None
    file, offset, length, transform = map(_size, said)
    return Item(files[file], offset, length, transforms[transform])


def _text(said: Any) -> str:
    if type(said) is not str:
        raise DamagedError("ckpt.index has a name that is no text")
    return said


def _size(said: Any) -> int:
    if type(said) is not int or not 0 <= said < 2**62:
        raise DamagedError("ckpt.index has a size that is none")
    return said


def _crc32(said: Any) -> int | None:
    if said is not None and _size(said) >= 2**32:
        raise DamagedError("ckpt.index has a CRC-32 that is none")
    return None if said is None else int(said)


def _shape(said: Any) -> tuple[int, ...]:
    if type(said) is not list or len(said) > _MAX_DIMS:
        raise DamagedError("ckpt.index has a shape that is none")
    return tuple(map(_size, said))


def _path(said: Any) -> Path | None:
    if said is None:
        return None
    if type(said) is not list or not set(map(type, said)) <= {str, int}:
        raise DamagedError("ckpt.index has a path that is none")
    return tuple(said)
