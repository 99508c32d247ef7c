"""Columns of int64 -> small bytes and back: narrowed, differenced where that pays, compressed.

A packed column is one zstd frame of little-endian integers of ``width`` bytes. With ``delta``
they are differences: each number minus the one before, the first minus 0, modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from ckptool.errors import DamagedError
from ckptool.model import Ints

__all__ = ["PackedColumn", "pack_column", "unpack_column"]

_LEVEL = 3
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """How a column is packed; ``num_bytes`` is what it takes in the file."""

    name: str
    num_rows: int
    width: int
    delta: bool
    num_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> PackedColumn:
        """Raises DamagedError unless every field is what it must be."""
        column = cls(**{name: said.get(name) for name in cls.__slots__})  # type: ignore[arg-type]
        numbers = (column.num_rows, column.width, column.num_bytes)
        fine = all(type(number) is int and number >= 0 for number in numbers)
        if not (fine and type(column.name) is str and type(column.delta) is bool):
            raise DamagedError("ckpt.index has a column that is not described")
        if column.width not in _WIDTHS:
            raise DamagedError(f"ckpt.index has a column of {column.width}-byte numbers")
        return column


def pack_column(name: str, numbers: Ints) -> tuple[PackedColumn, bytes]:
    """The column's description and its bytes; differenced unless that makes them larger."""
    plain = np.ascontiguousarray(numbers, np.int64)
    differences = plain.copy()
    differences[1:] -= plain[:-1]
    (width, raw), (plain_width, plain_raw) = _narrow(differences), _narrow(plain)
    delta, data = True, _compress(raw)
    if plain_width <= width and len(as_is := _compress(plain_raw)) < len(data):
        delta, width, data = False, plain_width, as_is
    return PackedColumn(name, len(plain), width, delta, len(data)), data


def unpack_column(column: PackedColumn, data: memoryview) -> Ints:
    """The numbers again; raises DamagedError where the bytes are not as described."""
    raw_bytes = column.num_rows * column.width
    try:
        # the size that a frame gives is what it gets: look before making room for it
        declared = zstandard.frame_content_size(data)
        raw = zstandard.ZstdDecompressor().decompress(data) if declared == raw_bytes else b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"column {column.name!r} of ckpt.index is damaged: {error}") from error
    if declared != raw_bytes or len(raw) != raw_bytes:
        raise DamagedError(
            f"column {column.name!r} of ckpt.index has {declared} bytes, not {raw_bytes}"
        )
    numbers = np.frombuffer(raw, f"<i{column.width}").astype(np.int64)
    return np.cumsum(numbers, out=numbers) if column.delta else numbers


def _narrow(numbers: Ints) -> tuple[int, bytes]:
    """The narrowest integers that hold the numbers."""
    low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    width = next(w for w in _WIDTHS if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    return width, numbers.astype(f"<i{width}").tobytes()


def _compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(raw)
