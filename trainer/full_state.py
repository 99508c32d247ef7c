"""Turns a model into one torch file and back: the legacy way, for programs that know no other.

Rank 0 gathers the whole model in host memory. Names are the model's own, so that the file is
what ``torch.load`` of a single-process model expects.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from ckptool.errors import UsageError

__all__ = ["export_full", "import_full"]


def export_full(model: nn.Module, path: str) -> None:
    """Write the model's weights, whole, through a temporary file; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if not _is_main():
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.partial")
    torch.save(weights, scratch)
    os.replace(scratch, target)


def import_full(model: nn.Module, path: str) -> None:
    """Take weights from one torch file, which only rank 0 reads; collective.

    Raises UsageError on every rank for a file that is not there or has other names.
    """
    weights: dict[str, Any] = {}
    problem = ""
    if _is_main():
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            problem = f"cannot read {path}: {error}"
    known = set(get_model_state_dict(model))
    if not problem and _is_main() and set(weights) != known:
        odd = sorted(set(weights) ^ known)[0]
        problem = f"{path} and this model differ in {odd}"
    problem = _from_main(problem)
    if problem:
        raise UsageError(problem, hint="checkpoint.import_full takes a flat dict of the weights")
    several = dist.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    set_model_state_dict(model, weights, options=options)


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_main(text: str) -> str:
    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
