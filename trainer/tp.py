"""Turns the linear layers of a model into tensor-parallel ones along the ``tp`` axis.

Attention and feed-forward are cut by columns on the way in and by rows on the way out, the
embedding by vocabulary rows, the head by columns; norms stay whole on every rank. It comes
before data-parallel sharding, which then cuts what each rank has left.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from trainer.model import Transformer

__all__ = ["apply_tensor_parallel"]


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Replace the model's linear weights by DTensors on the 1-D ``mesh``, in place."""
    root: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    }
    if model.lm_head is not None:
        root["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, root)
    for block in model.model.layers:
        plan: dict[str, ParallelStyle] = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
