"""export: one file or a folder, equal to stock torch's own to the bit, or a named refusal."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stock_ranks
from dcp_writer import edited_metadata, flip_bit, item_of, save_plain
from plain_checkpoint import (
    Saved,
    random_array,
    read_safetensors,
    rows_of,
    write_checkpoint,
)
from recording_store import RecordingStore

from ckptool.dtypes import dtype_named
from ckptool.engine.run import How
from ckptool.errors import (
    CkptoolError,
    DamagedError,
    NotEmptyError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptool.model import Box
from ckptool.operations.export import export
from ckptool.storage import open_store

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training state that stock torch saved on four ranks."""
    return stock_ranks.saved(tmp_path_factory.mktemp("stock") / "step-00000012")


@pytest.fixture(scope="module")
def nested(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stock torch's own dcp_to_torch_save makes of it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = tmp_path_factory.mktemp("stock") / "stock.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(stock), str(path))
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(str(path)))


def assert_same_tree(one: Any, two: Any, path: str = "") -> None:
    """Two trees are equal in nesting, types, values, and every bit of their tensors."""
    assert type(one) is type(two), path
    if isinstance(one, torch.Tensor):
        assert stock_ranks.same(one, two), path
    elif isinstance(one, dict):
        assert list(one) == list(two), path
        for key in one:
            assert_same_tree(one[key], two[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for number, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same_tree(a, b, f"{path}.{number}")
    else:
        assert one == two, path


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# equal to stock torch


def test_all_in_safetensors_equals_the_stock_tensors(stock, tmp_path):
    """--all: every tensor under its own key, bit for bit, with the safetensors library."""
    wanted = stock_ranks.tensors()
    result = export(str(stock), str(tmp_path / "x.safetensors"), everything=True)
    found = tensors_of(tmp_path / "x.safetensors")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert stock_ranks.same(found[key], tensor), key
    assert set(result.values_left_out) >= set(stock_ranks.VALUES)


def test_all_in_a_pt_equals_dcp_to_torch_save(stock, nested, tmp_path):
    """--all to .pt: nesting, order of keys, values and every bit are stock's own."""
    result = export(str(stock), str(tmp_path / "x.pt"), everything=True)
    assert not result.values_left_out
    found = loaded(tmp_path / "x.pt")
    assert_same_tree(found, nested)
    assert found["optim"]["param_groups"] == stock_ranks.GROUPS
    assert [len(g["params"]) for g in found["optim"]["param_groups"]] == [2, 1, 0]


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.pth", "x.bin", "hf"])
def test_the_model_under_its_own_names(stock, tmp_path, name):
    """A plain export is the model's state dict: what load_state_dict takes."""
    result = export(str(stock), str(tmp_path / name))
    path = tmp_path / name / "model.safetensors" if name == "hf" else tmp_path / name
    found = tensors_of(path) if path.suffix == ".safetensors" else loaded(path)
    wanted = {
        key.removeprefix("model."): tensor
        for key, tensor in stock_ranks.tensors().items()
        if key.startswith("model.")
    }
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert stock_ranks.same(found[key], tensor), key
    assert result.layout.choice.prefix == "model."
    reasons = set(result.layout.choice.left_out.values())
    assert reasons == {"optimizer state", "random state", "counter", "value"}


def test_from_and_to_s3(stock, s3_url, s3_options, nested, tmp_path):
    """The same bytes as a local export, whichever end is on S3."""
    store = open_store(f"{s3_url}/src", options=s3_options)
    for path in stock.iterdir():
        store.put(path.name, path.read_bytes())
    export(str(stock), str(tmp_path / "local.pt"), everything=True)
    wanted = (tmp_path / "local.pt").read_bytes()
    export(f"{s3_url}/src", str(tmp_path / "from.pt"), everything=True, source_options=s3_options)
    assert (tmp_path / "from.pt").read_bytes() == wanted
    export(
        f"{s3_url}/src", f"{s3_url}/out/to.pt", everything=True,
        source_options=s3_options, dest_options=s3_options,
    )  # fmt: skip
    there = open_store(f"{s3_url}/out", options=s3_options)
    assert there.read("to.pt") == wanted
    assert [info.key for info in there.list()] == ["to.pt"]
    export(f"{s3_url}/src", f"{s3_url}/hf", source_options=s3_options, dest_options=s3_options)
    export(str(stock), str(tmp_path / "hf"))
    folder = open_store(f"{s3_url}/hf", options=s3_options)
    assert folder.read("model.safetensors") == (tmp_path / "hf/model.safetensors").read_bytes()


def test_other_urls(stock, tmp_path):
    """file:// and memory:// take the same bytes, at the root of a store too."""
    export(str(stock), str(tmp_path / "x.safetensors"))
    wanted = (tmp_path / "x.safetensors").read_bytes()
    export(str(stock), f"file://{tmp_path}/y.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == wanted
    export(f"file://{stock}", "memory://exported/deep/z.safetensors")
    assert open_store("memory://exported/deep").read("z.safetensors") == wanted
    export(str(stock), "memory://root-of-it.safetensors")
    assert open_store("memory://").read("root-of-it.safetensors") == wanted


def test_a_relative_destination(stock, tmp_path, monkeypatch):
    """A bare file name is a file of the working folder."""
    monkeypatch.chdir(tmp_path)
    export(str(stock), "here.safetensors")
    export(str(stock), "below/here.safetensors")
    assert files(tmp_path) == ["below/here.safetensors", "here.safetensors"]


def test_a_run_is_its_newest_step(stock, tmp_path):
    """SOURCE may be a run: its newest committed step is exported."""
    shutil.copytree(stock, tmp_path / "run" / "step-7")
    shutil.copytree(stock, tmp_path / "run" / "step-9")
    (tmp_path / "run" / "step-9" / ".metadata").unlink()
    result = export(str(tmp_path / "run"), str(tmp_path / "x.pt"))
    assert result.source_url.endswith("step-7")


# geometry


def test_shapes_are_never_guessed(tmp_path):
    """A first dim of 1, replicated buffers, 0-dim tensors, empty ones: their own shape each."""
    arrays = {
        "one": random_array((1, 17), "float32", seed=1),
        "buf": random_array((3,), "int64", seed=2),
        "scalar": random_array((), "float32", seed=3),
        "none": random_array((0, 4), "float32", seed=4),
    }
    saved = {
        "one": rows_of(arrays["one"], "float32", 1, 0),
        "buf": Saved(arrays["buf"], [Box((0,), (3,))] * 4, "int64"),
        "scalar": Saved(arrays["scalar"], [Box((), ())] * 4, "float32"),
        "none": rows_of(arrays["none"], "float32", 0),
    }
    write_checkpoint(tmp_path / "a", saved)
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    found = read_safetensors(tmp_path / "x.safetensors")
    assert {k: (v[1], v[2]) for k, v in found.items()} == {
        k: (a.shape, a.tobytes()) for k, a in arrays.items()
    }


def test_disjoint_slices_of_one_rank(tmp_path):
    """Rows r and r + 4 by rank r: placed by offset, not by rank."""
    array = random_array((8, 3), "float32", seed=2)
    order = [Box((row, 0), (1, 3)) for rank in range(4) for row in (rank, rank + 4)]
    write_checkpoint(tmp_path / "a", {"w": Saved(array, order, "float32")})
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["w"][2] == array.tobytes()


def test_strided_payloads_become_contiguous(tmp_path):
    """What torch stores of x.t() and of channels_last comes out row by row."""
    state = {
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "cl": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "step": torch.arange(20.0).reshape(4, 5)[::2, 1:4],
    }
    save_plain(state, tmp_path / "a")
    for name in ("x.safetensors", "x.pt"):
        export(str(tmp_path / "a"), str(tmp_path / name), everything=True)
    for found in (tensors_of(tmp_path / "x.safetensors"), loaded(tmp_path / "x.pt")):
        for key, tensor in state.items():
            assert found[key].is_contiguous()
            assert stock_ranks.same(found[key], tensor.contiguous()), key


def replace_item(folder: Path, key: str, data: bytes) -> None:
    """Store other bytes for a tensor of one chunk, in a file of their own."""
    (folder / "other.distcp").write_bytes(data)
    with edited_metadata(folder) as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.relative_path, info.offset, info.length = "other.distcp", 0, len(data)


def saved_by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_slice_that_drags_its_storage(tmp_path):
    """torch.save(big[:2]) stores all of big: only the slice is exported, all of it is proved."""
    big = torch.arange(4000.0).reshape(1000, 4)
    save_plain({"w": big[:2].clone()}, tmp_path / "a")
    replace_item(tmp_path / "a", "w", saved_by_torch(big[:2]))
    result = export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["w"][2] == big[:2].numpy().tobytes()
    assert (tmp_path / "x.safetensors").stat().st_size < 1000
    assert result.report is not None
    assert result.report.payloads_proved == 1
    data = (tmp_path / "a" / "other.distcp").read_bytes()
    flip_bit(tmp_path / "a" / "other.distcp", data.index(big[900].numpy().tobytes()))
    with pytest.raises(DamagedError, match="w"):
        export(str(tmp_path / "a"), str(tmp_path / "y.safetensors"), everything=True)
    assert not (tmp_path / "y.safetensors").exists()


# dtypes


def test_casts_are_for_floats_only(tmp_path):
    """--dtype takes every floating tensor, no int and no bool, and says how many."""
    state = {
        "a": torch.randn(5).bfloat16(),
        "b": torch.arange(3),
        "c": torch.tensor([True, False]),
        "d": torch.randn(2, 2).double(),
        "e": torch.randn(3, dtype=torch.complex64),
    }
    save_plain(state, tmp_path / "a")
    for name in ("float32", "bfloat16", "float16", "float64"):
        target = getattr(torch, name)
        out = tmp_path / f"{name}.safetensors"
        result = export(str(tmp_path / "a"), str(out), everything=True, dtype=name)
        found = tensors_of(out)
        for key, tensor in state.items():
            wanted = tensor.to(target) if tensor.is_floating_point() else tensor
            assert stock_ranks.same(found[key], wanted), (name, key)
        assert result.to_json()["num_tensors_cast"] == (1 if name in ("bfloat16", "float64") else 2)


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    """Norms in f32, linears in bf16, a scale in f16, a mask: all kept, and no key skipped."""
    state = {
        "norm": torch.randn(3),
        "linear": torch.randn(2, 3).bfloat16(),
        "scale": torch.randn(1).half(),
        "mask": torch.ones(4, dtype=torch.bool),
        "embed_tokens.weight": torch.randn(5, 2).bfloat16(),
    }
    save_plain(state, tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"))
    found = tensors_of(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert all(stock_ranks.same(found[key], state[key]) for key in state)


def hard_doubles() -> Any:
    """float64 values whose rounding goes wrong when it is done twice, and the extremes."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    around = [t + sign * eps for t in ties for sign in (1, -1) for eps in (2**-40, 2**-52, 2**-30)]
    tiny = [2.0**-149, 2.0**-150, 1.5 * 2.0**-150, 2.0**-24, 2.0**-25, 1.0001 * 2.0**-25, 5e-324]
    large = [65504.0, 65519.999, 65520.0, 3.4028235e38, 3.3961775e38, 1e39, 1.7e308]
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan")]
    values = np.array([*ties, *around, *tiny, *large], np.float64)
    return np.concatenate([values, -values, np.array(special)])


def nearest_even(value: float, bits: int, exponent_min: int, largest: float) -> float:
    """A float64 rounded to ``bits`` of significand, by exact integer arithmetic."""
    from fractions import Fraction

    if value != value or value in (float("inf"), float("-inf"), 0.0):
        return value
    exact = Fraction(value)
    exponent = max(np.frexp(value)[1] - 1, exponent_min)
    unit = Fraction(2) ** (int(exponent) - bits + 1)
    steps = exact / unit
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    rounded = whole * unit
    if abs(rounded) > Fraction(largest):
        return float("inf") if value > 0 else float("-inf")
    return float(rounded) if rounded else (0.0 if value > 0 else -0.0)


@pytest.mark.parametrize(
    ("name", "bits", "exponent_min", "largest"),
    [
        ("float16", 11, -14, 65504.0),
        ("bfloat16", 8, -126, 3.3895313892515355e38),
        ("float32", 24, -126, 3.4028234663852886e38),
    ],
)
def test_rounding_is_to_nearest_even(tmp_path, name, bits, exponent_min, largest):
    """From float64 too, where going through float32 would round twice; losses are counted."""
    array = hard_doubles()
    write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float64", len(array))})
    out = tmp_path / "x.safetensors"
    result = export(str(tmp_path / "a"), str(out), everything=True, dtype=name)
    found = tensors_of(out)["w"].double().numpy()
    wanted = np.array([nearest_even(float(v), bits, exponent_min, largest) for v in array])
    np.testing.assert_array_equal(found, wanted)
    assert np.array_equal(np.signbit(found), np.signbit(wanted)) or np.isnan(array).any()
    assert result.report is not None
    count = result.report.casts["w"]
    assert count.overflows == np.count_nonzero(np.isinf(wanted) & np.isfinite(array))
    assert count.underflows == np.count_nonzero((wanted == 0) & (array != 0))
    assert count.overflows > 0 and count.underflows > 0


def test_overflow_is_counted_per_tensor(tmp_path):
    """f32 up to 1e5 to f16: stock gives inf without a word; here they are counted and named."""
    state = {"big": torch.tensor([1.0, 1e5, -1e5, 3e38]), "fine": torch.tensor([1.0, 2.0])}
    save_plain(state, tmp_path / "a")
    result = export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True, dtype="float16")
    assert result.to_json()["casts"] == {"big": {"overflows": 3, "underflows": 0}}


def test_float8_bytes_pass_untouched(tmp_path):
    """bf16, float8_e4m3fn and e5m2, every bit pattern: bytes in are bytes out."""
    patterns = np.arange(65536, dtype=np.uint16)
    saved = {
        "bf16": Saved(patterns, [Box((0,), (65536,))], "bfloat16"),
        "e4m3": Saved(patterns.view(np.uint8), [Box((0,), (131072,))], "float8_e4m3fn"),
        "e5m2": Saved(patterns.view(np.uint8), [Box((0,), (131072,))], "float8_e5m2"),
    }
    write_checkpoint(tmp_path / "a", saved)
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    found = read_safetensors(tmp_path / "x.safetensors")
    for key, want in saved.items():
        assert found[key][0] == dtype_named(want.dtype).safetensors
        assert found[key][2] == patterns.tobytes()


@pytest.mark.parametrize("name", ["int8", "complex64", "float4_e2m1fn_x2", "float99"])
def test_only_floats_can_be_cast_to(stock, tmp_path, name):
    """Exit 11, and the dtype is named."""
    with pytest.raises(UnsupportedError, match=name):
        export(str(stock), str(tmp_path / "x.pt"), dtype=name)
    assert files(tmp_path) == []


def test_a_dtype_that_safetensors_has_not(tmp_path):
    """complex128: refused with the key before a byte is written; .pt takes it."""
    save_plain({"z": torch.randn(2, dtype=torch.complex128), "w": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(UnsupportedError, match="z: safetensors has no dtype complex128") as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert "--exclude 'z'" in str(caught.value.hint)
    assert not (tmp_path / "x.safetensors").exists()
    export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert loaded(tmp_path / "x.pt")["z"].dtype == torch.complex128


class Quantized(torch.Tensor):
    """A tensor subclass of some library."""


def test_a_tensor_subclass_is_named(tmp_path):
    """Exit 11: the key and the class, not a wall of traceback."""
    save_plain({"w": torch.ones(4), "v": torch.ones(2)}, tmp_path / "a")
    replace_item(tmp_path / "a", "w", saved_by_torch(torch.ones(4).as_subclass(Quantized)))
    with pytest.raises(UnsupportedError) as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert caught.value.exit_code == 11
    assert caught.value.facts["entry"] == "w"
    assert caught.value.message.startswith("w ")
    assert "Quantized" in caught.value.message or "_rebuild_from_type" in caught.value.message
    assert files(tmp_path) == sorted(f"a/{p.name}" for p in (tmp_path / "a").iterdir())


# tied weights, names and optimizers


def test_tied_and_lookalike_tensors_are_both_kept(tmp_path):
    """Equal bytes under two keys are two tensors in the file; so are different bytes."""
    emb = torch.randn(6, 2)
    other = emb.clone()
    other[0, 0] += 1
    save_plain({"emb": emb, "head": emb, "like": other}, tmp_path / "a")
    for name in ("x.safetensors", "x.pt"):
        export(str(tmp_path / "a"), str(tmp_path / name), everything=True)
    for found in (tensors_of(tmp_path / "x.safetensors"), loaded(tmp_path / "x.pt")):
        assert stock_ranks.same(found["emb"], emb)
        assert stock_ranks.same(found["head"], emb)
        assert stock_ranks.same(found["like"], other)


def test_int_keys_come_back_on_request(tmp_path):
    """Keys are str as stock gives them; --int-keys turns all-digit maps under state back."""
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.zeros(2)}},
        "param_groups": [{"params": [0, 1], "lr": 0.1}],
    }
    save_plain({"optim": optimizer, "7": torch.ones(1)}, tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    export(str(tmp_path / "a"), str(tmp_path / "y.pt"), everything=True, int_keys=True)
    found, numbered = loaded(tmp_path / "x.pt"), loaded(tmp_path / "y.pt")
    assert list(found["optim"]["state"]) == ["0", "1"]
    assert list(numbered["optim"]["state"]) == [0, 1]
    assert set(numbered) == {"optim", "7"}
    assert numbered["optim"]["param_groups"] == optimizer["param_groups"]
    with pytest.raises(UsageError, match="--int-keys"):
        export(str(tmp_path / "a"), str(tmp_path / "z.safetensors"), int_keys=True)


def test_optimizers_without_state_or_with_a_hole(tmp_path):
    """SGD has no state; a missing moment is just not there; groups keep order and length."""
    groups = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": ["b"]}, {"lr": 0, "params": []}]
    sgd = {"model": {"w": torch.ones(2)}, "optim": {"state": {}, "param_groups": groups}}
    save_plain(sgd, tmp_path / "sgd")
    export(str(tmp_path / "sgd"), str(tmp_path / "sgd.pt"), everything=True)
    assert loaded(tmp_path / "sgd.pt")["optim"]["param_groups"] == groups
    state = {
        "w": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)},
        "b": {"exp_avg": torch.ones(1)},
    }
    save_plain({"optim": {"state": state, "param_groups": groups}}, tmp_path / "adam")
    export(str(tmp_path / "adam"), str(tmp_path / "adam.pt"), everything=True)
    found = loaded(tmp_path / "adam.pt")["optim"]["state"]
    assert {k: list(v) for k, v in found.items()} == {
        "w": ["exp_avg", "exp_avg_sq"],
        "b": ["exp_avg"],
    }


def test_only_the_optimizer(stock, tmp_path):
    """--only keeps keys as they are; what matches nothing is a usage error."""
    export(str(stock), str(tmp_path / "x.safetensors"), only=["optim.state.*"])
    assert all(key.startswith("optim.state.") for key in tensors_of(tmp_path / "x.safetensors"))
    with pytest.raises(UsageError, match="no entry matches"):
        export(str(stock), str(tmp_path / "y.safetensors"), only=["optimizer.*"])
    with pytest.raises(RefusedError, match="nothing is left"):
        export(str(stock), str(tmp_path / "y.safetensors"), only=["model.w"], exclude=["model.*"])
    assert files(tmp_path) == ["x.safetensors"]


def test_flat_weights_are_exported_as_they_are(tmp_path):
    """A 1-D flat parameter is a tensor like any other: nothing is unflattened by guess."""
    array = random_array((24,), "float32", seed=1)
    flat = rows_of(array, "float32", 12, 12)
    write_checkpoint(tmp_path / "a", {"model._flat_param": flat})
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["model._flat_param"][1] == (24,)


# values


def test_a_step_as_int_and_as_tensor(tmp_path):
    """The same key may be a value in one checkpoint and a tensor in another."""
    save_plain({"w": torch.ones(2), "step": 1}, tmp_path / "value")
    save_plain({"w": torch.ones(2), "step": torch.tensor(1)}, tmp_path / "tensor")
    for kind in ("value", "tensor"):
        export(str(tmp_path / kind), str(tmp_path / f"{kind}.pt"), everything=True)
    assert loaded(tmp_path / "value.pt")["step"] == 1
    assert torch.equal(loaded(tmp_path / "tensor.pt")["step"], torch.tensor(1))


def test_extra_state_is_dropped_with_a_count(tmp_path):
    """Opaque _extra_state: left out of safetensors and told; carried in .pt where plain."""
    state = {
        "layer": {
            "0.weight": torch.ones(2),
            "0._extra_state": io.BytesIO(b""),
            "1._extra_state": io.BytesIO(b"x" * 10240),
            "2._extra_state": b"plain bytes",
        }
    }
    save_plain({"model": state["layer"]}, tmp_path / "a")
    result = export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"))
    assert list(tensors_of(tmp_path / "x.safetensors")) == ["0.weight"]
    assert list(result.layout.choice.left_out.values()) == ["value"] * 3
    assert (tmp_path / "x.safetensors").stat().st_size < 1000
    result = export(str(tmp_path / "a"), str(tmp_path / "x.pt"), only=["model.*"])
    assert loaded(tmp_path / "x.pt")["model"].keys() == {"0.weight", "2._extra_state"}
    assert result.values_left_out.keys() == {"model.0._extra_state", "model.1._extra_state"}
    assert all("BytesIO" in reason for reason in result.values_left_out.values())
    with pytest.raises(RefusedError, match="--strict: 2 values"):
        export(str(tmp_path / "a"), str(tmp_path / "y.pt"), only=["model.*"], strict=True)
    assert not (tmp_path / "y.pt").exists()


def test_tensors_inside_values_are_carried(tmp_path):
    """A tuple with tensors in it stays a value; its tensors are in the .pt, shared ones shared."""
    shared = torch.arange(6.0)
    value = (torch.ones(2, 3).t(), {"a": shared[2:4], "b": shared}, [torch.tensor(3)])
    save_plain({"w": torch.ones(1), "v": value}, tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    found = loaded(tmp_path / "x.pt")["v"]
    assert torch.equal(found[0], value[0])
    assert torch.equal(found[1]["a"], value[1]["a"])
    assert torch.equal(found[1]["b"], value[1]["b"])
    assert torch.equal(found[2][0], value[2][0])


def test_a_flipped_bit_in_a_value(stock, tmp_path):
    """A damaged value stops a .pt that carries it, with its key."""
    shutil.copytree(stock, tmp_path / "a")
    path, start, _ = item_of(tmp_path / "a", "name")
    flip_bit(path, path.read_bytes().index(b"run/", start))
    with pytest.raises(DamagedError) as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert caught.value.facts["entry"] == "name"
    assert caught.value.facts["file"] == path.name
    assert not (tmp_path / "x.pt").exists()


# trust and versions


class Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_hostile_pickles_never_run(tmp_path):
    """Neither the index nor a value is unpickled: named and left out, or refused."""
    marker = tmp_path / "ran"
    save_plain({"w": torch.ones(2), "v": Runs(str(marker))}, tmp_path / "value")
    result = export(str(tmp_path / "value"), str(tmp_path / "x.pt"), everything=True)
    assert list(result.values_left_out) == ["v"]
    assert "open" in result.values_left_out["v"]
    save_plain({"w": torch.ones(2)}, tmp_path / "index")
    with edited_metadata(tmp_path / "index") as metadata:
        metadata.planner_data = {"w": Runs(str(marker))}
    with pytest.raises(CkptoolError) as caught:
        export(str(tmp_path / "index"), str(tmp_path / "y.pt"), everything=True)
    assert caught.value.exit_code == 3
    assert not marker.exists()
    assert not (tmp_path / "y.pt").exists()


def test_an_index_of_an_older_torch(tmp_path):
    """Without planner_data, storage_meta and version: keys stay flat, tensors are whole."""
    save_plain({"a": {"b": torch.ones(2)}, "n": 3}, tmp_path / "a")
    with edited_metadata(tmp_path / "a") as metadata:
        for name in ("planner_data", "storage_meta", "version"):
            metadata.__dict__.pop(name, None)
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)
    export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert set(loaded(tmp_path / "x.pt")) == {"a.b", "n"}


def test_a_class_of_a_newer_torch(tmp_path):
    """An unknown class in the index: named, with the way out; never 'metadata is None'."""
    save_plain({"w": torch.ones(2)}, tmp_path / "a")
    with edited_metadata(tmp_path / "a") as metadata:
        metadata.storage_meta = OrderedDict(x=np.float64(1))
    with pytest.raises(CkptoolError, match="numpy") as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert caught.value.exit_code in (3, 11)
    assert caught.value.hint


# other forms


def test_flat_rank_files_are_recognised(tmp_path):
    """A folder of model_world_size_2_rank_*.pt is said to be what it is."""
    (tmp_path / "a").mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / "a" / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(CkptoolError, match="model_world_size_2_rank_0") as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.pt"))
    assert caught.value.exit_code in (10, 11)


# damage


@pytest.fixture
def damaged(stock, tmp_path) -> Path:
    shutil.copytree(stock, tmp_path / "damaged")
    return tmp_path / "damaged"


def refused(source: Path, **how: Any) -> DamagedError:
    """The error of an export; nothing may be left in any form of destination."""
    before = files(source.parent)
    for name in ("x.safetensors", "x.pt", "hf"):
        with pytest.raises(DamagedError) as caught:
            export(str(source), str(source.parent / name), everything=True, **how)
        assert caught.value.exit_code == 3
        assert files(source.parent) == before
    return caught.value


def test_a_missing_chunk(damaged):
    """Stock exports uninitialised memory; here the tensor and the box are named."""
    with edited_metadata(damaged) as metadata:
        entry = metadata.state_dict_metadata["model.w"]
        entry.chunks = [c for c in entry.chunks if tuple(c.offsets) != (6, 0)]
        for index in list(metadata.storage_data):
            if index.fqn == "model.w" and tuple(index.offset) == (6, 0):
                del metadata.storage_data[index]
    error = refused(damaged)
    assert "model.w" in error.message and "[6:9, 0:6]" in error.message
    with edited_metadata(damaged) as metadata:
        metadata.state_dict_metadata["model.w"].chunks = []
    assert "no chunk of 'model.w' is listed; its shape is [10, 6]" in refused(damaged).message


def test_swapped_items_of_other_shapes(damaged):
    """Two entries that point at each other's items are caught by what the items say."""
    with edited_metadata(damaged) as metadata:
        keys = {i.fqn: i for i in metadata.storage_data if i.fqn in ("rng", "model.buf")}
        first, second = (metadata.storage_data[keys[k]] for k in ("rng", "model.buf"))
        metadata.storage_data[keys["rng"]] = second
        metadata.storage_data[keys["model.buf"]] = first
    error = refused(damaged)
    assert error.facts["entry"] == "rng"
    assert "chunk [0:5056] of 'rng' needs 5056 bytes, but its item in" in error.message


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_the_index_disagrees_with_the_payload(damaged, what):
    """int32 over f32, 2-D over 1-D: key, file and byte are named, nothing is cast silently."""
    with edited_metadata(damaged) as metadata:
        entry = metadata.state_dict_metadata["model.buf"]
        if what == "dtype":
            entry.properties.dtype = torch.int32
        else:
            entry.size = entry.chunks[0].sizes = torch.Size([3, 1])
            entry.chunks[0].offsets = torch.Size([0, 0])
            for index in list(metadata.storage_data):
                if index.fqn == "model.buf":
                    info = metadata.storage_data.pop(index)
                    metadata.storage_data[type(index)("model.buf", torch.Size([0, 0]), 0)] = info
    error = refused(damaged)
    path, offset, _ = item_of(damaged, "model.buf")
    assert error.facts == error.facts | {"entry": "model.buf", "file": path.name, "offset": offset}


def test_missing_and_short_files(damaged):
    """Files on other hosts: each one is named with its rank; a short one with its end."""
    (damaged / "__2_0.distcp").unlink()
    (damaged / "__3_0.distcp").unlink()
    data = (damaged / "__1_0.distcp").read_bytes()
    (damaged / "__1_0.distcp").write_bytes(data[: len(data) * 6 // 10])
    error = refused(damaged)
    assert error.facts["files"] == ["__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    for words in ("of rank 1) ends at byte", "of rank 2) is missing", "of rank 3) is missing"):
        assert words in error.message


def test_what_is_not_exported_need_not_be_whole(damaged, tmp_path):
    """A model can be taken out of a checkpoint whose optimizer state is damaged."""
    metadata = pickle.loads((damaged / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "optim.state.w.exp_avg":
            data = bytearray((damaged / info.relative_path).read_bytes())
            data[info.offset + 704] ^= 1
            (damaged / info.relative_path).write_bytes(data)
    export(str(damaged), str(tmp_path / "x.safetensors"))
    with pytest.raises(DamagedError, match=r"optim\.state\.w\.exp_avg"):
        export(str(damaged), str(tmp_path / "y.safetensors"), everything=True)


def test_replicas(tmp_path):
    """Boxes stored twice are fine, and the first is taken."""
    array = random_array((4, 2), "float32", seed=1)
    halves = rows_of(array, "float32", 2, 2).boxes
    write_checkpoint(tmp_path / "a", {"w": Saved(array, [*halves] * 2, "float32")})
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["w"][2] == array.tobytes()


# folders


def ten_tensors(folder: Path) -> dict[str, Any]:
    arrays = {f"t{n}": random_array((10 + n, 7), "float32", seed=n) for n in range(10)}
    write_checkpoint(folder, {k: rows_of(a, "float32", *([1] * len(a))) for k, a in arrays.items()})
    return arrays


def test_the_index_equals_the_headers(tmp_path):
    """--max-file-size 1KB over ten tensors: names, files and total_size are what is there."""
    arrays = ten_tensors(tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "hf"), everything=True, max_file_size=1000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_bytes())
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [p.name for p in shards] == [
        f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)
    ]
    assert len(shards) > 3
    found: dict[str, str] = {}
    for path in shards:
        held = read_safetensors(path)
        assert sum(len(data) for _, _, data in held.values()) <= 1000
        for name, (_, shape, data) in held.items():
            assert (shape, data) == (arrays[name].shape, arrays[name].tobytes())
            found[name] = path.name
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    from transformers.utils.hub import get_checkpoint_shard_files

    resolved, _ = get_checkpoint_shard_files(
        str(tmp_path / "hf"), str(tmp_path / "hf/model.safetensors.index.json")
    )
    assert [Path(name).name for name in resolved] == [p.name for p in shards]


def test_a_folder_of_torch_files(tmp_path):
    """--format torch: pytorch_model-*.bin with its index."""
    arrays = ten_tensors(tmp_path / "a")
    export(
        str(tmp_path / "a"), str(tmp_path / "hf"), everything=True, max_file_size=1000,
        format="torch",
    )  # fmt: skip
    index = json.loads((tmp_path / "hf/pytorch_model.bin.index.json").read_bytes())
    for name, file in index["weight_map"].items():
        assert loaded(tmp_path / "hf" / file)[name].numpy().tobytes() == arrays[name].tobytes()
    assert index["weight_map"].keys() == arrays.keys()


def test_a_tensor_larger_than_the_maximum(tmp_path):
    """It has a file of its own; nothing is cut."""
    ten_tensors(tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "hf"), everything=True, max_file_size=1)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 10


def test_one_file_takes_no_maximum(stock, tmp_path):
    """A file name together with --max-file-size, or with another --format: exit 2."""
    with pytest.raises(UsageError, match="--max-file-size"):
        export(str(stock), str(tmp_path / "x.pt"), max_file_size=1000)
    with pytest.raises(UsageError, match="--format"):
        export(str(stock), str(tmp_path / "x.pt"), format="safetensors")
    assert files(tmp_path) == []


# destinations


def test_never_over_what_is_there(stock, tmp_path):
    """A file, a folder of that name, a folder with something in it: exit 11, untouched."""
    (tmp_path / "x.pt").write_bytes(b"mine")
    (tmp_path / "y.pt").mkdir()
    (tmp_path / "y.pt" / "z").write_bytes(b"mine")
    for name in ("x.pt", "y.pt", ""):
        with pytest.raises(NotEmptyError):
            export(str(stock), str(tmp_path / name))
    assert files(tmp_path) == ["x.pt", "y.pt/z"]
    assert (tmp_path / "x.pt").read_bytes() == b"mine"


def test_a_dry_run_creates_nothing(stock, tmp_path):
    """The plan is printed from the index; with a probe the exact sizes are known."""
    result = export(str(stock), str(tmp_path / "x.safetensors"), dry_run=True)
    assert result.report is None and result.plan is None
    probed = export(str(stock), str(tmp_path / "x.safetensors"), dry_run=True, probe_items=True)
    assert probed.plan is not None
    assert files(tmp_path) == []
    export(str(stock), str(tmp_path / "x.safetensors"))
    assert (tmp_path / "x.safetensors").stat().st_size == probed.plan.num_bytes


# requests and bytes


def test_every_byte_is_fetched_once(tmp_path, monkeypatch):
    """Bytes fetched are close to bytes needed, in few requests, whatever the parts."""
    array = random_array((256, 8192), "float32", seed=1)
    columns = [Box((0, c), (256, 2048)) for c in range(0, 8192, 2048)]
    rows = rows_of(array, "float32", *[64] * 4)
    write_checkpoint(tmp_path / "a", {"r": rows, "c": Saved(array, columns, "float32")})
    store = RecordingStore(open_store(str(tmp_path / "a")))
    monkeypatch.setattr("ckptool.operations.open.open_store", lambda url, options=None: store)
    cases: dict[str, dict[str, Any]] = {
        "x.safetensors": {},
        "x.pt": {},
        "half.safetensors": {"dtype": "bfloat16"},
        "small.safetensors": {"how": How(max_memory=4 << 20)},
    }
    for name, how in cases.items():
        store.reset()
        export(str(tmp_path / "a"), str(tmp_path / name), everything=True, **how)
        assert store.num_bytes["read"] < 1.05 * 2 * array.nbytes, name
        wanted = [c for c in store.calls if c[0] == "read" and c[3] - c[2] > 8192]
        seen: dict[str, list[tuple[int, int]]] = {}
        for _, key, start, end in wanted:
            seen.setdefault(key, []).append((start, end))
        for ranges in seen.values():
            ranges.sort()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), name
        if "how" not in how:
            assert store.requests["read"] <= 1 + 2 * 8 + 40, name
