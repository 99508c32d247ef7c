"""Turns ``precision.mode`` into the dtypes of masters, gathers, reductions and products."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from trainer.config import PrecisionConfig

__all__ = ["Dtypes", "autocast", "dtypes_of"]


@dataclass(frozen=True)
class Dtypes:
    """``master``: as sharded and stored; ``gather``: as gathered and computed with (None: same);
    ``reduce``: as gradients are reduced."""

    master: torch.dtype
    gather: torch.dtype | None
    reduce: torch.dtype

    @property
    def compute(self) -> torch.dtype:
        return self.gather or self.master


def dtypes_of(config: PrecisionConfig) -> Dtypes:
    reduce_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.reduce_dtype]
    if config.mode == "fp32":
        return Dtypes(torch.float32, None, torch.float32)
    if config.mode == "bf16":
        return Dtypes(torch.bfloat16, None, torch.bfloat16)
    gather = torch.bfloat16 if config.mode == "mixed" else torch.float16
    return Dtypes(torch.float32, gather, reduce_dtype)


def autocast(
    dtypes: Dtypes, *, device: torch.device, sharded: bool
) -> AbstractContextManager[object]:
    """What stands in for FSDP's own casts where the model is whole (DDP, one process)."""
    if sharded or dtypes.gather is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtypes.gather)
