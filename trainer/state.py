"""Turns a training state into the mapping that a checkpoint stores, and back.

| keys | as |
|---|---|
| ``model.<name>`` | sharded tensors; names clean of wrappers |
| ``optim.state.<name>.<moment>``, ``optim.param_groups`` | not flattened; ``params`` by name |
| ``sched``, ``step``, ``tokens``, ``data``, ``scaler`` | values, equal on all ranks |
| ``rng.<rank>.{cpu,cuda,python,numpy}`` | uint8 tensors of one rank |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from trainer.config import Config
from trainer.data import DataStream
from trainer.fsdp1 import gather_along_data
from trainer.layout import Layout
from trainer.optim import apply_hyperparameters, learning_rate
from trainer.rng import capture_rng, derive_rng, restore_rng
from trainer.scaler import LossScaler

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """Everything that a resume needs."""

    config: Config
    layout: Layout
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: DataStream
    scaler: LossScaler | None = None
    step: int = 0
    tokens: int = 0

    def capture(self) -> dict[str, Any]:
        """What all ranks store together; collective where the strategy's state dicts are."""
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
            **self._values(),
        }

    def capture_rank(self) -> dict[str, Any]:
        """What only this rank stores."""
        return {"rng": {str(self.layout.rank): capture_rng(self.layout.device)}}

    def templates(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a load fills: what every checkpoint has, and what it may lack (this rank's
        generators on more ranks than before, a scaler where the run was not fp16)."""
        shared, own = self.capture(), self.capture_rank()
        if self.scaler is not None:
            own["scaler"] = shared.pop("scaler")
        return shared, own

    def restore(self, stored: Mapping[str, Any], own: Mapping[str, Any], *, found: bool) -> None:
        """Take back what ``templates`` gave, filled by a load; collective.

        ``found`` says whether the checkpoint had this rank's generators.
        """
        self.data.restore(stored["data"])
        self.step, self.tokens = int(stored["step"]), int(stored["tokens"])
        if self.scaler is not None:
            self.scaler.restore(own["scaler"])
        groups = stored["optim"]["param_groups"]
        apply_hyperparameters(groups, self.config.optim, device=self.layout.device)
        set_model_state_dict(self.model, stored["model"])
        optim = dict(stored["optim"])
        parallel = self.layout.parallel
        if parallel.strategy == "fsdp1" and parallel.tp > 1:
            optim["state"] = gather_along_data(optim["state"])
        set_optimizer_state_dict(self.model, self.optimizer, optim)
        rank = self.layout.rank
        if found:
            restore_rng(own["rng"][str(rank)], self.layout.device)
        else:
            derive_rng(seed=self.config.run.seed, rank=rank, step=self.step)

    def _values(self) -> dict[str, Any]:
        optim, num_steps = self.config.optim, self.config.run.steps
        values: dict[str, Any] = {
            "sched": {
                "kind": "cosine",
                "num_steps": num_steps,
                "warmup_steps": optim.warmup_steps,
                "next_lr": learning_rate(self.step, optim, num_steps=num_steps),
            },
            "step": self.step,
            "tokens": self.tokens,
            "data": self.data.state(),
        }
        if self.scaler is not None:
            values["scaler"] = self.scaler.state()
        return values
