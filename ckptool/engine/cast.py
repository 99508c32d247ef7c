"""Casts arrays between floating dtypes: round to nearest even, with what was lost counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptool.dtypes import DType, numpy_dtype

__all__ = ["CastCount", "cast"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CastCount:
    """Elements of one entry that a cast changed beyond rounding.

    ``overflows``: finite before, infinite or NaN after; ``underflows``: not zero before, zero
    after.
    """

    entry: str
    overflows: int
    underflows: int

    def __add__(self, other: CastCount) -> CastCount:
        return CastCount(
            self.entry, self.overflows + other.overflows, self.underflows + other.underflows
        )


def cast(array: Array, source: DType, target: DType) -> tuple[Array, int, int]:
    """The array in another floating dtype, and how many elements overflowed and underflowed.

    Values beyond the largest finite one become infinite, or NaN where the dtype has no
    infinity (``float8_e4m3fn``), as IEEE 754 and OCP 8-bit floating point say.
    """
    with np.errstate(all="ignore"):  # what is lost is counted, and NaN compares as it may
        out = _narrow(array, source, target)
        return out, _num_overflows(array, out), _num_underflows(array, out)


def _narrow(array: Array, source: DType, target: DType) -> Array:
    wanted = numpy_dtype(target)
    if source.name == "float64" and target.name not in ("float64", "float32", "float16"):
        # ml_dtypes goes through float32: rounding to odd on the way keeps the result exact
        array = _float32_rounded_to_odd(array)
    return array.astype(wanted)


def _float32_rounded_to_odd(array: Array) -> Array:
    """float64 as float32 with the last bit set wherever something was lost (sticky)."""
    near = array.astype(np.float32)
    back = near.astype(np.float64)
    inexact = np.isfinite(array) & (back != array)
    toward_zero = np.where(np.abs(back) > np.abs(array), np.nextafter(near, np.float32(0)), near)
    bits = np.ascontiguousarray(toward_zero).view(np.uint32)
    return np.where(inexact, bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def _num_overflows(before: Array, after: Array) -> int:
    lost = ~np.isfinite(after)
    return int(np.count_nonzero(lost & np.isfinite(before))) if lost.any() else 0


def _num_underflows(before: Array, after: Array) -> int:
    zero = after == 0
    return int(np.count_nonzero(zero & (before != 0))) if zero.any() else 0
