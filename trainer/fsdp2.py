"""Turns a model on the meta device into one sharded by ``fully_shard``, unit by unit."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from trainer.config import Config
from trainer.layout import Layout
from trainer.model import Transformer
from trainer.precision import dtypes_of

__all__ = ["shard_model", "unit_modules"]


def shard_model(model: Transformer, config: Config, layout: Layout) -> None:
    """Shard in place: each unit, then the root, which takes what is left."""
    dtypes = dtypes_of(config.precision)
    options: dict[str, Any] = {"mesh": layout.data_mesh}
    if dtypes.gather is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtypes.gather, reduce_dtype=dtypes.reduce
        )
    if config.memory.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for module in unit_modules(model, layout.parallel.unit):
        fully_shard(module, reshard_after_forward=layout.parallel.reshard_after_forward, **options)
    fully_shard(model, **options)


def unit_modules(model: Transformer, unit: str) -> list[nn.Module]:
    """The modules that become units of their own, the root aside."""
    if unit == "root":
        return []
    if unit == "block":
        return list(model.model.layers)
    leaves = [module for module in model.modules() if list(module.parameters(recurse=False))]
    # A tied embedding is also read by the head, outside of its own forward: the root keeps it.
    return [leaf for leaf in leaves if model.lm_head or leaf is not model.model.embed_tokens]
