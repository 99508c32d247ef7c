"""Plain values: the pickle of one, decoded without unpickling, encoded again, and described.

``decode_value`` and ``encode_value`` are each other's inverse for what plain_types.py lists;
``describe`` turns a value into the few words that ``inspect`` shows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from ckptool.formats.plain_decoder import decode_value
from ckptool.formats.plain_encoder import encode_value
from ckptool.formats.plain_types import (
    NotPlain,
    PlainValue,
    TensorRef,
    TorchDevice,
    TorchDtype,
    TorchSize,
)

__all__ = [
    "NotPlain",
    "PlainValue",
    "TensorRef",
    "TorchDevice",
    "TorchDtype",
    "TorchSize",
    "decode_value",
    "describe",
    "encode_value",
    "short_repr",
]

_TYPE_NAMES = {TorchSize: "torch.Size", TorchDtype: "torch.dtype", TorchDevice: "torch.device"}


def describe(value: PlainValue, *, max_chars: int = 80) -> dict[str, Any]:
    """``kind``, ``type`` and ``repr`` of a plain value, as JSON; ``repr`` is cut short."""
    kind = "tensor" if type(value) is TensorRef else "value"
    return {"kind": kind, "type": type_name(value), "repr": short_repr(value, max_chars=max_chars)}


def type_name(value: PlainValue) -> str:
    """What a person calls the type: torch's own name for a stand-in."""
    if type(value) is TensorRef:
        return "torch.nn.Parameter" if value.is_parameter else "torch.Tensor"
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def short_repr(value: PlainValue, *, max_chars: int = 80) -> str:
    """``repr`` of a plain value, cut at ``max_chars``; never builds much more than that."""
    parts: list[str] = []
    left = max_chars + 1
    for part in _parts(value, max_chars + 1):
        parts.append(part)
        left -= len(part)
        if left <= 0:
            break
    text = "".join(parts)
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _parts(value: PlainValue, max_chars: int) -> Iterable[str]:
    kind = type(value)
    if kind is OrderedDict:
        yield "OrderedDict("
        yield from _items(value, max_chars)
        yield ")"
    elif kind is dict:
        yield from _items(value, max_chars)
    elif kind in _BRACKETS and value:
        opening, closing = _BRACKETS[kind]
        yield opening
        yield from _joined(value, max_chars)
        yield "," + closing if kind is tuple and len(value) == 1 else closing
    else:
        yield _leaf(value, max_chars)


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def _joined(values: Iterable[PlainValue], max_chars: int) -> Iterable[str]:
    for number, value in enumerate(values):
        if number:
            yield ", "
        yield from _parts(value, max_chars)


def _items(value: dict[Any, Any], max_chars: int) -> Iterable[str]:
    yield "{"
    for number, (key, item) in enumerate(value.items()):
        yield ", " if number else ""
        yield from _parts(key, max_chars)
        yield ": "
        yield from _parts(item, max_chars)
    yield "}"


def _leaf(value: PlainValue, max_chars: int) -> str:
    if type(value) is TensorRef:
        shape = "x".join(map(str, value.shape)) or "0-dim"
        return f"<tensor {value.dtype.name} {shape}>"
    if type(value) is int and value.bit_length() > 4 * max_chars:
        return f"<int of {value.bit_length()} bits>"
    if type(value) in (str, bytes, bytearray):
        return repr(value[:max_chars])
    return repr(value)
