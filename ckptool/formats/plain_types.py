"""What a plain value is made of: Python's own simple types, and stand-ins for torch's.

A plain value is None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict,
set, frozenset, OrderedDict, a stand-in of this module, or a container of these. A TensorRef
stands where a value holds a tensor: it says which record has its bytes and how they lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptool.dtypes import DType
from ckptool.errors import UnsupportedError

__all__ = [
    "MAX_DEPTH",
    "NotPlain",
    "PlainValue",
    "TensorRef",
    "TorchDevice",
    "TorchDtype",
    "TorchSize",
]

PlainValue: TypeAlias = Any

# containers in containers; the walks over values recurse
MAX_DEPTH = 150


class NotPlain(UnsupportedError):
    """A value of a class that is not plain; ``class_name`` is the class, as ``module.name``."""

    @property
    def class_name(self) -> str:
        return str(self.facts["class_name"])

    @classmethod
    def named(cls, class_name: str) -> NotPlain:
        return cls(
            f"a value of class {class_name} is not plain",
            hint="only plain values are decoded; the stored bytes can still be copied as they are",
            class_name=class_name,
        )


@dataclass(frozen=True, slots=True)
class TorchSize:
    """A torch.Size inside a value."""

    dims: tuple[int, ...]

    def __repr__(self) -> str:
        return f"torch.Size({list(self.dims)})"


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A torch.dtype inside a value; ``name`` without the ``torch.``."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A torch.device inside a value; ``index`` is None where the value gives none."""

    type: str
    index: int | None = None

    def __repr__(self) -> str:
        index = "" if self.index is None else f", index={self.index}"
        return f"device(type={self.type!r}{index})"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor by reference: its bytes are the record ``data/{record}`` of the same zip.

    ``storage_num_bytes`` is the record's size as the pickle gives it; ``storage_offset`` and
    ``strides`` count elements. ``conj`` and ``neg`` say that the bytes are still to be
    conjugated or negated. ``device`` is where the tensor lived when it was saved.
    """

    record: str
    storage_num_bytes: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int = 0
    conj: bool = False
    neg: bool = False
    requires_grad: bool = False
    is_parameter: bool = False
    device: str = "cpu"

    @property
    def storage_numel(self) -> int:
        """Elements of the tensor's dtype that the whole storage holds."""
        return self.storage_num_bytes // self.dtype.itemsize

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row by row without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return self.num_elements == 0
            expected *= size
        return True

    @property
    def is_whole_storage(self) -> bool:
        """Whether the record's bytes are the tensor's, no more, no less, in row order."""
        return self.is_contiguous and self.num_bytes == self.storage_num_bytes
