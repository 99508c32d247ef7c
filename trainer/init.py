"""Turns a seed into weights that are the same for every layout and world size.

A parameter is cut into blocks of rows; each block's random numbers come from the run's seed,
the parameter's name and the block's number. A rank draws only the blocks that its own shard
touches, so no rank ever holds the whole model, or even a whole parameter.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.model import Rotary

__all__ = ["clean_name", "init_parameter", "local_box", "materialise"]

_BLOCK_NUMEL = 1 << 18
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def materialise(
    model: nn.Module,
    *,
    device: torch.device,
    num_layers: int,
    seed: int,
    draw_on: torch.device | None = None,
) -> None:
    """Give a (sharded) model on the meta device its storage and its first weights, in place.

    ``draw_on``: whose random numbers to use, where that is not the device that keeps the weights.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        init_parameter(
            parameter,
            name=clean_name(name),
            num_layers=num_layers,
            seed=seed,
            draw_on=draw_on or device,
        )


def reset_buffers(model: nn.Module, *, device: torch.device) -> None:
    """Recompute what no checkpoint holds."""
    for module in model.modules():
        if isinstance(module, Rotary):
            module.reset_buffers(device)


def clean_name(name: str) -> str:
    """A parameter's name without the segments that wrappers add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


@torch.no_grad()
def init_parameter(
    parameter: torch.Tensor, *, name: str, num_layers: int, seed: int, draw_on: torch.device
) -> None:
    """Fill this rank's part of one parameter; one seed draws other numbers on a GPU."""
    local, offsets = local_box(parameter)
    if name.endswith("norm.weight"):
        local.fill_(1.0)
        return
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / math.sqrt(2 * num_layers) if residual else 0.02
    numbers = _Numbers(name, seed, draw_on)
    _fill_normal(local, parameter.shape, offsets, std=std, numbers=numbers)


def local_box(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's own tensor of a parameter, and where in the whole it starts."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.dim()
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local().detach(), tuple(offsets)


def _fill_normal(
    local: torch.Tensor,
    shape: torch.Size,
    offsets: tuple[int, ...],
    *,
    std: float,
    numbers: _Numbers,
) -> None:
    """Draw the blocks of rows that ``local`` touches, and keep its part of each."""
    if local.numel() == 0:
        return
    row_numel = math.prod(shape[1:])
    block_rows = max(1, _BLOCK_NUMEL // row_numel)
    first, end = offsets[0], offsets[0] + local.shape[0]
    columns = tuple(
        slice(start, start + size) for start, size in zip(offsets[1:], local.shape[1:], strict=True)
    )
    for block in range(first // block_rows, (end - 1) // block_rows + 1):
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        drawn = numbers.normal((stop - start, *shape[1:]), block=block, std=std)
        low, high = max(start, first), min(stop, end)
        part = drawn[(slice(low - start, high - start), *columns)]
        local[low - first : high - first].copy_(part)


class _Numbers:
    """The random numbers of one parameter, block by block."""

    def __init__(self, name: str, seed: int, device: torch.device) -> None:
        self._name, self._seed = name, seed
        self._generator = torch.Generator(device=device)

    def normal(self, shape: tuple[int, ...], *, block: int, std: float) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}/{self._name}/{block}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        drawn = torch.empty(shape, device=self._generator.device)
        return drawn.normal_(0.0, std, generator=self._generator)
