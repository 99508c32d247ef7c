"""Turns a model on the meta device into one wrapped by FSDP1, with its original parameters.

A unit is materialised whole, initialised and sharded before the next one, so a rank holds its
shards and one unit at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate

from trainer.config import Config
from trainer.init import clean_name, init_parameter
from trainer.layout import Layout
from trainer.model import Block, Rotary, Transformer
from trainer.precision import dtypes_of

__all__ = ["gather_along_data", "shard_model"]


def shard_model(model: Transformer, config: Config, layout: Layout) -> nn.Module:
    """Wrap by block by hand, or by one of torch's two policies; returns the wrapped root."""
    options = _options(model, config, layout)
    parallel = layout.parallel
    if parallel.unit != "root" and parallel.fsdp1_wrap == "block":
        for index, block in enumerate(model.model.layers):
            model.model.layers[index] = FullyShardedDataParallel(block, **options)
    elif parallel.unit != "root" and parallel.fsdp1_wrap == "transformer":
        kind = CheckpointWrapper if _is_checkpointed(config) else Block
        options["auto_wrap_policy"] = partial(
            transformer_auto_wrap_policy, transformer_layer_cls={kind}
        )
    elif parallel.unit != "root":
        options["auto_wrap_policy"] = partial(
            size_based_auto_wrap_policy, min_num_params=parallel.fsdp1_min_unit_params
        )
    return FullyShardedDataParallel(model, **options)


def gather_along_data(state: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizer state by name, whole but for its cut along ``tp``; collective.

    FSDP1 loads into a flat view of what tensor parallelism left on this rank, but gathers a
    two-axis DTensor over both axes and takes the wrong rows of it. So gather it here.
    """
    return {
        name: {key: _gather_value(value) for key, value in moments.items()}
        for name, moments in state.items()
    }


def _gather_value(value: Any) -> Any:
    if not isinstance(value, DTensor) or "tp" not in (value.device_mesh.mesh_dim_names or ()):
        return value
    placements = [Replicate()] * (value.device_mesh.ndim - 1) + [value.placements[-1]]
    return value.redistribute(placements=placements).to_local()


def _options(model: Transformer, config: Config, layout: Layout) -> dict[str, Any]:
    dtypes = dtypes_of(config.precision)
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[layout.parallel.fsdp1_sharding],
        "device_mesh": layout.data_mesh,
        "device_id": layout.device,
        "use_orig_params": layout.parallel.use_orig_params,
        "param_init_fn": _initialiser(model, config, layout.device),
    }
    if dtypes.gather is not None:
        options["mixed_precision"] = MixedPrecision(
            param_dtype=dtypes.gather,
            reduce_dtype=dtypes.reduce,
            buffer_dtype=torch.float32,
            cast_forward_inputs=True,
        )
    if config.memory.cpu_offload:
        options["cpu_offload"] = CPUOffload(offload_params=True)
    return options


def _initialiser(
    model: Transformer, config: Config, device: torch.device
) -> Callable[[nn.Module], None]:
    """Materialise and fill the parameters that a module holds itself, by their full names."""
    names = {id(module): name for name, module in model.named_modules()}

    def initialise(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        prefix = names[id(module)]
        for name, parameter in module.named_parameters(recurse=False):
            full = clean_name(f"{prefix}.{name}")
            init_parameter(
                parameter,
                name=full,
                num_layers=len(model.model.layers),
                seed=config.run.seed,
                draw_on=device,
            )
        if isinstance(module, Rotary):
            module.reset_buffers(device)

    return initialise


def _is_checkpointed(config: Config) -> bool:
    return config.memory.activation_checkpointing != "none"
