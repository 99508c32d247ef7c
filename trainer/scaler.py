"""Turns losses too small for fp16 gradients into larger ones, and the gradients back.

A sharded gradient scaler: each rank looks only at its own shards, and all ranks agree on
whether any of them overflowed, so that all step or none does. It serves every strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["LossScaler"]

_BACKOFF = 0.5
_GROWTH = 2.0


class LossScaler:
    """Doubles its scale after ``growth_steps`` good steps, halves it at an overflow."""

    def __init__(self, *, initial_scale: float, growth_steps: int) -> None:
        self.scale = initial_scale
        self._growth_steps = growth_steps
        self._good_steps = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor], *, device: torch.device) -> bool:
        """Divide gradients by the scale, in place; whether all ranks' are finite. Collective."""
        overflow = torch.zeros((), device=device)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.div_(self.scale)
            if local.numel():
                overflow += (~torch.isfinite(local).all()).to(device)
        if dist.is_initialized():
            dist.all_reduce(overflow)
        return overflow.item() == 0

    def update(self, *, finite: bool) -> None:
        if not finite:
            self.scale, self._good_steps = self.scale * _BACKOFF, 0
            return
        self._good_steps += 1
        if self._good_steps >= self._growth_steps:
            self.scale, self._good_steps = self.scale * _GROWTH, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
