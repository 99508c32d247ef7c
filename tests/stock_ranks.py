"""A 4-rank checkpoint with all that a training state has, saved and loaded by stock torch.

F4 and besides: bool and int tensors, halves and doubles, more ranks than rows, a column cut,
two parameter groups with an empty one, plain values. Torch is imported where it is used, so
that a test file may take this module's names without it.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dcp_writer import f4_tensors
from gloo import run_ranks

SHARDED = ("w", "u", "one", "exp_avg", "exp_avg_sq", "mask", "half", "rows", "double", "few")
GROUPS: list[dict[str, Any]] = [
    {"lr": 0.1, "betas": (0.9, 0.95), "params": ["w", "u"], "foreach": None},
    {"lr": 1e-3, "betas": (0.9, 0.999), "params": ["one"], "foreach": True},
    {"lr": 0.0, "betas": (0.0, 0.0), "params": [], "foreach": None},
]
_MADE: list[tempfile.TemporaryDirectory[str]] = []
VALUES: dict[str, Any] = {"it": 12, "name": "run/ä", "blob": b"\x00\xff\x80", "big": 2**70}


def tensors() -> dict[str, Any]:
    """The whole tensors by key."""
    import torch

    numbers = torch.Generator().manual_seed(7)
    more = {
        "model.mask": torch.rand(9, 3, generator=numbers) > 0.5,
        "model.half": torch.randn(7, 5, generator=numbers).half(),
        "model.double": torch.randn(6, 2, 2, generator=numbers, dtype=torch.float64),
        "model.rows": torch.randint(-(2**15), 2**15, (17, 3), generator=numbers).short(),
        "model.few": torch.randn(2, 4, generator=numbers),
        "model.column": torch.randn(4, 10, generator=numbers),
        "model.none": torch.zeros(0, 3),
        "model.complex": torch.randn(3, dtype=torch.complex64, generator=numbers),
        "model.fp8": torch.randn(6, generator=numbers).to(torch.float8_e4m3fn),
    }
    return f4_tensors() | more


def state(by_key: dict[str, Any]) -> dict[str, Any]:
    """The nested state dict; ``by_key`` gives the tensors."""
    nested: dict[str, Any] = {
        "model": {},
        "optim": {"state": {}, "param_groups": [dict(g) for g in GROUPS]},
        **VALUES,
    }
    for key, tensor in by_key.items():
        *parents, name = key.split(".")
        here = nested
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = tensor
    return nested


def saved(folder: Path) -> Path:
    """The checkpoint in a folder of its own; its four ranks run once a session."""
    shutil.copytree(_saved(), folder)
    return folder


@functools.cache
def _saved() -> Path:
    scratch = tempfile.TemporaryDirectory()
    _MADE.append(scratch)
    folder = Path(scratch.name, "stock")
    run_ranks(__file__, "save", num_ranks=4, folder=str(folder))
    return folder


def assert_stock_loads(urls: dict[str, dict[str, Any]], *, num_ranks: int) -> None:
    """Stock ``dcp.load`` at so many ranks finds every tensor and value, bit for bit.

    ``urls`` maps each URL to the storage options it needs.
    """
    run_ranks(__file__, "load", num_ranks=num_ranks, urls=urls)


def save(rank: int, num_ranks: int, *, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state(_distributed(tensors(), num_ranks)), checkpoint_id=folder)


def load(rank: int, num_ranks: int, *, urls: dict[str, dict[str, Any]]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    wanted = tensors()
    for url, options in urls.items():
        empty = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
        found = state(_distributed(empty, num_ranks))
        for key in VALUES:
            found[key] = None
        for group in found["optim"]["param_groups"]:
            group.update(dict.fromkeys(group))
        dcp.load(found, storage_reader=_reader(url, options))
        for key, tensor in wanted.items():
            here: Any = found
            for part in key.split("."):
                here = here[part]
            dim = _sharded_dim(key)
            local = here.to_local() if isinstance(here, DTensor) else here
            wanted_here = tensor if dim is None else _local(tensor, dim, rank, num_ranks)
            assert same(local, wanted_here), (url, key)
        assert {key: found[key] for key in VALUES} == VALUES, url
        assert found["optim"]["param_groups"] == GROUPS, url


def same(one: Any, two: Any) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits."""
    import torch

    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two)]
    return torch.equal(*bits)


def _reader(url: str, options: dict[str, Any]) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(url, **options) if "://" in url else dcp.FileSystemReader(url)


def _distributed(by_key: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Sharded tensors as DTensors, made of the whole ones without talking to other ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (num_ranks,))
    placed = dict(by_key)
    for key, whole in by_key.items():
        dim = _sharded_dim(key)
        if dim is not None:
            placed[key] = DTensor.from_local(
                _local(whole, dim, mesh.get_rank(), num_ranks),
                mesh,
                [Shard(dim)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
    return placed


def _sharded_dim(key: str) -> int | None:
    name = key.split(".")[-1]
    if name == "column":
        return 1
    return 0 if name in SHARDED else None


def _local(whole: Any, dim: int, rank: int, num_ranks: int) -> Any:
    """A rank's piece by torch.chunk; ranks behind the last one have none."""
    pieces = whole.chunk(num_ranks, dim)
    if rank < len(pieces):
        return pieces[rank].contiguous()
    return whole.narrow(dim, whole.shape[dim], 0).contiguous()
