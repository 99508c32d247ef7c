"""DCP's zstd streams: what they hold does not depend on who made them."""

from __future__ import annotations

import numpy as np
import zstandard

from ckptool.formats.zstd_stream import open_compressor


def test_any_number_of_threads_gives_the_same_stream() -> None:
    """One thread or many, much memory or little: equal bytes, and they read back."""
    data = np.random.default_rng(0).integers(0, 50, 9_000_001, np.uint8).tobytes()
    made = [
        open_compressor(num_threads=num_threads, max_memory=max_memory)
        for num_threads, max_memory in ((1, None), (2, None), (8, None), (8, 0), (8, 13 << 20))
    ]
    streams = set()
    for compressor in made:
        frame = compressor.compressobj()
        parts = [frame.compress(data[at : at + 1_000_000]) for at in range(0, len(data), 1_000_000)]
        streams.add(b"".join([*parts, frame.flush()]))
    (stream,) = streams
    assert zstandard.ZstdDecompressor().decompressobj().decompress(stream) == data
