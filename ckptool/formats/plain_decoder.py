"""Reads the pickle of a plain value without unpickling: opcodes in, a plain value out.

Nothing that the pickle names is imported or called: a global is looked up in the table
below, and anything that is not there raises NotPlain with its name. Follows ``torch.save``
(persistent ids, ``torch._utils._rebuild_tensor_v2`` and ``_v3``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckptool.dtypes import DTYPES, DType, dtype_named
from ckptool.errors import DamagedError
from ckptool.formats.pickle_machine import Machine, check_key, kind_of
from ckptool.formats.plain_types import (
    MAX_DEPTH,
    NotPlain,
    PlainValue,
    TensorRef,
    TorchDevice,
    TorchDtype,
    TorchSize,
)

__all__ = ["decode_value"]

_INT64_END = 2**63


def decode_value(data: bytes | memoryview) -> PlainValue:
    """The plain value that ``data``, a ``data.pkl`` record, holds.

    Raises NotPlain for any class beyond plain ones, UnsupportedError for a dtype or an opcode
    that we do not know, DamagedError for bytes that are no such pickle.
    """
    value = _ValueMachine(bytes(data), what="the pickle of a value").run()
    if type(value) in (_Callable, _Storage, _StorageClass):
        raise NotPlain.named(kind_of(value))
    _check_nesting(value)
    return value


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    num_bytes: int
    dtype: DType | None  # None: untyped bytes
    device: str


@dataclass(frozen=True, slots=True)
class _StorageClass:
    dtype: DType | None


@dataclass(frozen=True, slots=True)
class _Callable:
    """A global that REDUCE may meet: ``build`` gets the arguments, which it does not trust."""

    name: str
    build: Callable[..., Any]


def _need(kind: type | tuple[type, ...], value: Any, what: str) -> Any:
    allowed = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in allowed:
        raise DamagedError(f"the pickle of a value has {type(value).__name__} for {what}")
    return value


def _dims(value: Any, what: str) -> tuple[int, ...]:
    dims = value.dims if type(value) is TorchSize else _need((tuple, list), value, what)
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < _INT64_END:
            raise DamagedError(f"the pickle of a value has {what} with a dim that is no size")
    return tuple(dims)


def _storage(pid: Any) -> _Storage:
    _need(tuple, pid, "a persistent id")
    if len(pid) != 5 or pid[0] != "storage":
        raise DamagedError("the pickle of a value has an unknown persistent id")
    _, kind, record, device, numel = pid
    dtype = _need(_StorageClass, kind, "a storage class").dtype
    _need(str, record, "a storage key")
    itemsize = 1 if dtype is None else dtype.itemsize
    num_bytes = _dims((numel,), "the storage size")[0] * itemsize
    return _Storage(record, num_bytes, dtype, _need(str, device, "a storage location"))


def _rebuild_v2(
    storage: Any,
    offset: Any,
    size: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
) -> TensorRef:
    dtype = _need(_Storage, storage, "a storage").dtype
    if dtype is None:
        raise DamagedError("the pickle of a value has an untyped storage without a dtype")
    return _tensor(storage, offset, size, strides, requires_grad, hooks, dtype, metadata)


def _rebuild_v3(
    storage: Any,
    offset: Any,
    size: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorRef:
    _need(_Storage, storage, "a storage")
    known = dtype_named(_need(TorchDtype, dtype, "a dtype").name)
    return _tensor(storage, offset, size, strides, requires_grad, hooks, known, metadata)


def _tensor(
    storage: _Storage,
    offset: Any,
    size: Any,
    strides: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: DType,
    metadata: Any,
) -> TensorRef:
    if hooks:
        raise NotPlain.named("torch.Tensor with backward hooks")
    flags = {} if metadata is None else _need(dict, metadata, "tensor flags")
    if not set(flags) <= {"conj", "neg"}:
        raise NotPlain.named("torch.Tensor with flags other than conj and neg")
    ref = TensorRef(
        record=storage.record,
        storage_num_bytes=storage.num_bytes,
        dtype=dtype,
        shape=_dims(size, "a tensor's shape"),
        strides=_dims(strides, "a tensor's strides"),
        storage_offset=_dims((offset,), "a storage offset")[0],
        conj="conj" in flags,  # torch takes a flag that is there as set, whatever its value
        neg="neg" in flags,
        requires_grad=bool(requires_grad),
        device=storage.device,
    )
    _check_tensor(ref)
    return ref


def _check_tensor(ref: TensorRef) -> None:
    if len(ref.shape) != len(ref.strides):
        raise DamagedError(f"a tensor's shape {ref.shape} and strides {ref.strides} differ in dims")
    if ref.num_bytes >= _INT64_END:
        raise DamagedError(f"a tensor's shape {ref.shape} is beyond 64 bits")
    if ref.num_elements == 0:
        return
    last = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=True))
    end = (ref.storage_offset + last + 1) * ref.dtype.itemsize
    if end > ref.storage_num_bytes:
        raise DamagedError(
            f"a tensor of shape {ref.shape} ends at byte {end} of a storage of "
            f"{ref.storage_num_bytes} bytes"
        )


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> TensorRef:
    ref: TensorRef = _need(TensorRef, data, "a parameter")
    if hooks:
        raise NotPlain.named("torch.nn.Parameter with backward hooks")
    return replace(ref, is_parameter=True, requires_grad=bool(requires_grad))


def _encode(text: Any, encoding: Any) -> bytes:
    if _need(str, encoding, "an encoding") not in ("latin1", "latin-1"):
        raise DamagedError(f"the pickle of a value has bytes in encoding {encoding[:40]!r}")
    return str(_need(str, text, "bytes")).encode("latin-1")


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    return bytearray(_encode(data, encoding) if encoding else _need(bytes, data, "a bytearray"))


def _empty_bytes() -> bytes:
    return b""


def _complex(real: Any, imag: Any) -> complex:
    return complex(_need(float, real, "a complex"), _need(float, imag, "a complex"))


def _set(items: Any = ()) -> set[Any]:
    return {check_key(item) for item in _need((list, tuple), items, "a set")}


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = _need((list, tuple), items, "an OrderedDict")
    return OrderedDict((check_key(key), value) for key, value in pairs)


def _size(dims: Any = ()) -> TorchSize:
    return TorchSize(_dims(dims, "a torch.Size"))


def _device(kind: Any, index: Any = None) -> TorchDevice:
    if index is not None:
        _need(int, index, "a device index")
    return TorchDevice(_need(str, kind, "a device"), index)


def _builtins(module: str) -> dict[tuple[str, str], Any]:
    makers: dict[str, Callable[..., Any]] = {
        "set": _set,
        "frozenset": _frozenset,
        "bytearray": _bytearray,
        "bytes": _empty_bytes,
        "complex": _complex,
    }
    return {(module, name): _Callable(f"builtins.{name}", make) for name, make in makers.items()}


_GLOBALS: dict[tuple[str, str], Any] = {
    **_builtins("builtins"),
    **_builtins("__builtin__"),
    ("collections", "OrderedDict"): _Callable("collections.OrderedDict", _ordered_dict),
    ("_codecs", "encode"): _Callable("_codecs.encode", _encode),
    ("torch", "Size"): _Callable("torch.Size", _size),
    ("torch", "device"): _Callable("torch.device", _device),
    ("torch._utils", "_rebuild_tensor_v2"): _Callable("_rebuild_tensor_v2", _rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _Callable("_rebuild_tensor_v3", _rebuild_v3),
    ("torch._utils", "_rebuild_parameter"): _Callable("_rebuild_parameter", _parameter),
    ("torch.storage", "UntypedStorage"): _StorageClass(None),
    **{
        (module, dtype.storage_class): _StorageClass(dtype)
        for dtype in DTYPES.values()
        if dtype.storage_class
        for module in ("torch", "torch.cuda")
    },
}

# what wraps another class: the class it wraps comes next, and that is the name to give
_WRAPPERS = {
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("copyreg", "__newobj_ex__"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}

_DTYPE_NAMES = {
    *DTYPES,
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 8)),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
}


def _global(module: str, name: str) -> Any:
    found = _GLOBALS.get((module, name))
    if found is not None:
        return found
    if module == "torch" and name in _DTYPE_NAMES:
        return TorchDtype(name)
    if (module, name) in _WRAPPERS:
        return _Callable(f"{module}.{name}", _refuse(f"{module}.{name}"))
    raise NotPlain.named(f"{module}.{name}"[:200])


def _refuse(name: str) -> Callable[..., Any]:
    def build(*arguments: Any) -> Any:
        raise NotPlain.named(name)

    return build


class _ValueMachine(Machine):
    def find(self, module: str, name: str) -> Any:
        return _global(module, name)

    def call(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if type(target) is not _Callable:
            raise NotPlain.named(f"a call of {kind_of(target)}")
        return target.build(*arguments)

    def instance(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if target is _GLOBALS["collections", "OrderedDict"] and not arguments:
            return OrderedDict()
        raise NotPlain.named(f"an instance of {kind_of(target)}")

    def set_state(self, target: Any, state: Any) -> None:
        """Only what ``Module.state_dict()`` leaves on its OrderedDict."""
        if type(target) is not OrderedDict or type(state) is not dict or list(state) != _METADATA:
            raise NotPlain.named(f"{kind_of(target)} with attributes")
        vars(target).update(state)

    def persistent(self, pid: Any) -> Any:
        return _storage(pid)


_METADATA = ["_metadata"]

_LEAVES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    TorchSize,
    TorchDtype,
    TorchDevice,
    TensorRef,
)


def _check_nesting(root: PlainValue) -> None:
    """Refuse cycles, depth beyond MAX_DEPTH and leftovers such as a bare global."""
    depths: dict[int, int] = {}
    open_ids: set[int] = set()
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        value, leaving = todo.pop()
        if type(value) in _LEAVES or (not leaving and id(value) in depths):
            continue
        children = _children(value)
        if leaving:
            open_ids.discard(id(value))
            depth = 1 + max((depths.get(id(child), 0) for child in children), default=0)
            if depth > MAX_DEPTH:
                raise NotPlain.named(f"a value nested deeper than {MAX_DEPTH}")
            depths[id(value)] = depth
            continue
        if id(value) in open_ids:
            raise NotPlain.named("a value that contains itself")
        open_ids.add(id(value))
        todo.append((value, True))
        todo.extend((child, False) for child in children)


def _children(value: Any) -> list[Any]:
    if type(value) in (list, tuple, set, frozenset):
        return list(value)
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if type(value) is OrderedDict:
        return [*value.keys(), *value.values(), *vars(value).values()]
    raise NotPlain.named(getattr(value, "name", type(value).__name__))
