"""Turns what steps leave on the device into one line a step, without stopping each step.

Losses stay on the device until someone needs them: every ``log_every`` steps and before each
save. Only then do the ranks exchange them and look whether all are finite.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Meter", "NonFiniteError", "StepResult"]


class NonFiniteError(Exception):
    """A loss or a gradient norm is NaN or Inf: the weights after it are not worth keeping."""

    def __init__(self, step: int, what: str, value: float) -> None:
        super().__init__(f"{what} of step {step} is {value}")
        self.step = step


@dataclass(frozen=True)
class StepResult:
    """One step as all ranks agree on it. ``loss`` is the mean over the global batch's tokens."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float


@dataclass(frozen=True)
class _Pending:
    step: int
    loss_sum: torch.Tensor
    grad_norm: torch.Tensor
    lr: float


class Meter:
    """``num_tokens`` is of a step's global batch; ``num_copies``: ranks that see the same data."""

    def __init__(self, *, num_tokens: int, num_copies: int) -> None:
        self._divisor = num_tokens * num_copies
        self._pending: list[_Pending] = []
        self._since = time.perf_counter()

    def add(self, step: int, *, loss_sum: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        """Note a step; both tensors stay where they are."""
        self._pending.append(_Pending(step, loss_sum.double(), grad_norm.double(), lr))

    def flush(self) -> list[StepResult]:
        """Exchange and return the noted steps; raises NonFiniteError. Collective."""
        if not self._pending:
            return []
        losses = torch.stack([item.loss_sum for item in self._pending])
        if dist.is_initialized():
            dist.all_reduce(losses)
        loss_values = (losses / self._divisor).tolist()
        norm_values = torch.stack([item.grad_norm for item in self._pending]).tolist()
        seconds = (time.perf_counter() - self._since) / len(self._pending)
        results = []
        for item, loss, norm in zip(self._pending, loss_values, norm_values, strict=True):
            for what, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise NonFiniteError(item.step, what, value)
            results.append(StepResult(item.step, loss, norm, item.lr, seconds))
        self._pending.clear()
        self.restart_clock()
        return results

    def restart_clock(self) -> None:
        """Leave what happened since the last flush (a save, say) out of the step times."""
        self._since = time.perf_counter()
