"""Reads the pickle of a plain value without unpickling: opcodes in, a plain value out.

Nothing that the pickle names is imported or called: a global is looked up in the table
below, and anything that is not there raises NotPlain with its name. Every opcode is bounded
by the bytes at hand, memo slots are a dict, and nesting is bounded, so that hostile bytes
cost no more than their length. Follows PEP 307, PEP 3154, PEP 574 (opcodes) and
``torch.save`` (persistent ids, ``torch._utils._rebuild_tensor_v2`` and ``_v3``).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckptool.dtypes import DTYPES, DType, dtype_named
from ckptool.errors import DamagedError, UnsupportedError
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
_MAX_KEY_NODES = 1000


def decode_value(data: bytes | memoryview) -> PlainValue:
    """The plain value that ``data``, a ``data.pkl`` record, holds.

    Raises NotPlain for any class beyond plain ones, UnsupportedError for a dtype or an opcode
    that we do not know, DamagedError for bytes that are no such pickle.
    """
    machine = _Machine(bytes(data))
    try:
        value = machine.run()
        _check_nesting(value)
    except (NotPlain, UnsupportedError, DamagedError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as e:
        raise DamagedError(
            f"the pickle of a value is damaged near byte {machine.position}: {e}"
        ) from e
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


class _Mark:
    pass


_MARK = _Mark()


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
        conj=bool(flags.get("conj")),
        neg=bool(flags.get("neg")),
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
    return {_key(item) for item in _need((list, tuple), items, "a set")}


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = _need((list, tuple), items, "an OrderedDict")
    return OrderedDict((_key(key), value) for key, value in pairs)


def _size(dims: Any = ()) -> TorchSize:
    return TorchSize(_dims(dims, "a torch.Size"))


def _device(kind: Any, index: Any = None) -> TorchDevice:
    if index is not None:
        _need(int, index, "a device index")
    return TorchDevice(_need(str, kind, "a device"), index)


def _key(value: Any) -> Any:
    """The value, if hashing it is safe: Python's hash of a tuple walks it without a bound."""
    todo, num_nodes = [value], 0
    while todo:
        node = todo.pop()
        num_nodes += 1
        if num_nodes > _MAX_KEY_NODES:
            raise NotPlain.named("a key of more than a thousand parts")
        if type(node) is tuple:
            todo.extend(node)
        else:
            hash(node)
    return value


def _kind(value: Any) -> str:
    if type(value) is TorchDtype:
        return repr(value)
    return str(getattr(value, "name", type(value).__name__))


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


class _Machine:
    """The pickle machine: a stack, a memo, and one method for each opcode."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> PlainValue:
        while True:
            code = self.data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                break
            handler = _OPCODES.get(code)
            if handler is None:
                raise UnsupportedError(
                    f"the pickle of a value has opcode {code:#x} at byte {self.position - 1}, "
                    "which torch.save does not write"
                )
            handler(self)
        (value,) = self.stack
        if value is _MARK or type(value) in (_Callable, _Storage, _StorageClass):
            raise NotPlain.named(getattr(value, "name", "torch.storage"))
        return value

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise DamagedError(f"the pickle of a value ends at byte {len(self.data)}, cut short")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self, num_bytes: int) -> str:
        return self.take(num_bytes).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        taken = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return taken

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise DamagedError(f"the pickle of a value is damaged at byte {self.position - 1}")
        return value

    def pop_to_mark(self) -> list[Any]:
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise DamagedError(
                    f"the pickle of a value lacks a mark at byte {self.position - 1}"
                )
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def top(self, *kinds: type) -> Any:
        return _need(kinds, self.stack[-1], "a container")

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def put(self, index: int) -> None:
        value = self.stack[-1]
        if value is _MARK:
            raise DamagedError(f"the pickle of a value is damaged at byte {self.position - 1}")
        self.memo[index] = value

    def get(self, index: int) -> None:
        self.push(self.memo[index])

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def appends(self) -> None:
        items = self.pop_to_mark()
        self.top(list).extend(items)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.top(dict, OrderedDict)[_key(key)] = value

    def set_items(self) -> None:
        items = self.pop_to_mark()
        if len(items) % 2:
            raise DamagedError("the pickle of a value has a key without a value")
        target = self.top(dict, OrderedDict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def add_items(self) -> None:
        items = self.pop_to_mark()
        self.top(set).update(_key(item) for item in items)

    def find_global(self) -> None:
        self.push(_global(self.line(), self.line()))

    def find_stacked_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.push(_global(_need(str, module, "a module"), _need(str, name, "a name")))

    def reduce(self) -> None:
        arguments, target = self.pop(), self.pop()
        _need(tuple, arguments, "arguments")
        if type(target) is not _Callable:
            raise NotPlain.named(f"a call of {_kind(target)}")
        self.push(target.build(*arguments))

    def new_object(self) -> None:
        arguments, target = self.pop(), self.pop()
        if type(target) is not _Callable:
            raise NotPlain.named(f"an instance of {_kind(target)}")
        if target.build is _ordered_dict and not arguments:
            self.push(OrderedDict())
        else:
            raise NotPlain.named(f"an instance of {target.name}")

    def build(self) -> None:
        """Set attributes: only those that ``Module.state_dict()`` leaves on its OrderedDict."""
        state = self.pop()
        target = self.stack[-1]
        known = type(target) is OrderedDict and type(state) is dict and set(state) <= {"_metadata"}
        if not known:
            raise NotPlain.named(f"{type(target).__name__} with attributes")
        vars(target).update(state)

    def persistent(self) -> None:
        self.push(_storage(self.pop()))


def _signed(machine: _Machine, size_bytes: int) -> None:
    size = machine.number(size_bytes)
    machine.push(int.from_bytes(machine.take(size), "little", signed=True))


def _check_protocol(machine: _Machine) -> None:
    protocol = machine.number(1)
    if protocol > 5:
        raise UnsupportedError(f"a value is pickled with protocol {protocol}; we know up to 5")


# https://docs.python.org/3/library/pickletools.html names and explains each
_OPCODES: dict[int, Callable[[_Machine], object]] = {
    0x80: _check_protocol,
    0x95: lambda m: m.number(8),  # FRAME
    ord("("): lambda m: m.push(_MARK),
    ord("0"): lambda m: m.pop(),  # POP
    ord("1"): lambda m: m.pop_to_mark(),  # POP_MARK
    ord("2"): lambda m: m.push(m.stack[-1]),  # DUP
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    0x8A: lambda m: _signed(m, 1),
    0x8B: lambda m: _signed(m, 4),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): lambda m: m.push(m.text(m.number(4))),
    0x8C: lambda m: m.push(m.text(m.number(1))),
    0x8D: lambda m: m.push(m.text(m.number(8))),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    0x8E: lambda m: m.push(m.take(m.number(8))),
    0x96: lambda m: m.push(bytearray(m.take(m.number(8)))),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("]"): lambda m: m.push([]),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("}"): lambda m: m.push({}),
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    0x8F: lambda m: m.push(set()),
    0x90: _Machine.add_items,
    0x91: lambda m: m.push(_frozenset(m.pop_to_mark())),
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.get(m.number(1)),
    ord("j"): lambda m: m.get(m.number(4)),
    ord("c"): _Machine.find_global,
    0x93: _Machine.find_stacked_global,
    ord("R"): _Machine.reduce,
    0x81: _Machine.new_object,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}

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
