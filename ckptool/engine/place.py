"""Fills a run of a row-major tensor from chunks of it: by stride, with a cast where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptool.dtypes import numpy_dtype
from ckptool.engine.cast import CastCount, cast
from ckptool.model import Box
from ckptool.planning.boxes import flat_offset, intersect, run_boxes
from ckptool.planning.plan import Payload, Place

__all__ = ["Landing", "land", "landings"]


@dataclass(frozen=True, slots=True)
class Landing:
    """Bytes ``[start, end)`` of a payload fill ``box`` of a run.

    ``run`` is the box of the tensor region that stands at element ``first`` of the output;
    both boxes are in coordinates of the region.
    """

    payload: Payload
    start: int
    end: int
    box: Box
    run: Box
    first: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def landings(place: Place) -> list[Landing]:
    """Which bytes of which payloads fill the place, each a contiguous range; pure."""
    found: list[Landing] = []
    first = 0
    for run in run_boxes(place.shape, place.first, place.last):
        for payload in place.pieces:
            landing = _landing(place, payload, run, first)
            if landing is not None:
                found.append(landing)
        first += run.num_elements
    return found


def _landing(place: Place, payload: Payload, run: Box, first: int) -> Landing | None:
    shift = tuple(o - p for o, p in zip(payload.box.offsets, place.origin, strict=True))
    shared = intersect(run, Box(shift, payload.box.sizes))
    if shared is None:
        return None
    inside = tuple(o - s for o, s in zip(shared.offsets, shift, strict=True))
    itemsize = payload.dtype.itemsize
    start = flat_offset(payload.box.sizes, inside) * itemsize
    return Landing(payload, start, start + shared.num_elements * itemsize, shared, run, first)


def land(
    place: Place, arrivals: Sequence[tuple[Landing, memoryview]], out: memoryview
) -> CastCount | None:
    """Write the bytes of every landing into ``out``, the bytes of the place.

    Returns what a cast lost, None where nothing was cast.
    """
    casts = any(landing.payload.dtype != place.dtype for landing, _ in arrivals)
    itemsize = place.dtype.itemsize
    target_type = numpy_dtype(place.dtype) if casts else _bits(itemsize)
    overflows = underflows = 0
    for landing, data in arrivals:
        run = landing.run
        begin = landing.first * itemsize
        region = np.frombuffer(
            out[begin : begin + run.num_elements * itemsize], dtype=target_type
        ).reshape(run.sizes)
        where = tuple(
            slice(o - r, o - r + size)
            for o, r, size in zip(landing.box.offsets, run.offsets, landing.box.sizes, strict=True)
        )
        if casts:
            source = np.frombuffer(data, dtype=numpy_dtype(landing.payload.dtype))
            cast_to, over, under = cast(source, landing.payload.dtype, place.dtype)
            overflows, underflows = overflows + over, underflows + under
            region[where] = cast_to.reshape(landing.box.sizes)
        else:
            source = np.frombuffer(data, dtype=target_type)
            region[where] = source.reshape(landing.box.sizes)
    return CastCount(place.entry, overflows, underflows) if casts else None


def _bits(itemsize: int) -> np.dtype[np.void] | np.dtype[np.unsignedinteger]:
    """A dtype that moves ``itemsize`` bytes without looking at them."""
    return np.dtype(f"u{itemsize}") if itemsize in (1, 2, 4, 8) else np.dtype(f"V{itemsize}")
