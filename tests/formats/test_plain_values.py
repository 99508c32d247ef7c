"""Plain values: decoded without unpickling, encoded so that Python and torch read them back."""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_cases import Golden, golden_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES
from ckptool.formats.dcp_item import parse_value_item
from ckptool.formats.dcp_metadata import read_metadata
from ckptool.formats.plain_types import MAX_DEPTH
from ckptool.formats.plain_values import (
    NotPlain,
    TensorRef,
    TorchDevice,
    TorchDtype,
    TorchSize,
    decode_value,
    describe,
    encode_value,
    short_repr,
)

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**600), 2**600)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.booleans()
VALUES = st.recursive(
    LEAVES | st.binary().map(bytearray) | st.sets(KEYS) | st.frozensets(KEYS),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
    ),
    max_leaves=20,
)


def same(one: Any, two: Any) -> bool:
    """Equal, and of equal types all the way down."""
    return bool(one == two) and repr_of(one) == repr_of(two)


def repr_of(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    if isinstance(value, dict):
        return type(value), [(repr_of(k), repr_of(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [repr_of(v) for v in value]
    return type(value), repr(value)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, protocol=st.integers(2, 5))
def test_python_pickles_decode(value: Any, protocol: int) -> None:
    """Whatever Python pickles of plain types decodes to an equal value of equal types."""
    assert same(decode_value(pickle.dumps(value, protocol)), value)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_python_reads_what_is_encoded(value: Any) -> None:
    """Python's unpickler and our decoder read the same value from what we encode."""
    data = encode_value(value)
    assert same(pickle.loads(data), value)
    assert same(decode_value(data), value)


def saved(value: Any) -> bytes:
    """The data.pkl of torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return archive.read(name)


def loaded(value: Any, pickled: bytes) -> Any:
    """What torch.load(weights_only=True) gives when ``pickled`` replaces a file's data.pkl."""
    file, changed = io.BytesIO(), io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("/data.pkl") else old.read(name))
    changed.seek(0)
    return torch.load(changed, weights_only=True)


def tensor_of(name: str) -> torch.Tensor:
    return torch.arange(64, dtype=torch.uint8).reshape(4, 16).view(getattr(torch, name))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_tensor_of_every_dtype(name: str) -> None:
    """A saved tensor decodes to a reference, and encoded again torch loads it bit for bit."""
    tensor = tensor_of("uint8" if name == "bool" else name)
    tensor = tensor > 9 if name == "bool" else tensor
    ref = decode_value(saved(tensor))
    shape, strides = tuple(tensor.shape), tensor.stride()
    assert ref == TensorRef("0", tensor.nbytes, DTYPES[name], shape, strides)
    again = loaded(tensor, encode_value(ref))
    assert again.dtype is tensor.dtype
    assert again.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_views_keep_strides_and_offsets() -> None:
    """Transposed, sliced and channels_last tensors keep how they lie in their storage."""
    base = torch.arange(24.0).reshape(1, 2, 3, 4)
    for view in (base[0, 1].t(), base[..., 1:3], base.to(memory_format=torch.channels_last)):
        ref = decode_value(saved(view))
        assert (ref.shape, ref.strides) == (tuple(view.shape), view.stride())
        assert ref.storage_offset == view.storage_offset()
        assert ref.storage_numel == 24
        assert ref.is_contiguous == view.is_contiguous()
        assert not ref.is_whole_storage
        assert torch.equal(loaded(view, encode_value(ref)), view)


def test_conj_and_neg_flags() -> None:
    """Lazily conjugated and negated tensors keep their flags."""
    base = torch.view_as_complex(torch.arange(8.0).reshape(4, 2))
    conj, neg = base.conj(), base.conj().imag
    assert (decode_value(saved(conj)).conj, decode_value(saved(conj)).neg) == (True, False)
    assert (decode_value(saved(neg)).conj, decode_value(saved(neg)).neg) == (False, True)
    for tensor in (conj, neg):
        again = loaded(tensor, encode_value(decode_value(saved(tensor))))
        assert torch.equal(again, tensor)
        assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters(requires_grad: bool) -> None:
    """A Parameter stays one, and keeps whether it wants a gradient."""
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=requires_grad)
    ref = decode_value(saved(parameter))
    assert (ref.is_parameter, ref.requires_grad) == (True, requires_grad)
    again = loaded(parameter, encode_value(ref))
    assert type(again) is torch.nn.Parameter
    assert again.requires_grad == requires_grad


def test_tensors_inside_values_are_placed() -> None:
    """Tensors inside a value are references; a writer may give them other records."""
    value = {"a": (torch.ones(2), 1), "b": [torch.zeros(3), torch.Size([2]), torch.float16]}
    decoded = decode_value(saved(value))
    assert decoded["a"][0].record == "0"
    assert decoded["b"][1:] == [TorchSize((2,)), TorchDtype("float16")]
    swapped = encode_value(
        decoded, place_tensor=lambda ref: replace(ref, record={"0": "7", "1": "8"}[ref.record])
    )
    assert decode_value(swapped)["b"][0].record == "8"


def test_torch_stand_ins() -> None:
    """torch.Size, dtype and device become stand-ins that look like them, and go back."""
    value = [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")]
    decoded = decode_value(saved(value))
    assert decoded == [
        TorchSize((2, 3)),
        TorchDtype("bfloat16"),
        TorchDevice("cuda", 1),
        TorchDevice("cpu"),
    ]
    assert repr(decoded) == repr(value)
    assert loaded(value, encode_value(decoded)) == value


def test_state_dict_of_a_module_keeps_its_metadata() -> None:
    """An OrderedDict with `_metadata`, as Module.state_dict() gives it, keeps both."""
    state = torch.nn.Linear(2, 2).state_dict()
    decoded = decode_value(saved(state))
    assert list(decoded) == ["weight", "bias"]
    again = loaded(state, encode_value(decoded))
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    assert torch.equal(again["weight"], state["weight"])


def test_what_is_shared_stays_shared() -> None:
    """One list in two places is one list again."""
    inner: list[int] = [1]
    again = pickle.loads(encode_value(decode_value(pickle.dumps([inner, inner], 2))))
    assert again[0] is again[1]


class Custom:
    pass


class CustomTensor(torch.Tensor):
    pass


def sparse() -> torch.Tensor:
    return torch.ones(2).to_sparse()


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Custom, "Custom"),
        (lambda: torch.ones(2).as_subclass(CustomTensor), "CustomTensor"),
        (sparse, "_rebuild_sparse_tensor"),
        (quantized, "_rebuild_qtensor"),
        (lambda: [1, {"a": math.sqrt}], "sqrt"),
        (lambda: type, "type"),
    ],
    ids=["object", "subclass", "sparse", "quantized", "function", "class"],
)
@pytest.mark.filterwarnings("ignore")
def test_other_classes_are_named(make: Callable[[], Any], name: str) -> None:
    """A value of any other class is not plain, and its class is named."""
    with pytest.raises(NotPlain) as caught:
        decode_value(saved(make()))
    assert name in caught.value.class_name


