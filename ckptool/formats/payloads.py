"""Where the payloads of a tensor's chunks lie inside their items, and their CRC-32s, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptool.model import Ints

__all__ = ["BLOCK_BYTES", "Payload", "Payloads"]

BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """One chunk's payload: ``offset`` from its item's start; None where it is not known.

    ``block_crc32s`` has the CRC-32 of each 4 MiB of the payload (the last block is what
    remains), or nothing.
    """

    offset: int | None
    num_bytes: int | None
    crc32: int | None = None
    block_crc32s: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Payloads:
    """The payloads of one tensor's chunks, int64 ``[n]`` each, -1 where it is not known.

    The blocks of chunk i are ``block_crc32s[block_starts[i]:block_starts[i + 1]]``;
    ``block_crc32s`` may be shared by all tensors of an index.
    """

    offsets: Ints
    num_bytes: Ints
    crc32s: Ints
    block_starts: Ints
    block_crc32s: Ints

    @classmethod
    def unknown(cls, num_chunks: int) -> Payloads:
        """Payloads of which nothing is known."""
        nothing = np.full(num_chunks, -1, np.int64)
        none = np.zeros(num_chunks + 1, np.int64)
        return cls(nothing, nothing, nothing, none, np.zeros(0, np.int64))

    @classmethod
    def of(cls, payloads: Iterable[Payload]) -> Payloads:
        """Columns of payloads given one by one."""
        rows = list(payloads)
        counts = [len(row.block_crc32s) for row in rows]
        return cls(
            offsets=_column([row.offset for row in rows]),
            num_bytes=_column([row.num_bytes for row in rows]),
            crc32s=_column([row.crc32 for row in rows]),
            block_starts=np.cumsum([0, *counts], dtype=np.int64),
            block_crc32s=np.array([crc for row in rows for crc in row.block_crc32s], np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, row: int) -> Payload:
        return Payload(
            offset=_known(self.offsets[row]),
            num_bytes=_known(self.num_bytes[row]),
            crc32=_known(self.crc32s[row]),
            block_crc32s=tuple(self.blocks(row).tolist()),
        )

    def blocks(self, row: int) -> Ints:
        """The CRC-32s of chunk ``row``'s blocks; empty where they are not known."""
        start, end = self.block_starts[row], self.block_starts[row + 1]
        return self.block_crc32s[start:end]

    @property
    def block_counts(self) -> Ints:
        return np.diff(self.block_starts)

    @property
    def own_block_crc32s(self) -> Ints:
        """The blocks of these chunks only, one after another."""
        return self.block_crc32s[self.block_starts[0] : self.block_starts[-1]]


def _column(numbers: Sequence[int | None]) -> Ints:
    return np.array([-1 if number is None else number for number in numbers], np.int64)


def _known(number: np.int64) -> int | None:
    return None if number < 0 else int(number)
