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
_CPU_BYTES = 8 << 20  # scratch memory stays small


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
    counts = torch.stack(
        [
            after.isnan().any().to(torch.int64),
            (after.isinf() & before.isfinite()).sum(),
            ((after == 0) & (before != 0)).sum(),
        ]
    ).tolist()
    if counts[0]:
        return _cast_by_engine(out, data, source, target)
    out.copy_(after.view(torch.uint8), non_blocking=True)
    return int(counts[1]), int(counts[2])


def _cast_by_engine(
    out: torch.Tensor, data: torch.Tensor, source: DType, target: DType
) -> tuple[int, int]:
    array = np.frombuffer(memory_of(data.cpu()), dtype=numpy_dtype(source))
    done, overflows, underflows = cast(array, source, target)
    out.copy_(torch.from_numpy(np.ascontiguousarray(done).view(np.uint8)))
    return overflows, underflows
