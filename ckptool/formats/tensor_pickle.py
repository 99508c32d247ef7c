"""Dtype and shape -> the pickle that ``torch.save`` writes of one contiguous CPU tensor."""

from __future__ import annotations

import math
import struct

from ckptool.dtypes import DType
from ckptool.formats.plain_encoder import int_opcode

__all__ = ["contiguous_strides", "tensor_pickle"]


def tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The pickle of one contiguous tensor with the opcodes and memo slots of Python's pickler."""
    typed = dtype.storage_class is not None
    num_elements = math.prod(shape)
    out = _Opcodes()
    out.memoized(f"ctorch._utils\n_rebuild_tensor_{'v2' if typed else 'v3'}\n".encode())
    out.plain(b"((")
    out.text("storage")
    storage = f"ctorch\n{dtype.storage_class}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    out.memoized(storage.encode())
    out.text("0")
    out.text("cpu")
    out.plain(int_opcode(num_elements * (1 if typed else dtype.itemsize)))
    out.memoized(b"t")
    out.plain(b"Q" + int_opcode(0))
    out.ints(shape)
    out.ints(contiguous_strides(shape))
    out.plain(b"\x89")
    out.memoized(b"ccollections\nOrderedDict\n")
    out.memoized(b")R")
    if not typed:
        out.memoized(f"ctorch\n{dtype.name}\n".encode())
    out.memoized(b"t")
    out.memoized(b"R")
    return b"\x80\x02" + b"".join(out.parts) + b"."


class _Opcodes:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.num_memoized = 0

    def plain(self, opcodes: bytes) -> None:
        self.parts.append(opcodes)

    def memoized(self, opcodes: bytes) -> None:
        self.parts.append(opcodes + b"q" + bytes([self.num_memoized]))
        self.num_memoized += 1

    def text(self, text: str) -> None:
        self.memoized(b"X" + struct.pack("<I", len(text)) + text.encode())

    def ints(self, values: tuple[int, ...]) -> None:
        coded = b"".join(map(int_opcode, values))
        if not values:
            self.plain(b")")
        elif len(values) < 4:
            self.memoized(coded + bytes([0x84 + len(values)]))
        else:
            self.memoized(b"(" + coded + b"t")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives a contiguous tensor: a dim of size 0 counts as 1."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
