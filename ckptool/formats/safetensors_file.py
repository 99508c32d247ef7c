"""The header of a ``.safetensors`` file: bytes <-> names, dtypes, shapes and places.

A file is the header's length (8 bytes, little-endian), the header (JSON, padded with spaces)
and the tensors' bytes, without holes or overlaps. Source: the format's own page,
https://github.com/huggingface/safetensors, and what its serializer writes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.dtypes import DTYPES, DType
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.partial_bytes import NeedMore

__all__ = [
    "MAX_HEADER_NUM_BYTES",
    "SafetensorsHeader",
    "StoredTensor",
    "encode_header",
    "encode_index",
    "parse_header",
]

MAX_HEADER_NUM_BYTES = 100_000_000
_MAX_NUM_DIMS = 64

# the serializer's own order: falling alignment, so that every tensor is aligned
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
_DTYPES = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_RANKS = {code: rank for rank, code in enumerate(_ORDER)}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; ``offset`` counts from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """``tensors`` in the order of their offsets; the first one's bytes start at ``num_bytes``."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    num_bytes: int


def encode_header(
    tensors: Mapping[str, tuple[DType, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and where each one's bytes start in the file.

    The offsets come in the order in which the bytes stand. Raises UnsupportedError, naming the
    tensor, for a dtype that the format has no code for.
    """
    codes = {name: _code(name, dtype, shape) for name, (dtype, shape) in tensors.items()}
    names = sorted(tensors, key=lambda name: (_RANKS[codes[name]], name))
    header: dict[str, Any] = {}
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    starts: dict[str, int] = {}
    at = 0
    for name in names:
        dtype, shape = tensors[name]
        starts[name], at = at, at + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": codes[name],
            "shape": _header_shape(dtype, shape),
            "data_offsets": [starts[name], at],
        }
    data = _json_bytes(header)
    data += b" " * (-len(data) % 8)
    if len(data) > MAX_HEADER_NUM_BYTES:
        raise UnsupportedError(
            f"a safetensors header of {len(data)} bytes is beyond the format's "
            f"{MAX_HEADER_NUM_BYTES}",
            hint="split the file: --max-file-size",
        )
    base = 8 + len(data)
    return struct.pack("<Q", len(data)) + data, {name: base + at for name, at in starts.items()}


def parse_header(data: bytes, *, file_num_bytes: int) -> SafetensorsHeader:
    """The header of a file of that size, from its first bytes.

    Raises NeedMore where ``data`` is too short, DamagedError for a file that the format does
    not allow, UnsupportedError, naming the tensor, for a dtype that we do not know.
    """
    if file_num_bytes < 8:
        raise DamagedError(f"{file_num_bytes} bytes are too few for a safetensors file")
    if len(data) < 8:
        raise NeedMore(8, 0)
    (length,) = struct.unpack_from("<Q", data)
    num_bytes = 8 + length
    if length > MAX_HEADER_NUM_BYTES or num_bytes > file_num_bytes:
        raise DamagedError(
            f"the safetensors header claims {length} bytes of a file of {file_num_bytes}", offset=0
        )
    if len(data) < num_bytes:
        raise NeedMore(num_bytes, 0)
    header = _parse_json(data[8:num_bytes])
    metadata = _metadata(header.pop("__metadata__", None))
    tensors = {name: _stored(name, row, num_bytes) for name, row in header.items()}
    tensors = dict(sorted(tensors.items(), key=lambda pair: (pair[1].offset, pair[1].num_bytes)))
    _check_tiling(tensors, num_bytes, file_num_bytes)
    return SafetensorsHeader(tensors, metadata, num_bytes)


def encode_index(weight_map: Mapping[str, str], *, total_num_bytes: int) -> bytes:
    """``model.safetensors.index.json``: which file holds which tensor."""
    index = {
        "metadata": {"total_size": total_num_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _code(name: str, dtype: DType, shape: tuple[int, ...]) -> str:
    """What the format calls ``dtype``."""
    if name == "__metadata__":
        raise UnsupportedError(
            "a tensor cannot be named '__metadata__' in a safetensors file",
            hint="leave it out with --exclude __metadata__, or write --format torch",
            entry=name,
        )
    if dtype.safetensors is None or (dtype.safetensors == "F4" and not shape):
        cast = ", cast it with --dtype" if dtype.kind == "float" else ""
        raise UnsupportedError(
            f"tensor {name!r} is {dtype.name}, which safetensors cannot hold",
            hint=f"leave it out with --exclude {name!r}{cast}, or write --format torch",
            entry=name,
            dtype=dtype.name,
        )
    return dtype.safetensors


def _header_shape(dtype: DType, shape: tuple[int, ...]) -> list[int]:
    """The shape as the header has it: F4 counts single 4-bit elements, torch pairs of them."""
    return [*shape[:-1], 2 * shape[-1]] if dtype.safetensors == "F4" else list(shape)


def _json_bytes(header: dict[str, Any]) -> bytes:
    try:
        return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            f"a tensor's name is no valid text: {error.object[error.start - 20 : error.end]!r}",
            hint="give it another name with --rename",
        ) from error


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the safetensors header is no JSON: {error}", offset=8) from error
    if not data.startswith(b"{") or not isinstance(header, dict):
        raise DamagedError("the safetensors header is no JSON object", offset=8)
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise DamagedError(f"the safetensors header names {twice!r} twice", entry=twice)
    return found


def _metadata(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise DamagedError("the safetensors header's __metadata__ is no map of texts", offset=8)
    return found


def _stored(name: str, row: Any, base: int) -> StoredTensor:
    """One row of the header, which must be consistent in itself."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise _damage(name, "has no dtype, shape and data_offsets")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damage(name, f"has shape {shape!r:.80} and data_offsets {offsets!r:.80}")
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise UnsupportedError(
            f"tensor {name!r} has the unknown safetensors dtype {code!r:.40}",
            hint="a newer ckptool may know it: pip install -U ckptool",
            entry=name,
        )
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise _damage(name, f"has shape {shape}, which does not fill bytes of two F4 each")
        shape = [*shape[:-1], shape[-1] // 2]
    start, end = offsets
    expected = math.prod(shape) * dtype.itemsize
    if end - start != expected:
        raise _damage(name, f"has data_offsets {offsets}, but needs {expected} bytes")
    return StoredTensor(dtype, tuple(shape), base + start, end - start)


def _are_counts(value: Any) -> bool:
    few = isinstance(value, list) and len(value) <= _MAX_NUM_DIMS
    return few and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_tiling(tensors: Mapping[str, StoredTensor], start: int, file_num_bytes: int) -> None:
    """Tensors fill the rest of the file without holes or overlaps."""
    at, before = start, "the header"
    for name, tensor in tensors.items():
        if tensor.offset != at:
            what = "overlaps" if tensor.offset < at else "leaves a hole behind"
            raise _damage(name, f"starts at byte {tensor.offset} and {what} {before}")
        at, before = tensor.offset + tensor.num_bytes, repr(name)
    if at != file_num_bytes:
        raise DamagedError(
            f"the tensors of a safetensors file end at byte {at}, the file has {file_num_bytes}",
            offset=at,
        )


def _damage(name: str, what: str) -> DamagedError:
    return DamagedError(f"tensor {name!r:.200} {what} in its safetensors header", entry=name)
