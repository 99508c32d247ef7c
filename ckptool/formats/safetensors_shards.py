"""Headers of safetensors files that belong together -> one index.

torch's HuggingFaceStorageWriter (and DCP's safetensors serialization) writes each rank's
chunks as a safetensors file whose ``__metadata__`` says at which offsets they stand in their
tensors; a plain Hugging Face folder has whole tensors. The items of such an index are bare
payloads: no zip around them, no CRC-32 beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.dtypes import DType
from ckptool.errors import DamagedError
from ckptool.formats.safetensors_file import SafetensorsHeader
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry

__all__ = ["PAYLOAD", "SHARDING_INFO", "read_sharded_headers"]

PAYLOAD = "payload"
SHARDING_INFO = "DCP_SHARDING_INFO"


def read_sharded_headers(files: Mapping[str, SafetensorsHeader]) -> Index:
    """The index of all tensors in these files, by file name.

    Headers do not tell the shape of a sharded tensor: it is what its chunks reach to. ``form``
    is "hf-distributed" where a file says how it was sharded, otherwise "hf". Raises
    DamagedError, naming tensor and files, where headers contradict each other.
    """
    found: dict[str, list[Chunk]] = {}
    dtypes: dict[str, tuple[DType, int, str]] = {}
    for file, header in files.items():
        for name, dtype, chunk in _chunks(file, header):
            kind = (dtype, len(chunk.box.sizes))
            *known, first = dtypes.setdefault(name, (*kind, file))
            if kind != tuple(known):
                raise DamagedError(
                    f"tensor {name!r} has another dtype or number of dims in {file} than in "
                    f"{first}",
                    entry=name,
                    file=file,
                )
            if name in found and SHARDING_INFO not in header.metadata:
                raise DamagedError(
                    f"tensor {name!r} stands in {first} and in {file}", entry=name, file=file
                )
            found.setdefault(name, []).append(chunk)
    entries = {
        name: _entry(name, dtypes[name][0], chunks) for name, chunks in sorted(found.items())
    }
    sharded = any(SHARDING_INFO in header.metadata for header in files.values())
    versions = {header.metadata.get("DCP_VERSION") for header in files.values()}
    return Index(
        entries,
        form="hf-distributed" if sharded else "hf",
        version=versions.pop() if len(versions) == 1 else None,
        notes=(
            ("shapes are what the shards add up to; their headers do not say them",)
            if sharded
            else ()
        ),
    )


def _chunks(file: str, header: SafetensorsHeader) -> Iterator[tuple[str, DType, Chunk]]:
    """Name, dtype and chunk of each tensor in one file."""
    text = header.metadata.get(SHARDING_INFO)
    info = None if text is None else _parse_info(file, text)
    for name, tensor in header.tensors.items():
        sizes = tensor.shape
        offsets = (0,) * len(sizes) if info is None else _saved_offsets(file, name, info, sizes)
        item = Item(file, tensor.offset, tensor.num_bytes, (PAYLOAD,))
        yield name, tensor.dtype, Chunk(Box(offsets, sizes), item)


def _parse_info(file: str, text: str) -> dict[str, Any]:
    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{SHARDING_INFO} of {file} is no JSON: {error}", file=file) from error
    if not isinstance(info, dict):
        raise DamagedError(f"{SHARDING_INFO} of {file} is no JSON object", file=file)
    return info


def _saved_offsets(
    file: str, name: str, info: dict[str, Any], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    row = info.get(name)
    offsets = row.get("saved_offsets") if isinstance(row, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != len(sizes)
        or not all(
            type(n) is int and 0 <= n < (1 << 63) - size
            for n, size in zip(offsets, sizes, strict=True)
        )
    ):
        raise DamagedError(
            f"{SHARDING_INFO} of {file} gives tensor {name!r} of shape {sizes} the offsets "
            f"{offsets!r:.80}",
            entry=name,
            file=file,
        )
    return tuple(offsets)


def _entry(name: str, dtype: DType, chunks: list[Chunk]) -> TensorEntry:
    num_dims = len(chunks[0].box.sizes)
    shape = tuple(max(chunk.box.ends[dim] for chunk in chunks) for dim in range(num_dims))
    chunks.sort(key=lambda chunk: chunk.box.offsets)
    return TensorEntry(name, dtype, shape, Chunks.of(chunks, num_dims=num_dims))
