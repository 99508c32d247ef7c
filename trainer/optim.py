"""Turns parameters into an AdamW with two groups, a step number into a learning rate, and
gradients into clipped ones.

Groups go by name, not by shape: FSDP1 hands out flat views. What the configuration says wins
over what a checkpoint's param_groups say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from trainer.config import OptimConfig
from trainer.init import clean_name
from trainer.layout import Layout

__all__ = ["apply_hyperparameters", "build_optimizer", "clip_gradients", "learning_rate"]


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, device: torch.device
) -> torch.optim.AdamW:
    """AdamW over the model as it is now: build it after sharding, never before."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not _is_norm(name)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[True]}, {"params": groups[False]}], lr=config.lr, fused=_fused(device)
    )
    apply_hyperparameters(optimizer.param_groups, config, device=device)
    return optimizer


def apply_hyperparameters(
    groups: list[dict[str, Any]], config: OptimConfig, *, device: torch.device
) -> None:
    """Set what the configuration says on both groups: decayed weights, then norms."""
    for group, decay in zip(groups, (config.weight_decay, 0.0), strict=True):
        group.update(
            weight_decay=decay,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=_fused(device),
            foreach=None,
        )


def learning_rate(step: int, config: OptimConfig, *, num_steps: int) -> float:
    """The rate of a step (from 0): linear warm-up, then a cosine down to ``min_lr_ratio``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def clip_gradients(model: nn.Module, layout: Layout, *, max_norm: float) -> torch.Tensor:
    """Scale all gradients to a total norm of at most ``max_norm`` (0: leave them); the norm."""
    if isinstance(model, FullyShardedDataParallel) and layout.parallel.tp == 1:
        return model.clip_grad_norm_(max_norm or math.inf)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if isinstance(model, FullyShardedDataParallel):
        norm = _fsdp1_tensor_parallel_norm(model, layout)
    else:
        norm = _total_norm(gradients)
    if max_norm:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(scale.to(local.device))
    return norm


def _total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Norms of each kind of layout apart: foreach operations do not mix device meshes."""
    kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        kinds[key].append(gradient)
    norms: list[torch.Tensor] = []
    for alike in kinds.values():
        norm = torch.nn.utils.get_total_norm(alike)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.stack([norm.float() for norm in norms]).square().sum().sqrt()


def _fsdp1_tensor_parallel_norm(model: nn.Module, layout: Layout) -> torch.Tensor:
    """FSDP1's own norm knows nothing of the ``tp`` axis: its gradients are plain local views.

    What is cut along ``tp`` (everything but the norms) adds up over both axes, the rest over
    the sharded one.
    """
    assert layout.mesh is not None
    squares = torch.zeros(2, device=layout.device)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            cut = not _is_norm(name)
            squares[int(cut)] += parameter.grad.float().square().sum().to(layout.device)
    if layout.parallel.fsdp1_sharding != "NO_SHARD":
        dist.all_reduce(squares, group=layout.mesh.get_group("dp_shard"))
    cut_along_tp = squares[1:].clone()
    dist.all_reduce(cut_along_tp, group=layout.mesh.get_group("tp"))
    return (squares[0] + cut_along_tp[0]).sqrt()


def _is_norm(name: str) -> bool:
    return clean_name(name).endswith("norm.weight")


def _fused(device: torch.device) -> bool | None:
    return True if device.type == "cuda" else None
