"""The classes that a DCP ``.metadata`` names, as stand-ins: the allow-list, each name visible.

A stand-in holds what the pickle says and does nothing. Names are those of torch 2.0 to 2.14
(``torch.distributed.checkpoint.metadata`` and ``.filesystem``).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptool.dtypes import DTYPES
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.pickle_machine import Machine, check_key, kind_of

__all__ = [
    "CHUNK_CLASS",
    "INFO_CLASS",
    "KEY_CLASS",
    "SIZE_FUNCTION",
    "ChunkBox",
    "MetadataMachine",
    "Record",
    "StorageInfo",
    "StorageKey",
    "UnknownDtype",
]


class ChunkBox:
    """ChunkStorageMetadata."""

    __slots__ = ("offsets", "sizes")
    offsets: Any
    sizes: Any


class StorageKey:
    """MetadataIndex; ``index`` is a hint, so it takes no part in finding a chunk."""

    __slots__ = ("fqn", "index", "offset")
    fqn: Any
    index: Any
    offset: Any


class StorageInfo:
    """_StorageInfo."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any


class Record:
    """Any other class of the list, with the attributes that its state gave."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.fields: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class UnknownDtype:
    """A ``torch.<name>`` that looks like a dtype and is none that we know."""

    name: str


@dataclass(frozen=True, slots=True)
class _Class:
    name: str
    make: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    build: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Inert:
    """A value of no use to us: a layout, a memory format."""

    name: str


def _slotted(kind: type) -> Callable[[], Any]:
    names = kind.__slots__  # type: ignore[attr-defined]

    def make() -> Any:
        made = kind()
        for name in names:
            setattr(made, name, None)
        return made

    return make


def _record(name: str) -> _Class:
    return _Class(name, lambda: Record(name))


def _size(dims: Any = ()) -> tuple[Any, ...]:
    if type(dims) not in (tuple, list):
        raise DamagedError(f"a torch.Size is made of {kind_of(dims)}")
    return tuple(dims)


def _path(*parts: Any) -> _Inert:
    return _Inert("path")


def _enum(value: Any) -> _Inert:
    return _Inert("memory_format")


def _layout(name: Any) -> _Inert:
    return _Inert("layout")


def _set(items: Any = ()) -> set[Any]:
    return {check_key(item) for item in _size(items)}


def _ordered_dict(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((check_key(key), value) for key, value in _size(items))


_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

CHUNK_CLASS = _Class("ChunkBox", _slotted(ChunkBox))
KEY_CLASS = _Class("StorageKey", _slotted(StorageKey))
INFO_CLASS = _Class("StorageInfo", _slotted(StorageInfo))
SIZE_FUNCTION = _Function("torch.Size", _size)

_GLOBALS: dict[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): _record("Metadata"),
    (f"{_DCP}.metadata", "StorageMeta"): _record("StorageMeta"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _record("TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _record("BytesStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"): _record("TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): CHUNK_CLASS,
    (f"{_DCP}.metadata", "MetadataIndex"): KEY_CLASS,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Function("_MEM_FORMAT_ENCODING", _enum),
    (f"{_DCP}.filesystem", "_StorageInfo"): INFO_CLASS,
    # torch 2.0 to 2.2 kept these two elsewhere
    (_SHARDED, "TensorProperties"): _record("TensorProperties"),
    (_SHARDED, "MEM_FORMAT_ENCODING"): _Function("MEM_FORMAT_ENCODING", _enum),
    ("torch", "Size"): SIZE_FUNCTION,
    ("torch.serialization", "_get_layout"): _Function("_get_layout", _layout),
    ("collections", "OrderedDict"): _Function("OrderedDict", _ordered_dict),
    ("builtins", "set"): _Function("set", _set),
    ("builtins", "frozenset"): _Function("frozenset", lambda items=(): frozenset(_set(items))),
    **{
        (module, name): _Function("path", _path)
        for module in ("pathlib", "pathlib._local")  # Python 3.13 moved them and moved them back
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{
        ("torch", name): _Inert(name)
        for name in ("strided", "contiguous_format", "preserve_format", "channels_last")
    },
}

_LIKE_DTYPE = re.compile(r"b?float\w*|u?int\d\w*|complex\w*|bits\w+|qu?int\w+")

# modules whose names in a .metadata mean harm; the word is for the message, none is imported
_HOSTILE = {
    *("builtins", "__builtin__", "os", "posix", "nt", "sys", "subprocess", "commands", "shutil"),
    *("socket", "ctypes", "importlib", "imp", "runpy", "code", "codeop", "pty", "pdb", "timeit"),
    *("operator", "functools", "types", "inspect", "gc", "signal", "threading", "multiprocessing"),
    *("pickle", "_pickle", "marshal", "shelve", "webbrowser", "urllib", "http", "ftplib", "io"),
    *("_io", "asyncio", "concurrent", "tempfile", "zipimport", "pkgutil", "platform", "nturl2path"),
    *("copyreg", "copy_reg", "itertools", "linecache", "bdb", "trace", "doctest", "unittest"),
    *("pip", "setuptools", "distutils", "ensurepip", "venv", "idlelib", "lib2to3", "antigravity"),
}


def _find(module: str, name: str) -> Any:
    found = _GLOBALS.get((module, name))
    if found is not None:
        return found
    if module == "torch" and (name in DTYPES or _LIKE_DTYPE.fullmatch(name)):
        return DTYPES.get(name) or UnknownDtype(name[:80])
    full = f"{module}.{name}"[:200]
    if module.split(".", 1)[0] in _HOSTILE:
        raise DamagedError(
            f".metadata names {full}, which has no place there: it may be hostile",
            hint="do not load it with torch; ask where the checkpoint came from",
            class_name=full,
        )
    raise UnsupportedError(
        f".metadata names the class {full}, which we do not know",
        hint="was it written by a newer torch? pip install -U ckptool",
        class_name=full,
    )


class MetadataMachine(Machine):
    """Runs the pickle of a ``.metadata`` on stand-ins."""

    def find(self, module: str, name: str) -> Any:
        return _find(module, name)

    def call(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if type(target) is not _Function:
            raise self.damaged(f"it calls {kind_of(target)}")
        return target.build(*arguments)

    def instance(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        if type(target) is not _Class or arguments:
            raise self.damaged(f"it makes an instance of {kind_of(target)}")
        return target.make()

    def set_state(self, target: Any, state: Any) -> None:
        fields = _fields(state)
        if type(target) is Record:
            target.fields = {"": state} if fields is None else fields
        elif type(target) in (ChunkBox, StorageKey, StorageInfo) and fields is not None:
            for name in type(target).__slots__:
                setattr(target, name, fields.get(name))
        else:
            raise self.damaged(f"it sets the state of {kind_of(target)}")


def _fields(state: Any) -> dict[Any, Any] | None:
    """The attributes of a state: a dict, or for a class with slots a pair of which one may be."""
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        return {**(state[0] if type(state[0]) is dict else {}), **state[1]}
    return state if type(state) is dict else None
