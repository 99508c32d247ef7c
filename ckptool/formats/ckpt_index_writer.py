"""An Index with its payloads -> the bytes of a ``ckpt.index``; ckpt_index.py has the layout."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard

from ckptool.formats.crc import crc32
from ckptool.formats.packed_columns import pack_column
from ckptool.formats.payloads import BLOCK_BYTES, Payloads
from ckptool.manifest import ObjectFacts
from ckptool.model import Chunks, Entry, Index, Ints, TensorEntry

__all__ = ["COLUMNS", "MAGIC", "PER_CHUNK", "SCHEMA", "write_index"]

MAGIC = b"CKPTIDX1"
SCHEMA = "ckptool.index/1"

PER_CHUNK = (
    *("file", "starts", "lengths", "transform"),
    *("payload_offsets", "payload_num_bytes", "payload_crc32s", "block_counts"),
)
COLUMNS = ("offsets", "sizes", *PER_CHUNK, "block_crc32s")


def write_index(
    index: Index, *, payloads: Mapping[str, Payloads], metadata: bytes | ObjectFacts
) -> bytes:
    """The bytes of a ``ckpt.index``.

    ``payloads`` may lack tensors, whose payloads are then not known; ``metadata`` is the
    ``.metadata`` that it goes with, its bytes or their size and CRC-32.
    """
    facts = metadata
    if not isinstance(facts, ObjectFacts):
        facts = ObjectFacts(len(facts), crc32(facts))
    tables = _Tables()
    entries = [tables.entry_json(key, entry) for key, entry in index.entries.items()]
    columns = [pack_column(*column) for column in tables.columns(index, payloads).items()]
    header = {
        "schema": SCHEMA,
        "form": index.form,
        "version": index.version,
        "notes": list(index.notes),
        "metadata": {"num_bytes": facts.num_bytes, "crc32": facts.crc32},
        "block_bytes": BLOCK_BYTES,
        "files": list(tables.files),
        "transforms": [list(names) for names in tables.transforms],
        "entries": entries,
        "columns": [column.as_json() for column, _ in columns],
    }
    packed = zstandard.ZstdCompressor(level=3).compress(json.dumps(header).encode())
    parts = [MAGIC, struct.pack("<I", len(packed)), packed, *(data for _, data in columns)]
    body = b"".join(parts)
    return body + struct.pack("<I", crc32(body))


class _Tables:
    """The numbers of files and transforms, across all entries."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.transforms: dict[tuple[str, ...], int] = {(): 0}

    def file(self, name: str) -> int:
        return self.files.setdefault(name, len(self.files))

    def transform(self, names: tuple[str, ...]) -> int:
        return self.transforms.setdefault(names, len(self.transforms))

    def entry_json(self, key: str, entry: Entry) -> dict[str, Any]:
        path = None if entry.path is None else list(entry.path)
        if isinstance(entry, TensorEntry):
            shape, num_chunks = list(entry.shape), len(entry.chunks)
            tensor = {"dtype": entry.dtype.name, "shape": shape, "chunks": num_chunks}
            return {"key": key, "path": path, **tensor}
        item = entry.item
        if item is None:
            return {"key": key, "path": path, "item": None}
        place = [self.file(item.file), item.offset, item.length, self.transform(item.transforms)]
        return {"key": key, "path": path, "item": place}

    def columns(self, index: Index, payloads: Mapping[str, Payloads]) -> dict[str, Ints]:
        parts: dict[str, list[Ints]] = {name: [] for name in COLUMNS}
        for key, entry in index.entries.items():
            if isinstance(entry, TensorEntry):
                chunks = entry.chunks
                known = payloads.get(key) or Payloads.unknown(len(chunks))
                for name, column in self.tensor_columns(chunks, known).items():
                    parts[name].append(column)
        empty = np.zeros(0, np.int64)
        return {name: np.concatenate([empty, *columns]) for name, columns in parts.items()}

    def tensor_columns(self, chunks: Chunks, payloads: Payloads) -> dict[str, Ints]:
        if len(payloads) != len(chunks):
            raise ValueError(f"{len(payloads)} payloads for {len(chunks)} chunks")
        files = np.array([*map(self.file, chunks.files), -1], np.int64)
        wrapped = np.array(list(map(self.transform, chunks.transforms)), np.int64)
        plain = np.full(len(chunks), self.transform(()))
        return {
            "offsets": chunks.offsets.T.reshape(-1),
            "sizes": chunks.sizes.T.reshape(-1),
            "file": files[chunks.file],
            "starts": chunks.starts,
            "lengths": chunks.lengths,
            "transform": plain if chunks.transform is None else wrapped[chunks.transform],
            "payload_offsets": payloads.offsets,
            "payload_num_bytes": payloads.num_bytes,
            "payload_crc32s": payloads.crc32s,
            "block_counts": payloads.block_counts,
            "block_crc32s": payloads.own_block_crc32s,
        }
