"""CRC-32s of bytes and of joined ranges."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.formats.crc import crc32, crc32_combine, crc32_join


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc32_agrees_with_zlib_and_continues(a: bytes, b: bytes) -> None:
    """It is zlib's CRC-32, and one call can go on where another stopped."""
    assert crc32(a) == zlib.crc32(a)
    assert crc32(b, crc32(a)) == zlib.crc32(a + b)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=100), max_size=8))
def test_joined_ranges_need_no_reading(parts: list[bytes]) -> None:
    """The CRC of a whole follows from those of its parts, empty ones included."""
    whole = b"".join(parts)
    assert crc32_join((crc32(part), len(part)) for part in parts) == zlib.crc32(whole)


def test_combine_takes_lengths_beyond_4_gib() -> None:
    """Zeros are cheap to check: 2**33 of them equal two combined runs of 2**32."""
    num_bytes, crc = 1 << 20, crc32(bytes(1 << 20))
    while num_bytes < 1 << 32:
        crc, num_bytes = crc32_combine(crc, crc, num_bytes), num_bytes * 2
    tail = crc32(b"x")
    once = crc32_combine(crc32_combine(crc, crc, num_bytes), tail, 1)
    assert once == crc32_combine(crc, crc32_combine(crc, tail, 1), num_bytes + 1)


def test_any_contiguous_buffer_is_taken_as_it_is() -> None:
    """memoryviews and arrays of any element type count as their bytes."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert crc32(memoryview(array)) == crc32(array) == zlib.crc32(array.tobytes())