def test_attributes_on_a_tensor_are_not_lost_silently() -> None:
    """A tensor with attributes of its own is not a plain one."""
    tensor = torch.ones(2)
    tensor.note = 5  # type: ignore[attr-defined]
    with pytest.raises(NotPlain):
        decode_value(saved(tensor))


def test_nesting_is_bounded_alike_on_both_sides() -> None:
    """What decodes encodes, up to the same depth; one more is refused by both."""

    def nested(depth: int) -> Any:
        value: Any = b"leaf"
        for _ in range(depth):
            value = [value]
        return value

    deepest = nested(MAX_DEPTH)
    assert decode_value(encode_value(decode_value(pickle.dumps(deepest)))) == deepest
    for refused in (lambda v: decode_value(pickle.dumps(v)), encode_value):
        with pytest.raises(NotPlain):
            refused(nested(MAX_DEPTH + 9))


NOT_PLAIN = {
    "dataclass": "states.Config",
    "date": "datetime.date",
    "enum": "states.Mode",
    "numpy_array": "numpy.ndarray",
    "numpy_scalar": "numpy",
    "path": "pathlib.PurePosixPath",
}
GOLDEN = [case for case in golden_cases() if (case.path / ".metadata").exists()]


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_values(case: Golden) -> None:
    """What a release printed of its values is what their decoded values print; others are named."""
    index = read_metadata((case.path / ".metadata").read_bytes())
    for entry in index.values:
        row, item = case.entries[entry.key], entry.item
        if item is None or item.transforms or "tensor(" in row["repr"]:
            continue
        stored = (case.path / item.file).read_bytes()[item.offset : item.end]
        pickled = parse_value_item(stored).pickle
        if entry.key in NOT_PLAIN:
            with pytest.raises(NotPlain, match=NOT_PLAIN[entry.key]):
                decode_value(pickled)
            continue
        value = decode_value(pickled)
        told = describe(value, max_chars=10_000)
        assert told["repr"] == row["repr"].replace("OrderedDict([])", "OrderedDict()")
        assert told["type"] == row["type"].removeprefix("builtins.").removeprefix("collections.")


@settings(max_examples=100, deadline=None)
@given(value=VALUES, max_chars=st.integers(1, 60))
def test_descriptions_are_short_json(value: Any, max_chars: int) -> None:
    """A description is JSON and no longer than asked; a value that fits is shown whole."""
    told = describe(value, max_chars=max_chars)
    assert json.loads(json.dumps(told)) == told
    assert len(told["repr"]) <= max_chars
    whole = short_repr(value, max_chars=10_000)
    assert told["repr"] == whole if len(whole) <= max_chars else told["repr"].endswith("…")


def test_descriptions_of_tensors() -> None:
    """A tensor is described by dtype and shape."""
    ref = decode_value(saved({"a": torch.ones(2, 3)}))
    assert short_repr(ref) == "{'a': <tensor float32 2x3>}"
    assert describe(ref["a"])["type"] == "torch.Tensor"
