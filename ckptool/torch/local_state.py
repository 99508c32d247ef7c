"""A nested state dict on one rank, seen flat: its own pieces of tensors, and its values.

Keys and paths are those of torch's default planner, so that ``planner_data`` says what stock
torch expects. DTensors, FSDP1's ShardedTensors and plain tensors all become shards: a box of
a named tensor and the local memory that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckptool.dtypes import DType, dtype_named
from ckptool.errors import UnsupportedError, UsageError
from ckptool.model import Box
from ckptool.planning.boxes import whole_box

__all__ = ["LocalShard", "LocalState", "Path", "flatten", "local_bytes", "memory_of", "torch_dtype"]

Path = tuple["str | int", ...]


@dataclass(frozen=True)
class LocalShard:
    """The box of a tensor that this rank holds, and where."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize


@dataclass
class LocalState:
    """Flat view of one rank's state; ``paths`` has every key's place in the nested dict.

    ``nested`` is the dict that was flattened (each Stateful replaced by its state dict), and
    ``stateful`` names the objects that want it back after a load.
    """

    shards: list[LocalShard]
    values: dict[str, Any]
    paths: dict[str, Path]
    nested: dict[str, Any]
    stateful: dict[str, Stateful] = field(default_factory=dict)

    def put(self, key: str, value: Any) -> None:
        """Replace the leaf ``key`` of the nested dict."""
        *parents, last = self.paths[key]
        place: Any = self.nested
        for part in parents:
            place = place[_own_key(place, part)]
        place[_own_key(place, last)] = value

    def finish_load(self, target: MutableMapping[str, Any]) -> None:
        """Hand loaded state back to Stateful objects, and loaded top-level values to ``target``."""
        for key, value in self.nested.items():
            if key in self.stateful:
                self.stateful[key].load_state_dict(value)
            elif target.get(key) is not value:
                target[key] = value


def flatten(state: Mapping[str, Any]) -> LocalState:
    """Flatten as DCP's default planner does; raises UsageError where two paths share a key."""
    stateful = {key: value for key, value in state.items() if isinstance(value, Stateful)}
    nested = {k: v.state_dict() if k in stateful else v for k, v in state.items()}
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(nested, None, is_coordinator=True)
    except ValueError as error:
        raise UsageError(
            f"two entries of the state dict share a key: {error}", hint="rename one of them"
        ) from error
    shards: list[LocalShard] = []
    values: dict[str, Any] = {}
    with torch.no_grad():
        for key, leaf in planner.state_dict.items():
            if isinstance(leaf, torch.Tensor):
                shards += _shards(key, leaf)
            else:
                values[key] = leaf
    return LocalState(shards, values, dict(planner.mappings), nested, stateful)


def local_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in row-major order as flat uint8; shares memory where it can."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    return plain.reshape(-1).view(torch.uint8)


def memory_of(flat: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, without a copy."""
    return memoryview(cast("Any", flat.numpy()))


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's own dtype; raises UnsupportedError where this torch has none."""
    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(
            f"this torch ({torch.__version__}) has no dtype {dtype.name}", hint="use a newer torch"
        )
    return found


def _shards(key: str, leaf: torch.Tensor) -> list[LocalShard]:
    """This rank's pieces of one tensor; none where it is not part of the tensor's mesh."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, DTensor):
        if leaf.device_mesh.get_coordinate() is None:
            return []
        box = _box(shape, leaf.device_mesh, leaf.placements)
        return [_shard(key, shape, box, leaf.to_local())]
    if isinstance(leaf, ShardedTensor):
        rows = leaf.local_shards()
        boxes = [Box(tuple(r.metadata.shard_offsets), tuple(r.metadata.shard_sizes)) for r in rows]
        shape = tuple(leaf.metadata().size)
        return [_shard(key, shape, box, r.tensor) for r, box in zip(rows, boxes, strict=True)]
    return [_shard(key, shape, whole_box(shape), leaf)]


@lru_cache(maxsize=100_000)
def _box(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Any, ...]) -> Box:
    """Where this rank's part of a DTensor lies; many tensors share the answer."""
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedError(
                f"a DTensor with placements {placements} holds sums that are not reduced yet",
                hint="redistribute it before it is saved",
            )
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(sizes))


def _shard(key: str, shape: tuple[int, ...], box: Box, tensor: torch.Tensor) -> LocalShard:
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{key}: only dense tensors are saved, not {tensor.layout}")
    if tensor.is_quantized:
        raise UnsupportedError(f"{key}: quantized tensors are not saved", hint="save int_repr()")
    if tuple(tensor.shape) != box.sizes:
        raise UnsupportedError(
            f"{key}: the local tensor has shape {tuple(tensor.shape)}, its box is {box}"
        )
    return LocalShard(key, _dtype(tensor.dtype), shape, box, tensor)


@lru_cache(maxsize=64)
def _dtype(dtype: torch.dtype) -> DType:
    return dtype_named(str(dtype).removeprefix("torch."))


def _own_key(place: Any, part: str | int) -> Any:
    """``part`` as the container itself spells it: keys that were not str were flattened to str."""
    if isinstance(place, Mapping) and part not in place:
        return next((key for key in place if str(key) == part), part)
    return part
