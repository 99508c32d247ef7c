"""Turns one global batch into one update of the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainer.memory import MemoryProbe
from trainer.meter import Meter
from trainer.optim import clip_gradients, learning_rate, set_learning_rate
from trainer.parallel import gradient_sync, is_sharded
from trainer.precision import autocast, dtypes_of
from trainer.state import TrainState

__all__ = ["train_step"]


def train_step(state: TrainState, meter: Meter, *, probe: MemoryProbe | None = None) -> None:
    """Forward, backward and update over one global batch; ``probe`` looks before gradients go."""
    config, layout, model = state.config, state.layout, state.model
    rate = learning_rate(state.step, config.optim, num_steps=config.run.steps)
    set_learning_rate(state.optimizer, rate)
    scale = state.scaler.scale if state.scaler else 1.0
    loss_sum = torch.zeros((), dtype=torch.float64, device=layout.device)
    batches = state.data.next_batch()
    tokens_per_rank = sum(targets.numel() for _, targets in batches)
    for index, (tokens_BL, targets_BL) in enumerate(batches):
        with gradient_sync(model, last=index == len(batches) - 1):
            loss = _loss_sum(state, tokens_BL, targets_BL)
            torch.autograd.backward(loss * (scale / tokens_per_rank))
        loss_sum += loss.detach()
    finite = state.scaler is None or state.scaler.unscale(model.parameters(), device=layout.device)
    norm = torch.zeros((), device=layout.device)
    if finite:
        norm = clip_gradients(model, layout, max_norm=config.optim.clip_norm)
        state.optimizer.step()
    if state.scaler is not None:
        state.scaler.update(finite=finite)
    if probe is not None:
        probe.look()
    state.optimizer.zero_grad(set_to_none=True)
    meter.add(state.step + 1, loss_sum=loss_sum, grad_norm=norm, lr=rate)
    state.step += 1
    state.tokens += tokens_per_rank * layout.num_data_ranks


def _loss_sum(state: TrainState, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy of one micro-batch."""
    device, dtypes = state.layout.device, dtypes_of(state.config.precision)
    tokens_BL = tokens_BL.to(device, non_blocking=True)
    targets_BL = targets_BL.to(device, non_blocking=True)
    with autocast(dtypes, device=device, sharded=is_sharded(state.layout)):
        logits_BLV = state.model(tokens_BL)
    logits = logits_BLV.flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BL.flatten(), reduction="sum")
