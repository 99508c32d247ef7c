"""The chunks of a new layout, in columns: a large checkpoint has millions of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from ckptool.model import Box, Ints

__all__ = ["NewChunk", "NewChunks"]


@dataclass(frozen=True, slots=True)
class NewChunk:
    """One chunk of the new checkpoint, made of source chunks given by their position.

    ``keep``: the one source item is copied as it is. Otherwise the box is filled from the
    sources, a new item.
    """

    entry: str
    box: Box
    rank: int
    sources: tuple[int, ...]
    keep: bool
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class NewChunks(Sequence[NewChunk]):
    """The new chunks of one tensor; ``offsets`` and ``sizes`` are ``[n, dims]``, the rest ``[n]``.

    The sources of chunk i are ``sources[source_starts[i]:source_starts[i + 1]]``.
    """

    entry: str
    offsets: Ints
    sizes: Ints
    rank: Ints
    keep: npt.NDArray[np.bool_]
    num_bytes: Ints
    sources: Ints
    source_starts: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @overload
    def __getitem__(self, index: int) -> NewChunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NewChunk]: ...

    def __getitem__(self, index: int | slice) -> NewChunk | Sequence[NewChunk]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start, end = self.source_starts[index], self.source_starts[index + 1]
        return NewChunk(
            self.entry,
            Box(tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist())),
            int(self.rank[index]),
            tuple(self.sources[start:end].tolist()),
            bool(self.keep[index]),
            int(self.num_bytes[index]),
        )

    def __iter__(self) -> Iterator[NewChunk]:
        return (self[i] for i in range(len(self)))

    def kept_sources(self) -> Ints:
        """The source chunks whose items are copied as they are."""
        return self.sources[self.source_starts[:-1][self.keep]]
