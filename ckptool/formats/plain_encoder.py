"""Writes a plain value as a pickle of protocol 2, as the ``data.pkl`` of ``torch.save`` is.

Emits opcodes directly and names only globals that ``torch.load(weights_only=True)`` knows
(frozenset excepted, which no torch allows there). What a value shares stays shared.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ckptool.dtypes import DType
from ckptool.errors import UnsupportedError
from ckptool.formats.plain_types import (
    MAX_DEPTH,
    NotPlain,
    PlainValue,
    TensorRef,
    TorchDevice,
    TorchDtype,
    TorchSize,
)

__all__ = ["encode_value"]


def encode_value(
    value: PlainValue, *, place_tensor: Callable[[TensorRef], TensorRef] | None = None
) -> bytes:
    """The protocol-2 pickle of a plain value.

    ``place_tensor`` gets every TensorRef and returns the one to write: this is where a writer
    gives a tensor the record that its own file keeps it in. Raises NotPlain for anything else,
    and for nesting deeper than decode_value reads.
    """
    encoder = _Encoder(place_tensor)
    encoder.save(value, 0)
    return b"\x80\x02" + b"".join(encoder.out) + b"."


class _Encoder:
    def __init__(self, place_tensor: Callable[[TensorRef], TensorRef] | None) -> None:
        self.out: list[bytes] = []
        self.place_tensor = place_tensor
        self.memo: dict[Any, int] = {}
        self.kept: list[Any] = []  # objects whose id is in the memo

    def save(self, value: PlainValue, depth: int) -> None:
        # the decoder counts containers only; the tuples of a tensor or of bytes lie below those
        if depth > MAX_DEPTH + 4:
            raise NotPlain.named(f"a value nested deeper than {MAX_DEPTH}")
        try:
            writer = _WRITERS[type(value)]
        except KeyError:
            kind = type(value)
            raise NotPlain.named(f"{kind.__module__}.{kind.__qualname__}") from None
        writer(self, value, depth + 1)

    def emit(self, *opcodes: bytes) -> None:
        self.out.extend(opcodes)

    def recall(self, key: Any) -> bool:
        """Write a memo's GET where ``key`` was put before."""
        index = self.memo.get(key)
        if index is None:
            return False
        self.emit(_indexed(b"h", b"j", index))
        return True

    def put(self, key: Any) -> None:
        index = len(self.memo)
        self.memo[key] = index
        self.emit(_indexed(b"q", b"r", index))

    def put_object(self, value: Any) -> None:
        self.kept.append(value)
        self.put(id(value))

    def find(self, module: str, name: str) -> None:
        key = ("global", module, name)
        if not self.recall(key):
            self.emit(b"c", module.encode(), b"\n", name.encode(), b"\n")
            self.put(key)

    def call(self, module: str, name: str, arguments: tuple[Any, ...], depth: int) -> None:
        self.find(module, name)
        self.arguments(arguments, depth)
        self.emit(b"R")

    def arguments(self, items: tuple[Any, ...], depth: int) -> None:
        """A tuple that is written once and never shared, so without a memo slot."""
        if not items:
            self.emit(b")")
            return
        if len(items) > 3:
            self.emit(b"(")
        for item in items:
            self.save(item, depth)
        self.emit(_TUPLE_CODES[len(items)] if len(items) <= 3 else b"t")


_TUPLE_CODES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def _indexed(short: bytes, long: bytes, index: int) -> bytes:
    return short + bytes([index]) if index < 256 else long + struct.pack("<I", index)


def _save_none(e: _Encoder, value: None, depth: int) -> None:
    e.emit(b"N")


def _save_bool(e: _Encoder, value: bool, depth: int) -> None:
    e.emit(b"\x88" if value else b"\x89")


def _save_int(e: _Encoder, value: int, depth: int) -> None:
    e.emit(int_opcode(value))


