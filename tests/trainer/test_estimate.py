"""What is estimated and explained is what torch does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from trainer.config import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
)
from trainer.estimate import estimate
from trainer.explain import LESSON_SHAPES, explain_lesson
from trainer.layout import Layout, build_mesh, resolve_parallel
from trainer.model import complete_model_config
from trainer.sizes import ROOT, cut_model

# Sizes that do not divide evenly, so that ranks differ.
MODEL = complete_model_config(
    ModelConfig(dim=72, num_layers=2, num_heads=4, ffn_dim=200, vocab_size=258),
    DataConfig(seq_len=16),
    tokenizer_vocab_size=256,
)


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """A process group of 8 ranks of which only this one exists; nothing is ever sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"dp_replicate": 2},
        {"tp": 2},
        {"dp_replicate": 2, "tp": 2},
        {"unit": "layer"},
        {"unit": "root"},
    ],
)
def test_cuts_are_those_of_fully_shard(fake_ranks: None, axes: dict[str, int]) -> None:
    """Arithmetic on shapes gives the local shapes that torch gives, on any rank."""
    from torch.distributed.fsdp import FSDPModule

    from trainer.parallel import build_model

    parallel = resolve_parallel(ParallelConfig(**axes), world_size=8, model=MODEL)
    device = torch.device("cpu")
    layout = Layout(parallel, device, 5, 8, build_mesh(parallel, device=device))
    model = build_model(Config(), MODEL, layout)
    units = cut_model(MODEL, parallel, rank=5)
    real = {name: tuple(value.to_local().shape) for name, value in model.named_parameters()}
    cuts = {cut.name: cut.local_shape for unit in units for cut in unit.parameters}
    assert cuts == real
    wrapped = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert {unit.name for unit in units} | {ROOT} == {name or ROOT for name in wrapped}


@pytest.mark.parametrize(("num_ranks", "held"), [(1, 8320), (2, 4160), (4, 2080)])
def test_the_lesson_that_everyone_starts_with(num_ranks: int, held: int) -> None:
    """Linear(64, 64), ReLU, Linear(64, 64): 8,320 parameters, 4,160 on two, 2,080 on four."""
    (unit,) = explain_lesson(num_ranks)
    assert (unit.tp_numel, unit.local_numel) == (8320, held)
    weight = unit.parameters[0]
    assert weight.shape == (64, 64)
    assert weight.local_shape == (64 // num_ranks, 64)
    assert weight.placement == "Shard(0)"


def test_the_lesson_is_that_model() -> None:
    """The shapes of the lesson are those of the model that it names."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == LESSON_SHAPES


@pytest.mark.parametrize(("mode", "per_parameter"), [("fp32", 16), ("mixed", 16), ("bf16", 8)])
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_bytes_per_parameter(mode: str, per_parameter: int, num_ranks: int) -> None:
    """16 bytes a parameter with fp32 masters, 8 in pure bf16, a share of it on each rank."""
    model = replace(MODEL, dim=64, ffn_dim=192, vocab_size=256)
    parallel = resolve_parallel(ParallelConfig(), world_size=num_ranks, model=model)
    config = Config(precision=PrecisionConfig(mode=mode))
    result = estimate(config, model, parallel)
    assert result.steady - result.buffers == per_parameter * model.num_parameters // num_ranks
    assert result.checkpoint == (3 * per_parameter // 4) * model.num_parameters


def test_ddp_pays_everything_on_every_rank() -> None:
    """DDP's steady state does not depend on the number of ranks."""
    parallel = ParallelConfig(strategy="ddp")
    results = [
        estimate(Config(), MODEL, resolve_parallel(parallel, world_size=n, model=MODEL))
        for n in (2, 8)
    ]
    assert {result.steady - result.buffers for result in results} == {16 * MODEL.num_parameters}


def test_collectives_of_four_blocks_and_a_root() -> None:
    """2U-1 all-gathers and U reduce-scatters; about 3P elements a step against DDP's 2P."""
    model = replace(MODEL, num_layers=4)
    sharded = resolve_parallel(ParallelConfig(), world_size=64, model=model)
    config = Config(data=DataConfig(global_batch=64, seq_len=16))
    calls = estimate(config, model, sharded).collectives
    assert (calls.num_all_gathers, calls.num_reduce_scatters) == (9, 5)
    ddp = resolve_parallel(ParallelConfig(strategy="ddp"), world_size=64, model=model)
    root = 2 * model.vocab_size * model.dim + model.dim
    ratio = calls.sent_bytes / estimate(config, model, ddp).collectives.sent_bytes
    assert ratio == pytest.approx((3 - root / model.num_parameters) / 2, rel=1e-3)


def test_commands_print_without_starting_ranks() -> None:
    """``estimate --json`` is one document, ``explain`` a table with shape beside placement."""
    base = [sys.executable, "-m", "trainer"]
    done = subprocess.run(
        [*base, "estimate", "--world-size", "8", "--set", "precision.mode=mixed", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    document = json.loads(done.stdout)
    assert document["schema"] == "trainer.estimate/1"
    assert document["steady"] == sum(
        document[name] for name in ("weights", "gradients", "moments", "buffers")
    )
    done = subprocess.run(
        [*base, "explain", "--lesson", "--world-size", "2"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "8,320 parameters; rank 0 of 2 holds 4,160" in done.stdout
    assert "(64, 64) ->         (32, 64)  Shard(0)" in done.stdout


def test_cpu_offload_moves_the_steady_state_to_the_host() -> None:
    """What CPU offload keeps in host memory is not counted on the device."""
    parallel = resolve_parallel(ParallelConfig(), world_size=2, model=MODEL)
    on_device = estimate(Config(), MODEL, parallel)
    offloaded = estimate(Config(memory=MemoryConfig(cpu_offload=True)), MODEL, parallel)
    assert offloaded.steady == offloaded.buffers
    assert offloaded.host + offloaded.buffers == on_device.steady
    assert on_device.host == 0
