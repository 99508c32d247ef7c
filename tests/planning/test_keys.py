"""What an export takes by default, and under which names."""

import pytest

from ckptool.dtypes import dtype_named
from ckptool.errors import RefusedError, UsageError
from ckptool.model import Chunks, Index, TensorEntry, ValueEntry
from ckptool.planning.keys import choose

F32 = dtype_named("float32")
DEFAULTS = {"everything": False, "only": (), "exclude": (), "strip_prefix": None, "rename": None}


def _index(paths, values=()):
    entries = {}
    for path in paths:
        key = ".".join(map(str, path))
        entries[key] = TensorEntry(key, F32, (1,), Chunks.of([], num_dims=1), tuple(path))
    for path in values:
        key = ".".join(map(str, path))
        entries[key] = ValueEntry(key, None, tuple(path))
    return Index(entries)


TRAINED = _index(
    [
        ("model", "embed.weight"),
        ("model", "layers.0.w"),
        ("optim", "state", "embed.weight", "exp_avg"),
        ("optim", "state", "embed.weight", "step"),
        ("optim", "state", "embed.weight", "my_own_moment"),
        ("rng", "0", "cpu"),
        ("step",),
    ],
    values=[("optim", "param_groups", 0, "lr"), ("sched", "last_epoch"), ("it",)],
)


def _choose(index, **options):
    return choose(index, **{**DEFAULTS, **options})


def test_the_model_is_what_is_left_under_its_own_names():
    """Optimizer, RNG, schedule, counters and values go; the one parent is stripped."""
    choice = _choose(TRAINED)
    assert choice.names == {"model.embed.weight": "embed.weight", "model.layers.0.w": "layers.0.w"}
    assert choice.prefix == "model."
    assert choice.left_out["optim.state.embed.weight.my_own_moment"] == "optimizer state"
    assert choice.left_out["rng.0.cpu"] == "random state"
    assert len(choice.left_out) == 8


def test_all_and_only_keep_the_keys_as_they_are():
    """Names change only by an option."""
    assert set(_choose(TRAINED, everything=True).names.values()) == set(TRAINED.entries)
    assert _choose(TRAINED, only=["model.l*"]).names == {"model.layers.0.w": "model.layers.0.w"}
    stripped = _choose(TRAINED, only=["model.l*"], strip_prefix="model.layers.")
    assert stripped.names == {"model.layers.0.w": "0.w"}


def test_a_nested_model_is_found():
    """{"app": {"model": ..., "optim": ...}}: the parent is app.model (verl#2262)."""
    index = _index(
        [
            ("app", "model", "a.w"),
            ("app", "model", "b.w"),
            ("app", "optim", "state", "a.w", "exp_avg"),
        ]
    )
    assert _choose(index).names == {"app.model.a.w": "a.w", "app.model.b.w": "b.w"}


def test_two_parents_are_ambiguous_and_only_is_named():
    """Model and EMA: the choice is the user's."""
    index = _index([("model", "w"), ("ema", "w")])
    with pytest.raises(RefusedError, match="model, ema") as caught:
        _choose(index)
    assert "--only" in caught.value.hint


def test_a_stray_tensor_beside_a_model_is_left_out_and_said():
    """The parent is called model: what stands beside it is not the model."""
    index = _index([("model", "w"), ("loss_history",)])
    choice = _choose(index)
    assert choice.names == {"model.w": "w"}
    assert choice.left_out == {"loss_history": "not in model"}


def test_a_flat_state_dict_keeps_its_names():
    """Keys without a parent are the model's own, also when all begin alike."""
    index = _index([("model.layers.0.w",), ("model.norm.w",)])
    assert set(_choose(index).names.values()) == {"model.layers.0.w", "model.norm.w"}


def test_wrapper_names_are_cleaned_and_counted():
    """_orig_mod and its kin are no part of a model's names (nanoGPT#325)."""
    index = _index([("model", "_orig_mod.l1._checkpoint_wrapped_module.w"), ("model", "l2.w")])
    choice = _choose(index)
    assert list(choice.names.values()) == ["l1.w", "l2.w"]
    assert choice.renamed == 1


def test_rename_takes_output_names_and_refuses_unknown_ones():
    """old -> new, after stripping; a typo is an error, and so is a collision."""
    assert "emb" in _choose(TRAINED, rename={"embed.weight": "emb"}).names.values()
    with pytest.raises(UsageError, match="no entry has the name 'embd'"):
        _choose(TRAINED, rename={"embd": "emb"})
    with pytest.raises(UsageError, match=r"would both be named 'layers\.0\.w'"):
        _choose(TRAINED, rename={"embed.weight": "layers.0.w"})


def test_patterns_that_match_nothing_are_errors():
    """--only with a typo must not export an empty file."""
    with pytest.raises(UsageError, match="no entry matches"):
        _choose(TRAINED, only=["modle.*"])
    with pytest.raises(RefusedError, match="nothing is left"):
        _choose(TRAINED, exclude=["*"])
