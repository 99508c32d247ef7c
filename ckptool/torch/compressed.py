"""Items that are wrapped in one zstd stream (``stream.zstd/1``) -> the items themselves.

What the index makes one expect bounds what is unpacked.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

import zstandard

from ckptool.errors import DamagedError, UnsupportedError
from ckptool.model import Item

if TYPE_CHECKING:
    from ckptool.torch.pieces import Need

__all__ = ["decompress", "decompress_value"]

_FRAMING_BYTES = 64 << 10
_MAX_VALUE_BYTES = 1 << 30


def decompress(key: str, item: Item, data: bytes, need: Need) -> bytes:
    """The item of a tensor; as it is where nothing wraps it."""
    payload = math.prod(need.sizes) * need.dtype.itemsize
    return _unpack(key, item, data, limit=4 * payload + _FRAMING_BYTES)


def decompress_value(key: str, item: Item, data: bytes) -> bytes:
    """The item of a value; as it is where nothing wraps it."""
    return _unpack(key, item, data, limit=_MAX_VALUE_BYTES)


def _unpack(key: str, item: Item, data: bytes, *, limit: int) -> bytes:
    for name in reversed(item.transforms):
        if not name.startswith("stream.zstd"):
            raise UnsupportedError(
                f"{key}: its item is wrapped in {name!r}, which is not known", entry=key
            )
        try:
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
                data = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise DamagedError(
                f"{key}: the zstd stream at byte {item.offset} of {item.file} is damaged: {error}",
                hint="load an older step",
                entry=key,
            ) from error
        if len(data) > limit:
            raise DamagedError(f"{key}: its item unpacks to more than {limit} bytes", entry=key)
    return data
