"""Where each share of a rank has its payload in the image of its shard file. Pure.

The staged memory is the file itself: payloads are copied to their final places, and whoever
uploads fills in heads and tails around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.dtypes import DType, dtype_named
from ckptool.formats.dcp_item import encode_item

__all__ = ["Image", "Region", "plan_image"]


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor item; ``payload_start`` and ``num_bytes`` place its payload in the image."""

    dtype: DType
    sizes: tuple[int, ...]
    payload_start: int
    num_bytes: int

    def to_json(self) -> list[Any]:
        return [self.dtype.name, list(self.sizes), self.payload_start, self.num_bytes]

    @classmethod
    def from_json(cls, row: list[Any]) -> Region:
        return cls(dtype_named(row[0]), tuple(row[1]), row[2], row[3])


@dataclass(frozen=True, slots=True)
class Image:
    """All tensor items of a shard file, in order; values follow behind."""

    regions: tuple[Region, ...]
    num_bytes: int


def plan_image(tensors: Sequence[tuple[DType, tuple[int, ...]]]) -> Image:
    """The image of items with these dtypes and sizes."""
    regions: list[Region] = []
    at = 0
    for dtype, sizes in tensors:
        framing = encode_item(dtype=dtype, shape=sizes)
        start = at + len(framing.head)
        regions.append(Region(dtype, sizes, start, framing.payload_num_bytes))
        at += framing.length
    return Image(tuple(regions), at)
