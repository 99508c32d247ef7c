"""export of what a training state holds besides weights: optimizers, values, odd keys."""

from __future__ import annotations

import io
import shutil

import pytest
import stock_ranks
from dcp_writer import flip_bit, item_of, save_plain
from exports import files, loaded, tensors_of
from plain_checkpoint import random_array, read_safetensors, rows_of, write_checkpoint

from ckptool.errors import DamagedError, RefusedError, UsageError
from ckptool.operations.export import export

torch = pytest.importorskip("torch")


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
