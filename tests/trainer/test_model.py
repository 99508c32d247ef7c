"""The model is Llama's, and its first weights depend on nothing but the seed."""

from __future__ import annotations

import pytest
import torch

from trainer.config import DataConfig, ModelConfig
from trainer.init import clean_name, init_parameter, materialise, reset_buffers
from trainer.model import Transformer, complete_model_config, hf_config
from trainer.sizes import rows_of


def _model(*, tied: bool = False, kv_heads: int = 2) -> Transformer:
    config = complete_model_config(
        ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=kv_heads, tied=tied),
        DataConfig(seq_len=16),
        tokenizer_vocab_size=64,
    )
    with torch.device("meta"):
        model = Transformer(config)
    materialise(model, device=torch.device("cpu"), num_layers=2, seed=1)
    reset_buffers(model, device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_weights_and_agrees(tied: bool) -> None:
    """``LlamaForCausalLM`` takes our state dict under its own names, and gives our logits."""
    transformers = pytest.importorskip("transformers")
    model = _model(tied=tied)
    config = transformers.LlamaConfig(**hf_config(model.config))
    theirs = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    theirs.tie_weights()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_number_of_parameters_is_what_the_configuration_says() -> None:
    """The arithmetic of the configuration counts what the model has."""
    for tied in (False, True):
        model = _model(tied=tied)
        counted = sum(parameter.numel() for parameter in model.parameters())
        assert model.config.num_parameters == counted


def test_buffers_are_never_stored() -> None:
    """Rotary tables are computed, not saved and loaded."""
    assert not any("rotary" in name for name in _model().state_dict())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(1000, 700), (7,), (3, 5)])
def test_a_shard_is_drawn_like_the_whole(shape: tuple[int, ...], num_ranks: int) -> None:
    """Rows drawn on their own rank are those of the parameter drawn at once."""
    from trainer.init import _fill_normal, _Numbers

    def draw(first: int, num_rows: int) -> torch.Tensor:
        local = torch.empty((num_rows, *shape[1:]))
        offsets = (first, *(0 for _ in shape[1:]))
        numbers = _Numbers("a.weight", 5, local.device)
        _fill_normal(local, torch.Size(shape), offsets, std=0.02, numbers=numbers)
        return local

    parts, first = [], 0
    for rank in range(num_ranks):
        num_rows = rows_of(shape[0], rank=rank, num_ranks=num_ranks)
        parts.append(draw(first, num_rows))
        first += num_rows
    assert torch.equal(torch.cat(parts), draw(0, shape[0]))


def test_weights_depend_on_the_name_and_the_seed() -> None:
    """Two parameters of one shape differ, and so do two seeds."""
    drawn = []
    for name, seed in (("a.weight", 1), ("b.weight", 1), ("a.weight", 2), ("a.weight", 1)):
        weight = torch.empty(8, 8)
        init_parameter(weight, name=name, num_layers=1, seed=seed, draw_on=torch.device("cpu"))
        drawn.append(weight)
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0], drawn[3])


def test_names_are_clean_of_wrappers() -> None:
    """Whatever wraps a module, its parameters keep their names."""
    name = "module.model._orig_mod.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w"
    assert clean_name(name) == "model.layers.0.w"
