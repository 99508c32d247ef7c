"""Turns a model into one torch file and back: the legacy way, for programs that know no other.

Rank 0 gathers the whole model in host memory. Names are the model's own, so that the file is
what ``torch.load`` of a single-process model expects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from ckptool.errors import UsageError
from trainer.init import local_box

__all__ = ["export_full", "import_full"]


def export_full(model: nn.Module, path: str) -> None:
    """Write the model's weights, whole, through a temporary file; collective.

    Gathered one by one, so that the other ranks hold one whole parameter at a time.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, value in _weights_of(model).items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if _is_main():
            weights[name] = whole.detach().cpu().clone()
    if not _is_main():
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.partial")
    torch.save(weights, scratch)
    os.replace(scratch, target)


def import_full(model: nn.Module, path: str, *, device: torch.device) -> None:
    """Take weights from one torch file, which only rank 0 reads; collective.

    Raises UsageError on every rank for a file that is not there, or has other names or shapes.
    """
    state = _weights_of(model)
    weights, problem = _read(path, state) if _is_main() else ({}, "")
    problem = _from_main(problem)
    if problem:
        raise UsageError(problem, hint="checkpoint.import_full takes a flat dict of the weights")
    for name, value in state.items():
        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        if _is_main():
            whole.copy_(weights.pop(name))
        if dist.is_initialized():
            dist.broadcast(whole, src=0)
        local, offsets = local_box(value)
        place = (slice(low, low + size) for low, size in zip(offsets, local.shape, strict=True))
        local.copy_(whole[tuple(place)])
    set_model_state_dict(model, cast("dict[str, Any]", state))


def _weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return cast("dict[str, torch.Tensor]", get_model_state_dict(model))


def _read(path: str, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """The file's weights, and what is wrong with them."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        return {}, f"cannot read {path}: {error}"
    if not isinstance(weights, dict):
        return {}, f"{path} holds no dict of weights"
    for name in sorted({*weights, *state}):
        if name not in weights or name not in state:
            return {}, f"{path} and this model differ in {name}"
        if weights[name].shape != state[name].shape:
            theirs, ours = tuple(weights[name].shape), tuple(state[name].shape)
            return {}, f"{name} is {theirs} in {path} and {ours} in this model"
    return weights, ""


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_main(text: str) -> str:
    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
