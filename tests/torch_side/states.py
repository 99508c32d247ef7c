"""A training state of every kind of entry, with values that only depend on the place."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def pattern(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Values that tell every element's place, in any dtype."""
    count = 1
    for size in shape:
        count *= size
    numbers = (torch.arange(count, dtype=torch.int64) * 31 + seed * 7) % 251
    if dtype == torch.bool:
        return (numbers % 3 == 0).reshape(shape)
    return (numbers - 100 * dtype.is_signed).to(torch.float32).to(dtype).reshape(shape)


PLAIN = {
    "buf": ((3,), torch.int64),
    "mask": ((4, 3), torch.bool),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
    "f8": ((5, 2), torch.float8_e4m3fn),
}

SHARDED = {
    "w": ((10, 6), torch.float32),
    "u": ((5,), torch.bfloat16),
    "one": ((1,), torch.float32),
    "big": ((300, 700), torch.float32),
}


def state(num_ranks: int, *, seed: int = 0, hsdp: bool = False) -> dict[str, Any]:
    """A nested state with shards, replicas, columns, plain tensors and values."""
    if hsdp:
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("copy", "shard"))
        placements: list[Any] = [Replicate(), Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (num_ranks,))
        placements = [Shard(0)]
    columns = [*placements[:-1], Shard(1)]
    model: dict[str, Any] = {
        name: distribute_tensor(pattern(shape, dtype, seed=seed), mesh, placements)
        for name, (shape, dtype) in SHARDED.items()
    }
    model["columns"] = distribute_tensor(pattern((6, 9), torch.float32, seed=seed), mesh, columns)
    model |= {name: pattern(shape, dtype, seed=seed) for name, (shape, dtype) in PLAIN.items()}
    model["turned"] = pattern((4, 6), torch.float32, seed=seed).t()
    moments = {"exp_avg": distribute_tensor(pattern((10, 6), torch.float32), mesh, placements)}
    return {
        "model": model,
        "optim": {
            "state": {"w": {**moments, "step": torch.tensor(3.0 + seed)}},
            "param_groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": ["w"]}],
        },
        "step": 7 + seed,
        "data": {"epoch": 1, "order": [3, 1, 2], "name": "b", "nothing": None},
    }


def whole(value: Any) -> Any:
    """The state with every tensor whole and plain."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors(item)]


def same(a: Any, b: Any) -> bool:
    """Whether two whole states hold the same bits."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bits(a) == bits(b)
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's row-major bytes."""
    if tensor.numel() == 0:
        return b""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
