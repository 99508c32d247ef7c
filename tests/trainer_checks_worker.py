"""One rank of the tests that look inside a running trainer; prints one JSON document."""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config_file import make_config
from trainer.layout import Layout, build_mesh, resolve_parallel
from trainer.meter import Meter
from trainer.model import complete_model_config
from trainer.optim import build_optimizer
from trainer.parallel import build_model
from trainer.process import leave_at_once

DEVICE = torch.device("cpu")


class Counter(TorchDispatchMode):
    """Counts the collectives that are called inside it, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.counts[name.replace("_", "")] += 1
        return func(*args, **(kwargs or {}))


def build(tree: dict[str, Any]) -> Any:
    """A train state without a checkpointer."""
    from trainer.data import DataStream, load_corpus
    from trainer.state import TrainState

    config = make_config(tree)
    corpus = load_corpus(config.data)
    sizes = complete_model_config(config.model, config.data, tokenizer_vocab_size=256)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    parallel = resolve_parallel(config.parallel, world_size=world_size, model=sizes)
    layout = Layout(parallel, DEVICE, rank, world_size, build_mesh(parallel, device=DEVICE))
    data = DataStream(
        corpus, config.data, seed=0, rank=layout.data_rank, num_ranks=layout.num_data_ranks
    )
    model = build_model(config, sizes, layout)
    return TrainState(
        config, layout, model, build_optimizer(model, config.optim, device=DEVICE), data
    )


def count_collectives(tree: dict[str, Any]) -> dict[str, int]:
    """Data-parallel collectives of the second step."""
    from trainer.step import train_step

    state = build(tree)
    meter = Meter(num_tokens=1, num_copies=1)
    train_step(state, meter)
    with Counter() as counter:
        train_step(state, meter)
    return dict(counter.counts)


def find_mistakes(tree: dict[str, Any]) -> dict[str, str]:
    """What each mistake is answered with."""
    from trainer.mistakes import check_mesh, check_optimizer, check_same_start
    from trainer.model import Transformer

    state = build(tree)
    layout, model = state.layout, state.model
    answers: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
            answers[name] = ""
        except Exception as error:
            answers[name] = str(error)

    with torch.device("meta"):
        early = torch.optim.AdamW(Transformer(model.config).parameters())
    note("fine", lambda: check_optimizer(model, state.optimizer))
    note("optimizer", lambda: check_optimizer(model, early))
    note("same start", lambda: check_same_start(model, state.data.samples(), layout))
    note("same data", lambda: check_same_start(model, [1, 2], layout))
    note("mesh", lambda: check_mesh(layout.mesh))
    if layout.rank == 3:
        with torch.no_grad():
            next(model.parameters()).to_local().add_(1.0)
    note("other weights", lambda: check_same_start(model, state.data.samples(), layout))
    return answers


def scale_losses(tree: dict[str, Any]) -> dict[str, Any]:
    """What a sharded scaler does with an overflow on one rank only."""
    from trainer.scaler import LossScaler

    scaler = LossScaler(initial_scale=8.0, growth_steps=2)
    weight = torch.nn.Parameter(torch.zeros(4))
    finite, scales, gradients = [], [], []
    for step in range(4):
        weight.grad = torch.full((4,), 16.0)
        if step == 1 and dist.get_rank() == 2:
            weight.grad[0] = float("inf")
        finite.append(scaler.unscale([weight], device=DEVICE))
        gradients.append(float(weight.grad[1]))
        scaler.update(finite=finite[-1])
        scales.append(scaler.scale)
    return {"finite": finite, "scales": scales, "gradients": gradients}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    calls = {"count": count_collectives, "mistakes": find_mistakes, "scale": scale_losses}
    results = {name: calls[job["call"]](job["config"]) for name, job in plan.items()}
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(results))
    dist.destroy_process_group()
    leave_at_once(0)


if __name__ == "__main__":
    main()
