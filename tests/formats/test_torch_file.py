"""Torch files: planned before any payload is read, opened by torch itself."""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES, dtype_named
from ckptool.errors import DamagedError, UsageError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import check_item
from ckptool.formats.nesting import nest
from ckptool.formats.plain_values import NotPlain, TensorRef
from ckptool.formats.torch_file import (
    Literal,
    Payload,
    Tail,
    TensorSpec,
    TorchFile,
    plan_torch_file,
)

torch = pytest.importorskip("torch")
nested_dict = pytest.importorskip("torch.distributed.checkpoint._nested_dict")

F32 = dtype_named("float32")


def written(plan: TorchFile, payloads: dict[str, bytes]) -> bytes:
    """The file, its payloads written last to first, as parallel writers may."""
    out = bytearray(plan.length)
    crcs = {}
    for segment in reversed(plan.payloads):
        data = payloads[segment.key]
        assert len(data) == segment.num_bytes
        out[segment.offset : segment.offset + len(data)] = data
        crcs[segment.key] = crc32(data)
    at = 0
    for segment in plan.segments:
        assert segment.offset == at
        at += segment.num_bytes
        if isinstance(segment, Payload):
            continue
        if isinstance(segment, Literal):
            data = segment.data
        else:
            data = segment.encode([crcs[key] for key in segment.needs])
        assert len(data) == segment.num_bytes
        out[segment.offset : at] = data
    assert at == plan.length
    return bytes(out)


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def test_torch_opens_a_nested_file() -> None:
    """Tensors, values, lists and mappings come back where they stood."""
    tree = {
        "model": {"w": TensorSpec("m.w", F32, (2, 3)), "b": TensorSpec("m.b", F32, ())},
        "optim": {"param_groups": [{"lr": 0.5, "params": ["w"], "betas": (0.9, 0.99)}, None]},
        "empty": TensorSpec("empty", dtype_named("int64"), (0, 4)),
        "step": 7,
    }
    w, b = np.arange(6, dtype=np.float32), np.float32(3.5)
    plan = plan_torch_file(tree)
    data = written(plan, {"m.w": w.tobytes(), "m.b": b.tobytes()})
    state = loaded(data)
    assert torch.equal(state["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert state["model"]["b"].item() == 3.5
    assert state["empty"].shape == (0, 4)
    assert state["empty"].dtype is torch.int64
    assert state["optim"] == tree["optim"]
    assert state["step"] == 7
    assert check_item(data) == []


def test_payloads_are_aligned_and_the_plan_travels() -> None:
    """Payloads start at multiples of 64, and a pickled plan is the same plan."""
    plan = plan_torch_file({str(n): TensorSpec(str(n), F32, (n,)) for n in range(1, 6)})
    assert [payload.offset % 64 for payload in plan.payloads] == [0] * 5
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_segment_between_payloads_travels_alone() -> None:
    """A step of a plan carries its own segment, not the whole file's directory."""
    plan = plan_torch_file({str(n): TensorSpec(str(n), F32, (3,)) for n in range(200)})
    tails = [segment for segment in plan.segments if isinstance(segment, Tail)]
    assert max(len(pickle.dumps(tail)) for tail in tails[:-1]) < 1000


def test_a_file_without_tensors_is_one_literal() -> None:
    """Where there is no payload, all bytes are known at once."""
    plan = plan_torch_file({"step": 3})
    assert [type(segment) for segment in plan.segments] == [Literal]
    assert loaded(written(plan, {})) == {"step": 3}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_opened(name: str) -> None:
    """Bytes in are bytes out for every dtype that we know."""
    dtype = dtype_named(name)
    payload = bytes(n % 2 for n in range(6 * dtype.itemsize))
    data = written(plan_torch_file({"x": TensorSpec("x", dtype, (2, 3))}), {"x": payload})
    x = loaded(data)["x"]
    assert (x.dtype, x.shape) == (getattr(torch, name), (2, 3))
    assert bytes(x.untyped_storage().tolist()) == payload


def test_tied_tensors_share_one_record() -> None:
    """An alias costs no bytes, and torch sees one storage."""
    tree = {"emb": TensorSpec("emb", F32, (4, 2)), "head": TensorSpec("head", F32, (4, 2))}
    plan = plan_torch_file(tree, shared={"head": "emb"})
    assert [payload.key for payload in plan.payloads] == ["emb"]
    state = loaded(written(plan, {"emb": np.arange(8, dtype=np.float32).tobytes()}))
    assert state["emb"].data_ptr() == state["head"].data_ptr()
    assert torch.equal(state["head"], torch.arange(8.0).reshape(4, 2))


def test_tied_tensors_of_unequal_size_are_refused() -> None:
    """The message names both."""
    tree = {"emb": TensorSpec("emb", F32, (4, 2)), "head": TensorSpec("head", F32, (5, 2))}
    with pytest.raises(UsageError, match=r"'head'.*'emb'"):
        plan_torch_file(tree, shared={"head": "emb"})


def test_a_view_of_a_storage_keeps_its_strides() -> None:
    """A tensor that a value held, transposed and at an offset, reads as it was."""
    ref = TensorRef("rng", 32, F32, (2, 3), (1, 2), storage_offset=2)
    data = written(
        plan_torch_file({"rng": [ref, ref]}), {"rng": np.arange(8, dtype=np.float32).tobytes()}
    )
    expected = torch.arange(8.0).as_strided((2, 3), (1, 2), 2)
    first, second = loaded(data)["rng"]
    assert torch.equal(first, expected)
    assert first.data_ptr() == second.data_ptr()


def test_an_object_is_refused_by_name() -> None:
    """What torch's safe loader would refuse is never written."""
    with pytest.raises(NotPlain, match="object"):
        plan_torch_file({"x": object()})


def test_offsets_beyond_4_gib() -> None:
    """Two payloads of 4 GiB: zip64 offsets and sizes, which zipfile follows."""
    big = (1 << 32) + 8
    tree = {key: TensorSpec(key, dtype_named("uint8"), (big,)) for key in "ab"}
    tree["c"] = TensorSpec("c", F32, (3,))
    plan = plan_torch_file(tree)
    stream = _SparseFile(plan.length)
    for segment in plan.segments:
        if isinstance(segment, Literal):
            stream.parts.append((segment.offset, segment.data))
        elif not isinstance(segment, Payload):
            stream.parts.append((segment.offset, segment.encode([1] * len(segment.needs))))
    archive = zipfile.ZipFile(stream)
    sizes = [archive.getinfo(f"archive/data/{n}").file_size for n in range(3)]
    assert sizes == [big, big, 12]
    assert archive.read("archive/version") == b"3\n"


class _SparseFile(io.RawIOBase):
    """Zeros, but for the parts given."""

    def __init__(self, length: int) -> None:
        self.length, self.at = length, 0
        self.parts: list[tuple[int, bytes]] = []

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        end = self.length if size < 0 else min(self.at + size, self.length)
        out = bytearray(end - self.at)
        for offset, data in self.parts:
            low, high = max(offset, self.at), min(offset + len(data), end)
            if low < high:
                out[low - self.at : high - self.at] = data[low - offset : high - offset]
        self.at = end
        return bytes(out)


def test_nesting_restores_lists_and_mappings() -> None:
    """Numbers in a path are list positions, texts are keys, holes are None."""
    paths = {"a.0.x": ("a", 0, "x"), "a.2": ("a", 2), "s.0": ("s", "0"), "m.l.w": ("m", "l.w")}
    entries = dict.fromkeys([*paths, "flat.key"], 1)
    assert nest(entries, paths) == {
        "a": [{"x": 1}, None, 1],
        "s": {"0": 1},
        "m": {"l.w": 1},
        "flat.key": 1,
    }


def test_int_keys_turns_digits_under_state_alone() -> None:
    """All-digit mappings under ``state`` become numbers; others, or mixed ones, do not."""
    paths = {
        "o.state.0.m": ("o", "state", "0", "m"),
        "o.state.10.m": ("o", "state", "10", "m"),
        "p.state.0": ("p", "state", "0"),
        "p.state.w": ("p", "state", "w"),
        "q.0": ("q", "0"),
        "r.state.00": ("r", "state", "00"),
    }
    tree = nest(dict.fromkeys(paths, 1), paths, int_keys=True)
    assert tree["o"]["state"] == {0: {"m": 1}, 10: {"m": 1}}
    assert tree["p"]["state"] == {"0": 1, "w": 1}
    assert tree["q"] == {"0": 1}
    assert tree["r"]["state"] == {"00": 1}


@pytest.mark.parametrize(
    "paths",
    [
        {"k": ("a",), "l": ("a", "b")},
        {"k": ("a", "b"), "l": ("a",)},
        {"k": ("a", 0), "l": ("a", "b")},
        {"k": ("a", "b"), "l": ("a", 0)},
        {"k": ("a", "b"), "l": ("a", "b")},
        {"k": ("l",)},
    ],
)
def test_paths_that_exclude_each_other_name_both(paths: dict[str, Any]) -> None:
    """No entry is ever overwritten by another."""
    with pytest.raises(DamagedError, match=r"'k' and 'l'"):
        nest({"k": 1, "l": {}}, paths)


@pytest.mark.parametrize("path", [(), (0,), ("a", -1), ("a", 1.5), ("a", None), ("a", True)])
def test_impossible_paths_are_named(path: Any) -> None:
    """A path that no state dict can have is damage."""
    with pytest.raises(DamagedError, match="'k'"):
        nest({"k": 1}, {"k": path})


def test_a_list_position_costs_no_memory() -> None:
    """A hostile position does not make a list of that length."""
    with pytest.raises(DamagedError, match="too far"):
        nest({"k": 1}, {"k": ("a", 1 << 40)})


_trees = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text("ab.", min_size=1, max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), _trees, min_size=1, max_size=4))
def test_nesting_agrees_with_torch(tree: dict[str, Any]) -> None:
    """Any tree, flattened to leaves and paths, is nested as torch nests it."""
    entries, paths = {}, {}

    def walk(path: tuple[Any, ...], node: Any) -> None:
        if isinstance(node, (dict, list)):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk((*path, key), child)
        else:
            key = f"k{len(entries)}"
            entries[key], paths[key] = node, path

    walk((), tree)
    assert nest(entries, paths) == nested_dict.unflatten_state_dict(entries, paths) == tree
