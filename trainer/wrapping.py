"""Turns blocks into ones that recompute their activations, and compiles them, one by one.

Neither reaches the names of a checkpoint: the checkpoint wrapper hides itself from state
dicts, and a block is compiled in place, without a wrapper around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainer.config import MemoryConfig
from trainer.model import Attention, FeedForward, Transformer

__all__ = ["apply_activation_checkpointing", "compile_blocks"]

_KEPT = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def apply_activation_checkpointing(model: Transformer, mode: str) -> None:
    """``full`` keeps only each block's input; ``selective`` also keeps attention's output and
    every second matrix product; ``none`` keeps everything."""
    if mode == "none":
        return
    options: dict[str, Any] = {"checkpoint_impl": CheckpointImpl.NO_REENTRANT}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(block, **options)


def compile_blocks(model: Transformer, config: MemoryConfig, *, tp: int) -> None:
    """Compile each block by itself: they are alike, so one compilation serves all.

    Under tensor parallelism the two halves of a block, each: torch 2.13 computes wrong gradients,
    silently, where a residual is added to a reduced output within one compiled region.
    """
    if not config.compile:
        return
    regions: list[nn.Module] = list(model.model.layers)
    if tp > 1:
        regions = [part for part in model.modules() if isinstance(part, (Attention, FeedForward))]
    for region in regions:
        region.compile(backend=config.compile_backend)


def _selective_contexts() -> Any:
    contexts: Any = create_selective_checkpoint_contexts
    return contexts(_policy([0, 0]))


def _policy(counts: list[int]) -> Callable[..., CheckpointPolicy]:
    return partial(_keep_or_recompute, counts)


def _keep_or_recompute(
    counts: list[int], ctx: Any, op: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    if op == torch.ops.aten.mm.default:
        counts[ctx.is_recompute] += 1
        keep = counts[ctx.is_recompute] % 2 == 1
    else:
        keep = getattr(op, "overloadpacket", None) in _attention_ops()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _attention_ops() -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, n) for n in _KEPT if hasattr(torch.ops.aten, n))
