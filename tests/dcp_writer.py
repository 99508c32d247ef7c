"""Checkpoints as stock torch writes them, for tests: F4 on gloo ranks, and others in-process.

F4 is the state that most tests use: a model whose tensors are cut unevenly (3, 3, 3, 1 rows;
2, 2, 1, 0 elements), replicated ones, optimizer state, a random state and a counter.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gloo import run_ranks

_MADE: list[tempfile.TemporaryDirectory[str]] = []


def write_f4(folder: Path, *, num_ranks: int = 4) -> Path:
    """F4 into a folder, over what is there; the ranks run once a session."""
    shutil.copytree(_f4(num_ranks), folder, dirs_exist_ok=True)
    return folder


def f4_tensors() -> dict[str, Any]:
    """The whole tensors of F4 by key, as torch tensors."""
    import torch

    def filled(*shape: int, start: float) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + start

    tensors = {
        "model.w": filled(10, 6, start=0.5),
        "model.u": filled(5, start=100).to(torch.bfloat16),
        "model.one": filled(1, start=7),
        "model.scalar": torch.tensor(0.125),
        "model.buf": torch.tensor([3, -1, 2**40]),
        "rng": torch.arange(5056, dtype=torch.int64).remainder(251).to(torch.uint8),
    }
    for name in ("w", "u", "one"):
        like = tensors[f"model.{name}"].float()
        tensors[f"optim.state.{name}.exp_avg"] = like * 0.5
        tensors[f"optim.state.{name}.exp_avg_sq"] = like * 2
        tensors[f"optim.state.{name}.step"] = torch.tensor(12.0)
    return tensors


def f4_values() -> dict[str, Any]:
    """The values of F4 by key."""
    group = {"lr": 0.1, "betas": (0.9, 0.95), "params": ["w", "u", "one"]}
    return {"it": 12, **{f"optim.param_groups.0.{k}": v for k, v in group.items()}}


def f4_state(tensors: dict[str, Any]) -> dict[str, Any]:
    """The nested state dict that holds these tensors and F4's values."""
    state: dict[str, Any] = {"it": 12, "optim": {"param_groups": [{}], "state": {}}, "model": {}}
    for key, value in f4_values().items():
        if key != "it":
            state["optim"]["param_groups"][0][key.rsplit(".", 1)[1]] = value
    for key, tensor in tensors.items():
        *parents, name = key.split(".")
        here = state
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = tensor
    return state


def save_plain(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """One process, no ranks: ``options`` are FileSystemWriter's."""
    import torch.distributed.checkpoint as dcp

    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder), **options), no_dist=True)
    return folder


@contextlib.contextmanager
def edited_metadata(folder: Path) -> Iterator[Any]:
    """The Metadata object of a checkpoint, to change; it is written back at the end."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    yield metadata
    path.write_bytes(pickle.dumps(metadata))


def item_of(folder: Path, key: str, offset: tuple[int, ...] | None = None) -> Any:
    """Where the index places a chunk (by its offsets) or a value: path, start, length."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == key and (offset is None or tuple(index.offset or ()) == offset):
            return folder / info.relative_path, info.offset, info.length
    raise KeyError(key)


def flip_bit(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def payload_at(folder: Path, key: str, offset: tuple[int, ...]) -> tuple[Path, int]:
    """The file and the byte where a chunk's payload starts."""
    from ckptool.formats.dcp_item import parse_tensor_item

    path, start, length = item_of(folder, key, offset)
    data = path.read_bytes()[start : start + length]
    return path, start + parse_tensor_item(length=length, head=data).payload_offset


@functools.cache
def _f4(num_ranks: int) -> Path:
    scratch = tempfile.TemporaryDirectory()
    _MADE.append(scratch)
    folder = Path(scratch.name, "f4")
    run_ranks(__file__, "save_f4", num_ranks=num_ranks, folder=str(folder))
    return folder


def save_f4(rank: int, num_ranks: int, *, folder: str) -> None:
    """What each rank does; runs in a process of its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (num_ranks,))
    tensors = f4_tensors()
    for key in tensors:
        if key.split(".")[-1] in ("w", "u", "one", "exp_avg", "exp_avg_sq"):
            tensors[key] = distribute_tensor(tensors[key], mesh, [Shard(0)])
    dcp.save(f4_state(tensors), checkpoint_id=folder)
