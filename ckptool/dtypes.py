"""The dtypes we know: names, sizes, and what each format calls them.

Names are torch's own (``float32``, ``bfloat16``, ...). ``safetensors`` is the header's code
(https://github.com/huggingface/safetensors, ``Dtype``), None where that format has none.
``storage_class`` is the typed storage that ``torch.save`` names in a pickle of protocol
``_rebuild_tensor_v2``; None where torch writes ``UntypedStorage`` and a dtype (``_v3``).
``numpy`` is the name under which numpy or ml_dtypes knows it, None where neither does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptool.errors import UnsupportedError

__all__ = ["DTYPES", "DType", "dtype_named", "numpy_dtype"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type; ``itemsize`` in bytes."""

    name: str
    itemsize: int
    kind: str  # "float", "int", "bool", "complex" or "bits"
    safetensors: str | None
    storage_class: str | None
    numpy: str | None

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        return dtype_named, (self.name,)


_ROWS = [
    DType("float64", 8, "float", "F64", "DoubleStorage", "float64"),
    DType("float32", 4, "float", "F32", "FloatStorage", "float32"),
    DType("float16", 2, "float", "F16", "HalfStorage", "float16"),
    DType("bfloat16", 2, "float", "BF16", "BFloat16Storage", "bfloat16"),
    DType("complex32", 4, "complex", None, None, None),
    DType("complex64", 8, "complex", "C64", "ComplexFloatStorage", "complex64"),
    DType("complex128", 16, "complex", None, "ComplexDoubleStorage", "complex128"),
    DType("int8", 1, "int", "I8", "CharStorage", "int8"),
    DType("int16", 2, "int", "I16", "ShortStorage", "int16"),
    DType("int32", 4, "int", "I32", "IntStorage", "int32"),
    DType("int64", 8, "int", "I64", "LongStorage", "int64"),
    DType("uint8", 1, "int", "U8", "ByteStorage", "uint8"),
    DType("uint16", 2, "int", "U16", None, "uint16"),
    DType("uint32", 4, "int", "U32", None, "uint32"),
    DType("uint64", 8, "int", "U64", None, "uint64"),
    DType("bool", 1, "bool", "BOOL", "BoolStorage", "bool"),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3", None, "float8_e4m3fn"),
    DType("float8_e5m2", 1, "float", "F8_E5M2", None, "float8_e5m2"),
    DType("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ", None, "float8_e4m3fnuz"),
    DType("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ", None, "float8_e5m2fnuz"),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0", None, "float8_e8m0fnu"),
    # two 4-bit floats in a byte; a shape counts bytes, as torch's does
    DType("float4_e2m1fn_x2", 1, "bits", "F4", None, None),
]

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}


def dtype_named(name: str) -> DType:
    """The dtype that torch calls ``name``; raises UnsupportedError for any other."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(
            f"unknown dtype {name!r}",
            hint="a newer ckptool may know it: pip install -U ckptool",
            dtype=name,
        ) from None


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy dtype with the same bytes; unsigned or void bytes where numpy has none."""
    if dtype.numpy is None:
        return np.dtype((np.void, dtype.itemsize))
    if dtype.numpy.startswith(("bfloat", "float8")):
        import ml_dtypes

        wanted: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
        return wanted
    return np.dtype(dtype.numpy)
