"""Turns a running step into the bytes that it holds, to stand beside the estimate.

On a GPU the allocator's own count; on CPU the sum of the tensors that stay.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from trainer.state import TrainState

__all__ = ["MemoryProbe", "memory_of"]


class MemoryProbe:
    """``steady``: what is there between steps, gradients included; ``peak``: None on CPU."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.steady = 0
        self.peak: int | None = None
        if state.layout.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def look(self) -> None:
        """Call it after the optimizer's step, while the gradients are still there."""
        if self._state.layout.device.type == "cuda":
            self.steady = torch.cuda.memory_allocated()
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.steady = sum(_num_bytes(tensor) for tensor in _kept(self._state))


def memory_of(device: torch.device) -> int | None:
    """All of a GPU's memory; None on CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _kept(state: TrainState) -> Iterator[torch.Tensor]:
    for parameter in state.model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        for moment in state.optimizer.state.get(parameter, {}).values():
            if isinstance(moment, torch.Tensor):
                yield moment
    yield from state.model.buffers()


def _num_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