def int_opcode(value: int) -> bytes:
    """The shortest opcode for an int, as Python's own pickler chooses."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def _save_float(e: _Encoder, value: float, depth: int) -> None:
    e.emit(b"G", struct.pack(">d", value))


def _save_complex(e: _Encoder, value: complex, depth: int) -> None:
    e.call("__builtin__", "complex", (value.real, value.imag), depth)


def _save_str(e: _Encoder, value: str, depth: int) -> None:
    if not e.recall(("str", value)):
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) >= 2**32:
            raise UnsupportedError("a text of 4 GiB or more does not fit a pickle of protocol 2")
        e.emit(b"X", struct.pack("<I", len(raw)), raw)
        e.put(("str", value))


def _save_bytes(e: _Encoder, value: bytes, depth: int) -> None:
    if e.recall(id(value)):
        return
    if value:
        e.call("_codecs", "encode", (value.decode("latin-1"), "latin1"), depth)
    else:
        e.call("__builtin__", "bytes", (), depth)
    e.put_object(value)


def _save_bytearray(e: _Encoder, value: bytearray, depth: int) -> None:
    if e.recall(id(value)):
        return
    e.call("__builtin__", "bytearray", (value.decode("latin-1"), "latin-1"), depth)
    e.put_object(value)


def _save_tuple(e: _Encoder, value: tuple[Any, ...], depth: int) -> None:
    if not value:
        e.emit(b")")
    elif not e.recall(id(value)):
        e.arguments(value, depth)
        e.put_object(value)


def _save_list(e: _Encoder, value: list[Any], depth: int) -> None:
    if e.recall(id(value)):
        return
    e.emit(b"]")
    e.put_object(value)
    if value:
        e.emit(b"(")
        for item in value:
            e.save(item, depth)
        e.emit(b"e")


def _save_dict(e: _Encoder, value: dict[Any, Any], depth: int) -> None:
    if e.recall(id(value)):
        return
    e.emit(b"}")
    e.put_object(value)
    _save_items(e, value, depth)


def _save_ordered_dict(e: _Encoder, value: OrderedDict[Any, Any], depth: int) -> None:
    if e.recall(id(value)):
        return
    e.call("collections", "OrderedDict", (), depth)
    e.put_object(value)
    _save_items(e, value, depth)
    if vars(value):
        e.save(dict(vars(value)), depth)
        e.emit(b"b")


def _save_items(e: _Encoder, value: dict[Any, Any], depth: int) -> None:
    if value:
        e.emit(b"(")
        for key, item in value.items():
            e.save(key, depth)
            e.save(item, depth)
        e.emit(b"u")


def _save_set(e: _Encoder, value: set[Any] | frozenset[Any], depth: int) -> None:
    if e.recall(id(value)):
        return
    name = "set" if type(value) is set else "frozenset"
    e.find("__builtin__", name)
    e.emit(b"](")
    for item in value:
        e.save(item, depth)
    e.emit(b"e\x85R")
    e.put_object(value)


def _save_size(e: _Encoder, value: TorchSize, depth: int) -> None:
    e.call("torch", "Size", (value.dims,), depth)


def _save_dtype(e: _Encoder, value: TorchDtype, depth: int) -> None:
    e.find("torch", value.name)


def _save_device(e: _Encoder, value: TorchDevice, depth: int) -> None:
    index = () if value.index is None else (value.index,)
    e.call("torch", "device", (value.type, *index), depth)


def _save_tensor(e: _Encoder, value: TensorRef, depth: int) -> None:
    ref = value if e.place_tensor is None else e.place_tensor(value)
    if ref.is_parameter:
        e.find("torch._utils", "_rebuild_parameter")
    version = "_rebuild_tensor_v2" if ref.dtype.storage_class else "_rebuild_tensor_v3"
    e.find("torch._utils", version)
    e.emit(b"(")
    _save_storage(e, ref, depth)
    strided = (ref.storage_offset, ref.shape, ref.strides)
    # a parameter's own flag stands on the parameter; the tensor in it is a plain one
    for item in (*strided, ref.requires_grad and not ref.is_parameter):
        e.save(item, depth)
    e.call("collections", "OrderedDict", (), depth)
    if ref.dtype.storage_class is None:
        e.find("torch", ref.dtype.name)
    if ref.conj or ref.neg:
        # torch takes a flag that is there as set, whatever its value
        flags = {"conj": ref.conj, "neg": ref.neg}
        e.save({name: True for name, is_set in flags.items() if is_set}, depth)
    e.emit(b"tR")
    if ref.is_parameter:
        e.save(ref.requires_grad, depth)
        e.call("collections", "OrderedDict", (), depth)
        e.emit(b"\x87R")


def _save_storage(e: _Encoder, ref: TensorRef, depth: int) -> None:
    e.emit(b"(")
    e.save("storage", depth)
    _find_storage_class(e, ref.dtype)
    itemsize = ref.dtype.itemsize if ref.dtype.storage_class else 1
    for item in (ref.record, ref.device, ref.storage_num_bytes // itemsize):
        e.save(item, depth)
    e.emit(b"tQ")


def _find_storage_class(e: _Encoder, dtype: DType) -> None:
    if dtype.storage_class:
        e.find("torch", dtype.storage_class)
    else:
        e.find("torch.storage", "UntypedStorage")


_WRITERS: dict[type, Callable[[_Encoder, Any, int], None]] = {
    type(None): _save_none,
    bool: _save_bool,
    int: _save_int,
    float: _save_float,
    complex: _save_complex,
    str: _save_str,
    bytes: _save_bytes,
    bytearray: _save_bytearray,
    tuple: _save_tuple,
    list: _save_list,
    dict: _save_dict,
    OrderedDict: _save_ordered_dict,
    set: _save_set,
    frozenset: _save_set,
    TorchSize: _save_size,
    TorchDtype: _save_dtype,
    TorchDevice: _save_device,
    TensorRef: _save_tensor,
}
