"""One small model, spread over the ranks in every way that a live export must know."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LAYOUTS = (
    "fsdp2", "hsdp", "tp", "ddp", "fsdp1", "fsdp1-hybrid", "fsdp1-no-shard", "wrapped", "plain"
)  # fmt: skip


class Block(nn.Module):
    """Odd sizes: rows that four ranks cannot share evenly, and fewer rows than ranks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim)
        self.gate = nn.Linear(dim, 3)
        self.register_buffer("seen", torch.arange(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(self.norm(x)).relu())
        return x + y * self.gate(x).sum(dim=-1, keepdim=True)


class Model(nn.Module):
    """Blocks and a table, with a scalar and a buffer that every rank holds whole."""

    def __init__(self, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(101, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def build(layout: str, *, dim: int = 228, num_blocks: int = 2, seed: int = 0) -> nn.Module:
    """The model in a layout over four ranks; the same weights in all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(seed)
    model = Model(dim, num_blocks)
    with torch.no_grad():
        model.blocks[0].norm.bias.fill_(1e-41)  # what a cast makes zero
        model.blocks[0].norm.bias[:2] = torch.tensor([float("nan"), 3.4e38])
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "plain":
        return model
    if layout.startswith("fsdp1"):
        return _fsdp1(model, layout)
    axes: dict[str, int] = {
        "hsdp": {"copy": 2, "shard": 2},
        "tp": {"shard": 2, "tp": 2},
    }.get(layout, {"shard": 4})
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if layout == "tp":
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
    if layout == "wrapped":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        model.blocks[1].compile(backend="eager")
    shards = mesh["shard"] if layout == "tp" else mesh
    for block in model.blocks:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    return model


def _fsdp1(model: nn.Module, layout: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    hybrid = layout == "fsdp1-hybrid"
    names = {"fsdp1-hybrid": "HYBRID_SHARD", "fsdp1-no-shard": "NO_SHARD"}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[names.get(layout, "FULL_SHARD")],
        device_id=torch.device("cpu"),
        use_orig_params=True,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
        if hybrid
        else init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)),
    )
