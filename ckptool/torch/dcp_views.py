"""torch's ``Metadata`` <-> our Index: what torch's planners see, and what they decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.dtypes import dtype_named
from ckptool.errors import StorageError
from ckptool.formats.ckpt_index import Payloads
from ckptool.model import Box, Chunk, Chunks, Entry, Index, Item, TensorEntry, ValueEntry
from ckptool.torch.local_state import torch_dtype
from ckptool.torch.shard_items import ItemResult

__all__ = ["chunk_numbers", "index_of", "metadata_of"]


def chunk_numbers(index: Index, key: str) -> dict[tuple[int, ...], int]:
    """Offsets of a chunk -> its number."""
    entry = index.entries[key]
    assert isinstance(entry, TensorEntry)
    offsets = entry.chunks.offsets.tolist()
    sizes = entry.chunks.sizes.prod(axis=1).tolist()
    order = sorted(range(len(offsets)), key=lambda row: bool(sizes[row]))
    return {tuple(offsets[row]): row for row in order}


def index_of(
    metadata: Metadata, items: Mapping[MetadataIndex, tuple[Item, ItemResult]]
) -> tuple[Index, dict[str, Payloads]]:
    paths = metadata.planner_data or {}
    entries: dict[str, Entry] = {}
    payloads: dict[str, Payloads] = {}
    for key, row in metadata.state_dict_metadata.items():
        path = tuple(paths[key]) if key in paths else None
        if isinstance(row, BytesStorageMetadata):
            value, _ = items.get(MetadataIndex(key), (None, None))
            entries[key] = ValueEntry(key, value, path)
            continue
        dtype = dtype_named(str(row.properties.dtype).removeprefix("torch."))
        chunks, facts = [], []
        for chunk in row.chunks:
            found = items.get(MetadataIndex(key, chunk.offsets))
            if found is None:
                raise StorageError(
                    f"{key}: no rank stored the chunk at {tuple(chunk.offsets)}",
                    hint="nothing was committed; every rank must save all that it holds",
                )
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            chunks.append(Chunk(box, found[0]))
            facts.append(found[1].described(box.num_elements * dtype.itemsize))
        payloads[key] = Payloads.of(facts)
        shape = tuple(row.size)
        columns = Chunks.of(chunks, num_dims=len(shape))
        entries[key] = TensorEntry(key, dtype, shape, columns, path)
    return Index(entries), payloads


def metadata_of(index: Index, *, checkpoint_id: str) -> Metadata:
    """torch's own view of an index, for torch's planners."""
    listed: dict[str, Any] = {}
    stored: dict[MetadataIndex, Item] = {}
    paths: dict[str, Any] = {}
    for key, entry in index.entries.items():
        if entry.path is not None:
            paths[key] = entry.path
        if isinstance(entry, ValueEntry):
            listed[key] = BytesStorageMetadata()
            if entry.item is not None:
                stored[MetadataIndex(key)] = entry.item
            continue
        chunks = []
        for chunk in entry.chunks:
            offsets = torch.Size(chunk.box.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.box.sizes)))
            if chunk.item is not None:
                stored[MetadataIndex(key, offsets)] = chunk.item
        properties = TensorProperties(dtype=torch_dtype(entry.dtype))
        listed[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return Metadata(
        listed,
        planner_data=paths or None,
        storage_data=stored,
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id),
    )
