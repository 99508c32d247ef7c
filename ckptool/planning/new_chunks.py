"""The chunks of a new layout, in columns: a large checkpoint has millions of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckptool.model import Box, Ints
from ckptool.planning.made import Lazy

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
class NewChunks(Lazy[NewChunk]):
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

    def _element(self, index: int) -> NewChunk:
        start, end = self.source_starts[index], self.source_starts[index + 1]
        return NewChunk(
            self.entry,
            Box(tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist())),
            int(self.rank[index]),
            tuple(self.sources[start:end].tolist()),
            bool(self.keep[index]),
            int(self.num_bytes[index]),
        )

    def kept_sources(self) -> Ints:
        """The source chunks whose items are copied as they are."""
        return self.sources[self.source_starts[:-1][self.keep]]
