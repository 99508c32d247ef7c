"""Turns a configuration into a model that is built, spread and initialised on this rank.

The order matters: build on the meta device, cut along ``tp``, wrap for recomputation, compile,
shard along the data axes, only then give storage and weights. Nothing whole is ever held,
except where the strategy itself asks for it (DDP, one process).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ckptool.errors import UsageError
from trainer import fsdp1, fsdp2
from trainer.config import Config, ModelConfig
from trainer.init import materialise, reset_buffers
from trainer.layout import Layout
from trainer.model import Transformer
from trainer.precision import dtypes_of
from trainer.tp import apply_tensor_parallel
from trainer.wrapping import apply_activation_checkpointing, compile_blocks

__all__ = ["build_model", "gradient_sync", "is_sharded"]


def build_model(config: Config, model_config: ModelConfig, layout: Layout) -> nn.Module:
    """The model, ready to train; collective."""
    if config.memory.cpu_offload and (layout.device.type == "cpu" or not is_sharded(layout)):
        raise UsageError(
            "memory.cpu_offload needs FSDP on a GPU",
            hint="set memory.cpu_offload to false",
        )
    with torch.device("meta"):
        model = Transformer(model_config)
    model.to(dtypes_of(config.precision).master)
    if layout.parallel.tp > 1:
        assert layout.mesh is not None
        apply_tensor_parallel(model, layout.mesh["tp"])
    apply_activation_checkpointing(model, config.memory.activation_checkpointing)
    compile_blocks(model, config.memory, tp=layout.parallel.tp)
    if layout.parallel.strategy == "fsdp1":
        return fsdp1.shard_model(model, config, layout)
    if layout.parallel.strategy == "fsdp2":
        fsdp2.shard_model(model, config, layout)
    storage = torch.device("cpu") if config.memory.cpu_offload else layout.device
    materialise(
        model,
        device=storage,
        num_layers=model_config.num_layers,
        seed=config.run.seed,
        draw_on=layout.device,
    )
    reset_buffers(model, device=layout.device)
    if layout.parallel.strategy == "ddp":
        ids = [layout.device] if layout.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    return model


def is_sharded(layout: Layout) -> bool:
    return layout.parallel.strategy in ("fsdp1", "fsdp2")


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Reduce gradients between ranks only in the last micro-batch of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif not last and isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        with model.no_sync():
            yield
    else:
        yield
