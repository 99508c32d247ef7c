"""Arrays and boxes -> a checkpoint folder, written without torch, for tests of every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ckptool.dtypes import DType, dtype_named, numpy_dtype
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import encode_item, encode_value_item, parse_tensor_item
from ckptool.formats.dcp_metadata import write_metadata
from ckptool.formats.plain_values import TensorRef, encode_value
from ckptool.formats.tensor_pickle import contiguous_strides
from ckptool.layout import METADATA_NAME, shard_file_name
from ckptool.model import Box, Chunk, Chunks, Entry, Index, Item, TensorEntry, ValueEntry

__all__ = [
    "Saved",
    "place_of",
    "random_array",
    "read_safetensors",
    "rows_of",
    "write_checkpoint",
]


@dataclass(frozen=True)
class Saved:
    """One tensor to save: its elements and the boxes of its chunks, chunk k by rank k.

    ``stored``: ``plain``, ``transposed`` (column-major payloads), ``view`` (payloads inside a
    larger storage) or ``zstd``.
    """

    array: npt.NDArray[Any]
    boxes: Sequence[Box]
    dtype: str
    path: tuple[str | int, ...] | None = None
    stored: str = "plain"


def rows_of(array: npt.NDArray[Any], dtype: str, *rows: int) -> Saved:
    """A tensor cut on dim 0 into chunks of so many rows."""
    boxes, start = [], 0
    for count in rows:
        boxes.append(Box((start,) + (0,) * (array.ndim - 1), (count, *array.shape[1:])))
        start += count
    return Saved(array, boxes, dtype)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Saved],
    *,
    values: Mapping[str, Any] | None = None,
    num_files: int = 4,
) -> Index:
    """Write shard files and ``.metadata``; chunk k of a tensor goes to file k modulo the number."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [bytearray() for _ in range(num_files)]
    entries: dict[str, Entry] = {}
    for key, saved in tensors.items():
        dtype = dtype_named(saved.dtype)
        chunks = []
        for k, box in enumerate(saved.boxes):
            where = tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))
            data, transforms = _ITEMS[saved.stored](saved.array[where], dtype)
            chunks.append(Chunk(box, _append(files, k % num_files, data, transforms)))
        shape = saved.array.shape
        columns = Chunks.of(chunks, num_dims=len(shape))
        entries[key] = TensorEntry(key, dtype, shape, columns, saved.path or (key,))
    for key, value in (values or {}).items():
        item = _append(files, 0, encode_value_item(encode_value(value)))
        entries[key] = ValueEntry(key, item, (key,))
    for number, data in enumerate(files):
        if data:
            (folder / shard_file_name(number, 0)).write_bytes(data)
    index = Index(entries)
    (folder / METADATA_NAME).write_bytes(write_metadata(index))
    return index


def place_of(folder: Path, index: Index, key: str, chunk: int = 0) -> tuple[str, int, int]:
    """File, first byte and length of the storage that a chunk's item holds."""
    entry = index.entries[key]
    assert isinstance(entry, TensorEntry)
    item = entry.chunks[chunk].item
    assert item is not None
    data = (folder / item.file).read_bytes()[item.offset : item.end]
    header = parse_tensor_item(length=item.length, head=data)
    return item.file, item.offset + header.payload_offset, header.payload_num_bytes


def plain_item(array: npt.NDArray[Any], dtype: DType) -> tuple[bytes, tuple[str, ...]]:
    """The item that torch writes of a contiguous tensor."""
    payload = np.ascontiguousarray(array).tobytes()
    framing = encode_item(dtype=dtype, shape=array.shape)
    return framing.head + payload + framing.tail(crc32(payload)), ()


def transposed_item(array: npt.NDArray[Any], dtype: DType) -> tuple[bytes, tuple[str, ...]]:
    """The item of a tensor whose storage is column-major, as of ``w.t()``."""
    strides, step = [], 1
    for size in array.shape:
        strides.append(step)
        step *= size
    ref = TensorRef("0", array.nbytes, dtype, array.shape, tuple(strides))
    return encode_value_item(encode_value(ref), storages={"0": array.tobytes("F")}), ()


def view_item(array: npt.NDArray[Any], dtype: DType) -> tuple[bytes, tuple[str, ...]]:
    """The item of a slice that was saved with its whole storage, as of ``big[3:]``."""
    payload = np.ascontiguousarray(array).tobytes()
    storage = b"\x11" * (3 * dtype.itemsize) + payload + b"\x22" * (5 * dtype.itemsize)
    plain = TensorRef("0", len(storage), dtype, array.shape, contiguous_strides(array.shape))
    pickle = encode_value(replace(plain, storage_offset=3))
    return encode_value_item(pickle, storages={"0": storage}), ()


def zstd_item(array: npt.NDArray[Any], dtype: DType) -> tuple[bytes, tuple[str, ...]]:
    """The item wrapped as torch's ZStandard extension wraps it."""
    return zstandard.compress(plain_item(array, dtype)[0]), ("stream.zstd/1",)


_ITEMS = {
    "plain": plain_item,
    "transposed": transposed_item,
    "view": view_item,
    "zstd": zstd_item,
}


def read_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Code, shape and bytes of each tensor of a file, read by hand."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (row["dtype"], tuple(row["shape"]), data[start + a : start + b])
        for name, row in header.items()
        for a, b in [row["data_offsets"]]
    }


def random_array(shape: tuple[int, ...], dtype: str, *, seed: int) -> npt.NDArray[Any]:
    """Random bytes as an array: any bit pattern, NaNs included."""
    kind = numpy_dtype(dtype_named(dtype))
    num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.random.default_rng(seed).bytes(num_bytes)
    if dtype == "bool":
        return (np.frombuffer(raw, np.uint8) & 1).astype(bool).reshape(shape)
    return np.frombuffer(raw, kind).reshape(shape)


def _append(
    files: list[bytearray], number: int, data: bytes, transforms: tuple[str, ...] = ()
) -> Item:
    offset = len(files[number])
    files[number] += data
    return Item(shard_file_name(number, 0), offset, len(data), transforms)
