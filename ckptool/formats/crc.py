"""CRC-32s, as zips and gzip have them: of bytes, and of joined ranges from each one's own.

The one door to isal: 8 GiB/s on one core, without a copy and without the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from isal import isal_zlib

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["crc32", "crc32_combine", "crc32_join"]


def crc32(data: Buffer, start: int = 0) -> int:
    """The CRC-32 of ``data``, any C-contiguous buffer; ``start`` is that of what came before."""
    return int(isal_zlib.crc32(data, start))


def crc32_combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """The CRC-32 of A + B from those of A and of B; ``length_b`` in bytes."""
    return int(isal_zlib.crc32_combine(crc_a, crc_b, length_b))


def crc32_join(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of adjacent ranges, each given as (CRC-32, number of bytes), in order."""
    whole = 0
    for crc, num_bytes in parts:
        whole = crc32_combine(whole, crc, num_bytes)
    return whole
