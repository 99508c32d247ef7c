"""A nested state dict -> the ``.pt`` file of it, as segments that are known before any payload.

The file is a stored zip like an item's, with one record for each tensor. Literals are fixed,
payloads come from elsewhere in any order, and what needs their CRC-32s is encoded last.
``torch.load(weights_only=True)`` opens the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ckptool.dtypes import DType
from ckptool.errors import UsageError
from ckptool.formats.plain_values import TensorRef, encode_value
from ckptool.formats.tensor_pickle import contiguous_strides
from ckptool.formats.zip_archive import Archive, Between, Ending, plan_archive, torch_records

__all__ = [
    "Literal",
    "Payload",
    "Segment",
    "Tail",
    "TensorSpec",
    "TorchFile",
    "plan_torch_file",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will stand in the file; ``key`` names its payload, contiguous bytes."""

    key: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known already."""

    data: bytes
    offset: int

    @property
    def num_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of the tensor (or storage) ``key``."""

    key: str
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Tail:
    """Bytes that need the CRC-32s of the payloads ``needs``."""

    num_bytes: int
    needs: tuple[str, ...]
    offset: int
    encoder: Between | Ending

    def encode(self, crcs: Sequence[int]) -> bytes:
        """The bytes, from one CRC-32 for each of ``needs`` in that order."""
        assert len(crcs) == len(self.needs)
        return self.encoder(crcs)


Segment: TypeAlias = "Literal | Payload | Tail"


@dataclass(frozen=True, slots=True)
class TorchFile:
    """Segments in the order of their offsets, without gaps; picklable."""

    segments: tuple[Segment, ...]
    length: int

    @property
    def payloads(self) -> list[Payload]:
        return [segment for segment in self.segments if isinstance(segment, Payload)]


def plan_torch_file(
    tree: Mapping[str, Any], *, shared: Mapping[str, str] | None = None
) -> TorchFile:
    """Lay out a ``.pt`` of nested dicts and lists of plain values and TensorSpec leaves.

    A TensorRef leaf stands for a view of a storage: its ``record`` is the payload's key. Leaves
    with one key share one record, as do ``shared`` ones (key -> key of the same bytes). Tensors
    of 0 bytes have no payload. Raises NotPlain for a value that is not plain.
    """
    storages = _Storages(shared or {})
    data_pkl = encode_value(_with_refs(tree), place_tensor=storages.place)
    contents: dict[str, int | bytes] = {
        str(number): num_bytes or b"" for number, num_bytes in storages.by_number()
    }
    archive = plan_archive(torch_records(data_pkl, contents))
    keys = [key for key, (_, num_bytes) in storages.records.items() if num_bytes]
    return TorchFile(tuple(_segments(archive, keys)), archive.length)


class _Storages:
    """Numbers the payloads in the order in which the pickle meets them."""

    def __init__(self, shared: Mapping[str, str]) -> None:
        self.shared = shared
        self.records: dict[str, tuple[int, int]] = {}

    def place(self, ref: TensorRef) -> TensorRef:
        key = self.shared.get(ref.record, ref.record)
        number, num_bytes = self.records.setdefault(key, (len(self.records), ref.storage_num_bytes))
        if num_bytes != ref.storage_num_bytes:
            raise UsageError(
                f"tensor {ref.record!r} ({ref.storage_num_bytes} bytes) cannot share the bytes "
                f"of {key!r} ({num_bytes} bytes)",
                entry=ref.record,
            )
        return replace(ref, record=str(number))

    def by_number(self) -> list[tuple[int, int]]:
        return list(self.records.values())


def _with_refs(tree: Any) -> Any:
    """The tree with each TensorSpec as the reference that a pickle holds."""
    if type(tree) is dict:
        return {key: _with_refs(value) for key, value in tree.items()}
    if type(tree) is list:
        return [_with_refs(value) for value in tree]
    if type(tree) is TensorSpec:
        return TensorRef(
            record=tree.key,
            storage_num_bytes=math.prod(tree.shape) * tree.dtype.itemsize,
            dtype=tree.dtype,
            shape=tree.shape,
            strides=contiguous_strides(tree.shape),
        )
    return tree


def _segments(archive: Archive, keys: Sequence[str]) -> list[Segment]:
    head = archive.head
    segments: list[Segment] = [Literal(head, 0)]
    at = len(head)
    for number, key in enumerate(keys):
        num_bytes = archive.records[archive.payloads[number]].num_bytes
        segments.append(Payload(key, num_bytes, at))
        after = archive.after(number)
        needs = (key,) if isinstance(after, Between) else tuple(keys)
        segments.append(Tail(after.num_bytes, needs, at + num_bytes, after))
        at += num_bytes + after.num_bytes
    return segments
