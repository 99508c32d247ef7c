"""DCP's transform ``stream.zstd/1``: an item wrapped as a whole in one zstd stream."""

from __future__ import annotations

import os

import zstandard

__all__ = ["ZSTD", "open_compressor"]

ZSTD = "stream.zstd/1"
_LEVEL = 3
_JOB_BYTES = 2 << 20  # zstd's own choice is 8 MiB: as fast, and four times the memory
_THREAD_BYTES = 6 << 20  # a job, what it gives, and the match tables
_MAX_THREADS = 8


def open_compressor(*, num_threads: int, max_memory: int | None = None) -> zstandard.ZstdCompressor:
    """Makes streams on up to ``num_threads`` threads, in about ``max_memory`` bytes.

    The streams are the same for any number of threads.
    """
    threads = min(num_threads, os.cpu_count() or 1, _MAX_THREADS)
    if max_memory is not None:
        threads = min(threads, max_memory // _THREAD_BYTES)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, threads=max(1, threads), job_size=_JOB_BYTES
    )
    return zstandard.ZstdCompressor(compression_params=parameters)
