"""Entries that are no tensors: Python values <-> the bytes of an item.

Writing is ``torch.save``, as stock DCP does it; reading goes through our own decoder, which
builds only plain values and tensors and runs nothing.
"""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.partial_bytes import PartialBytes
from ckptool.formats.plain_values import (
    NotPlain,
    TensorRef,
    TorchDevice,
    TorchDtype,
    TorchSize,
    decode_value,
)
from ckptool.formats.zip_reading import StoredZip
from ckptool.torch.local_state import local_bytes, torch_dtype

__all__ = ["decode", "digest", "encode"]


def encode(key: str, value: Any) -> bytes:
    """The item of a value; raises UnsupportedError where a load could not build it again."""
    file = io.BytesIO()
    torch.save(value, file)
    data = file.getvalue()
    try:
        decode(key, data)
    except CkptoolError as error:
        raise UnsupportedError(
            f"{key}: {error.message}",
            hint="store plain Python values or tensors; turn others into these first",
            entry=key,
        ) from error
    return data


def decode(key: str, data: bytes) -> Any:
    """The value of an item; raises UnsupportedError for classes that are not plain."""
    try:
        records = StoredZip(PartialBytes(length=len(data), head=data))
        return _from_plain(decode_value(records.read("data.pkl")), records)
    except NotPlain as error:
        raise UnsupportedError(
            f"{key}: a value of class {error.class_name} is not loaded",
            hint="stock dcp.load unpickles it; do that only with a file you trust",
            entry=key,
        ) from error
    except DamagedError as error:
        raise DamagedError(f"{key}: {error.message}", hint=error.hint, entry=key) from error


def digest(value: Any) -> str:
    """A fingerprint that equal values share on every rank, however their objects are built."""
    state = hashlib.blake2b(digest_size=16)
    _feed(value, state.update)
    return state.hexdigest()


def _feed(value: Any, feed: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor):
        feed(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        feed(bytes(local_bytes(value).cpu().numpy().data))
    elif isinstance(value, dict):
        feed(f"{type(value).__name__} {len(value)}".encode())
        for key, item in value.items():
            _feed(key, feed)
            _feed(item, feed)
    elif isinstance(value, list | tuple):
        feed(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _feed(item, feed)
    elif isinstance(value, set | frozenset):
        feed(f"{type(value).__name__} {sorted(map(digest, value))}".encode())
    else:
        text = repr(value)
        feed(f"{type(value).__name__} {len(text)} {text}".encode("utf-8", "surrogatepass"))


def _from_plain(value: Any, records: StoredZip) -> Any:
    if isinstance(value, TensorRef):
        return _tensor(value, records)
    if isinstance(value, TorchSize):
        return torch.Size(value.dims)
    if isinstance(value, TorchDtype):
        return getattr(torch, value.name)
    if isinstance(value, TorchDevice):
        return (
            torch.device(value.type, value.index)
            if value.index is not None
            else torch.device(value.type)
        )
    if isinstance(value, OrderedDict):
        return OrderedDict((k, _from_plain(v, records)) for k, v in value.items())
    if isinstance(value, dict):
        return {_from_plain(k, records): _from_plain(v, records) for k, v in value.items()}
    if isinstance(value, list):
        return [_from_plain(item, records) for item in value]
    if isinstance(value, tuple):
        return tuple(_from_plain(item, records) for item in value)
    return value


def _tensor(ref: TensorRef, records: StoredZip) -> torch.Tensor:
    raw = bytearray(records.read(f"data/{ref.record}"))
    dtype = torch_dtype(ref.dtype)
    if not raw:
        return torch.empty(ref.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    tensor = torch.as_strided(flat, ref.shape, ref.strides, ref.storage_offset)
    if ref.conj:
        tensor = tensor.conj()
    if ref.neg:
        tensor = torch._neg_view(tensor)
    if ref.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=ref.requires_grad)
    return tensor.requires_grad_(ref.requires_grad)
