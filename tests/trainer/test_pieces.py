"""Small pieces: random states, warnings, the schedule, the meter, the preemption's agreement."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainer.config import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
)
from trainer.estimate import estimate
from trainer.layout import Layout, resolve_parallel
from trainer.meter import Meter, NonFiniteError
from trainer.mistakes import warnings_of
from trainer.model import complete_model_config
from trainer.optim import learning_rate
from trainer.preempt import Preemption, open_job_store
from trainer.rng import capture_rng, derive_rng, restore_rng

CPU = torch.device("cpu")


def _draw() -> tuple[float, float, float, float]:
    return (
        float(torch.rand(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
    )


def test_random_states_come_back() -> None:
    """Torch, Python and numpy go on exactly where they were, half-used pairs included."""
    derive_rng(seed=1, rank=2, step=3)
    _draw()
    states = capture_rng(CPU)
    assert all(state.dtype == torch.uint8 and state.dim() == 1 for state in states.values())
    sizes = {name: state.numel() for name, state in states.items()}
    expected = [_draw() for _ in range(3)]
    assert {name: state.numel() for name, state in capture_rng(CPU).items()} == sizes
    restore_rng(states, CPU)
    assert [_draw() for _ in range(3)] == expected


def test_ranks_draw_differently() -> None:
    """A rank without a stored state gets one of its own, by seed, rank and step."""
    drawn = []
    for rank, step in ((0, 1), (1, 1), (0, 2), (0, 1)):
        derive_rng(seed=1, rank=rank, step=step)
        drawn.append(_draw())
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


def test_schedule_warms_up_and_falls() -> None:
    """Linear up to the peak, then a cosine down to the least rate, and never below."""
    config = OptimConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(step, config, num_steps=20) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_meter_names_the_step_that_went_wrong() -> None:
    """A NaN is found at the next exchange, with the step it came from."""
    meter = Meter(num_tokens=2, num_copies=1)
    good = torch.tensor(4.0)
    meter.add(1, loss_sum=good, grad_norm=good, lr=0.1)
    assert [result.loss for result in meter.flush()] == [2.0]
    meter.add(2, loss_sum=good, grad_norm=good, lr=0.1)
    meter.add(3, loss_sum=good, grad_norm=torch.tensor(float("nan")), lr=0.1)
    with pytest.raises(NonFiniteError, match="gradient norm of step 3 is nan"):
        meter.flush()


def _warnings(
    config: Config, *, world_size: int, device_bytes: int | None, **sizes: int
) -> list[str]:
    model = complete_model_config(
        ModelConfig(**{"dim": 1024, "num_layers": 8, "num_heads": 8, **sizes}),
        config.data,
        tokenizer_vocab_size=256,
    )
    parallel = resolve_parallel(config.parallel, world_size=world_size, model=model)
    layout = Layout(parallel, CPU, 0, world_size, None)
    result = estimate(config, model, parallel)
    return list(warnings_of(config, layout, result, device_bytes=device_bytes))


@pytest.mark.parametrize(
    ("config", "sizes", "gibibytes", "words"),
    [
        (Config(parallel=ParallelConfig(unit="root")), {}, None, "only the root is wrapped"),
        (Config(parallel=ParallelConfig(unit="layer")), {}, None, "every layer is a unit"),
        (Config(), {"dim": 64}, None, "under 1 MB"),
        (Config(), {"vocab_size": 200_000}, None, "over 1 GB"),
        (Config(), {}, 80, "DDP would fit"),
        (
            Config(data=DataConfig(seq_len=4096, global_batch=64)),
            {},
            24,
            "activation_checkpointing",
        ),
        (Config(memory=MemoryConfig(cpu_offload=True)), {}, 80, "CPU offload is on"),
    ],
)
def test_what_wastes_is_pointed_out(
    config: Config, sizes: dict[str, int], gibibytes: int | None, words: str
) -> None:
    """Each waste has its line, with what to set instead."""
    device_bytes = gibibytes << 30 if gibibytes else None
    lines = _warnings(config, world_size=8, device_bytes=device_bytes, **sizes)
    assert any(words in line for line in lines), lines


def test_a_sensible_setup_has_no_warnings() -> None:
    """Blocks as units, on GPUs that DDP would not fit: nothing to say."""
    config = Config(memory=MemoryConfig(activation_checkpointing="full"))
    sizes = {"dim": 4096, "num_layers": 32, "num_heads": 32}
    assert _warnings(config, world_size=64, device_bytes=80 << 30, **sizes) == []


def test_ranks_agree_on_one_step() -> None:
    """One flagged rank makes all stop at the same later step, whoever looks when."""
    store = open_job_store(1)
    ranks = [Preemption(store, rank=r, world_size=2, slack_steps=1) for r in range(2)]
    ranks[0].flagged_at = 0.0
    assert not ranks[1].due(7)  # this rank passed the boundary before the other looked
    assert not ranks[0].due(7)
    assert ranks[0].due(8)
    assert ranks[1].due(8)
    answers: list[float | None] = [None, None]

    def agree(rank: int) -> None:
        answers[rank] = ranks[rank].agree(8)

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers[0] is not None
    assert answers[0] == answers[1]


def test_a_silent_peer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone at the boundary gives up in bounded time."""
    monkeypatch.setattr("trainer.preempt.AGREE_TIMEOUT_S", 0.3)
    rank = Preemption(open_job_store(1), rank=0, world_size=2, slack_steps=1)
    assert rank.agree(8) is None


def test_missing_torch_names_the_pip_line() -> None:
    """Without torch the command says what to install, without a traceback."""
    hide = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "from trainer.__main__ import main\n"
        "code = main([])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'ckptool[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_is_done_leaves_at_once() -> None:
    """With peers, nothing of the interpreter's end can turn a run that succeeded into a failure."""
    run = (
        "import atexit, os, sys, trainer.train\n"
        "trainer.train.train = lambda config: print('trained') or 0\n"
        "atexit.register(os.abort)\n"
        "from trainer.__main__ import main\n"
        "sys.exit(main(['--set', 'run.root=unused']))"
    )
    env = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", run], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_axes_that_do_not_fit_are_refused() -> None:
    """A mesh that is not the world size, or cuts what does not divide, is named."""
    from ckptool.errors import UsageError

    model = complete_model_config(ModelConfig(), DataConfig(), tokenizer_vocab_size=256)
    for parallel, world_size, words in (
        (ParallelConfig(dp_shard=3), 4, "is not the world size 4"),
        (ParallelConfig(tp=3), 3, "does not divide by tp 3"),
        (ParallelConfig(strategy="single"), 2, "was started on 2 ranks"),
        (ParallelConfig(strategy="ddp", tp=2), 2, "does not fit ddp"),
        (ParallelConfig(tp=2), 1, "does not fit one process"),
        (ParallelConfig(strategy="fsdp1", dp_replicate=2), 4, "needs HYBRID_SHARD"),
        (ParallelConfig(strategy="fsdp1", tp=2), 2, "shard over more than one rank"),
        (
            ParallelConfig(strategy="fsdp1", dp_replicate=4, fsdp1_sharding="HYBRID_SHARD"),
            4,
            "would not reduce gradients",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            resolve_parallel(parallel, world_size=world_size, model=model)
    assert resolve_parallel(replace(ParallelConfig()), world_size=6, model=model).dp_shard == 6
