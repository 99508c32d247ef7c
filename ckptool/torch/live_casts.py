"""Casts where the bytes are, GPU or CPU, to the very bits that the engine's own cast gives.

torch rounds as IEEE 754 says for the casts in ``_SAME``, on every device. Other casts, and
pieces with a NaN (whose bits differ between devices), go through the engine's cast on the CPU.
"""

from __future__ import annotations

import numpy as np
import torch

from ckptool.dtypes import DType, numpy_dtype
from ckptool.engine.cast import cast
from ckptool.torch.local_state import memory_of, torch_dtype

__all__ = ["cast_into"]

_SINGLE = ("float32", "float16", "bfloat16")
_SAME = {(a, b) for a in _SINGLE for b in _SINGLE} | {("float64", "float32")}
_SAME |= {(a, "float64") for a in _SINGLE}
_CPU_BYTES = 1 << 20  # scratch memory stays small, and in the cache
_BITS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def cast_into(
    out: torch.Tensor, data: torch.Tensor, source: DType, target: DType
) -> tuple[int, int]:
    """Fill ``out`` with the elements of ``data`` cast; both are flat uint8, on any device.

    Returns how many elements overflowed and underflowed.
    """
    step = data.numel() if data.is_cuda else _CPU_BYTES // source.itemsize * source.itemsize
    overflows = underflows = 0
    for start in range(0, data.numel(), max(step, 1)):
        part = data[start : start + step]
        begin = start // source.itemsize * target.itemsize
        end = begin + part.numel() // source.itemsize * target.itemsize
        over, under = _cast(out[begin:end], part, source, target)
        overflows, underflows = overflows + over, underflows + under
    return overflows, underflows


def _cast(out: torch.Tensor, data: torch.Tensor, source: DType, target: DType) -> tuple[int, int]:
    if (source.name, target.name) not in _SAME:
        return _cast_by_engine(out, data, source, target)
    before = data.view(torch_dtype(source))
    after = before.to(torch_dtype(target))
    counts = [0, 0, 0]
    if _is_suspicious(after):
        nan = after.isnan().any()
        overflows = (after.isinf() & before.isfinite()).sum()
        underflows = ((after == 0) & (before != 0)).sum()
        counts = torch.stack([nan.to(torch.int64), overflows, underflows]).tolist()
    if counts[0]:
        return _cast_by_engine(out, data, source, target)
    out.copy_(after.view(torch.uint8), non_blocking=True)
    return counts[1], counts[2]


def _is_suspicious(after: torch.Tensor) -> bool:
    """Whether a zero, an infinity or a NaN is there: one cheap pass over the bits tells."""
    bits, infinity = _BITS[after.dtype]
    low, high = torch.aminmax(after.view(bits) & torch.iinfo(bits).max)
    return bool((low == 0) | (high >= infinity))


def _cast_by_engine(
    out: torch.Tensor, data: torch.Tensor, source: DType, target: DType
) -> tuple[int, int]:
    array = np.frombuffer(memory_of(data.cpu()), dtype=numpy_dtype(source))
    done, overflows, underflows = cast(array, source, target)
    out.copy_(torch.from_numpy(np.ascontiguousarray(done).view(np.uint8)))
    return overflows, underflows
