"""What the benchmarks need of torch, each call a process of its own.

    python scripts/bench_torch.py make DEST --ranks 8 --chunk-bytes N --params K [--vocab 50257]
    python scripts/bench_torch.py make-hf DEST ...          sharded safetensors, same tensors
    python scripts/bench_torch.py to-torch-save SOURCE DEST
    python scripts/bench_torch.py consolidate SOURCE DEST
    python scripts/bench_torch.py reshard SOURCE DEST --ranks 16
    python scripts/bench_torch.py same SOURCE RESULT        exit 1 where a bit differs
    python scripts/bench_torch.py unpickle METADATA

Checkpoints are cut along dim 0 over gloo ranks; a parameter has two moments of its size.
Sources and destinations at ``s3://`` go through torch's own fsspec reader and writer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench_common import mark_ready
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Shapes = dict[str, tuple[int, int]]

_COLUMNS = 2048
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make(arguments: argparse.Namespace) -> None:
    shapes = _shapes(arguments)

    def save(rank: int, mesh: Any) -> None:
        dcp.save(
            _state(shapes, rank, mesh, arguments.moments), storage_writer=_writer(arguments.dest)
        )

    _on_ranks(arguments.ranks, save)


def make_hf(arguments: argparse.Namespace) -> None:
    shapes = _shapes(arguments)

    def save(rank: int, mesh: Any) -> None:
        tensors = _flat(_state(shapes, rank, mesh, arguments.moments))
        kept = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor)}
        writer = dcp.HuggingFaceStorageWriter(arguments.dest, save_distributed=True)
        dcp.save(kept, storage_writer=writer)

    _on_ranks(arguments.ranks, save)


def to_torch_save(arguments: argparse.Namespace) -> None:
    mark_ready()
    if not arguments.dest.startswith("s3://"):
        dcp.format_utils.dcp_to_torch_save(arguments.source, arguments.dest)
        return
    import fsspec

    state = _load_all(arguments.source)
    with fsspec.open(arguments.dest, "wb") as file:
        torch.save(state, file)


def consolidate(arguments: argparse.Namespace) -> None:
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    mark_ready()
    keys: dict[str, int] = {}
    for path in sorted(Path(arguments.source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            keys |= dict.fromkeys(file.keys(), 1)
    Path(arguments.dest).mkdir(parents=True)
    consolidate_safetensors_files(
        arguments.source, arguments.dest, keys, num_threads=os.cpu_count() or 1
    )


def reshard(arguments: argparse.Namespace) -> None:
    """dcp.load, then dcp.save, on as many ranks as the result is for."""

    def load_and_save(rank: int, mesh: Any) -> None:
        entries = _reader(arguments.source).read_metadata().state_dict_metadata
        dist.barrier()
        if rank == 0:
            mark_ready()
        state: dict[str, Any] = {}
        for key, entry in entries.items():
            is_tensor = isinstance(entry, TensorStorageMetadata)
            state[key] = _empty(entry, mesh, rank) if is_tensor else None
        dcp.load(state, storage_reader=_reader(arguments.source))
        dcp.save(state, storage_writer=_writer(arguments.dest))

    _on_ranks(arguments.ranks, load_and_save)


def same(arguments: argparse.Namespace) -> None:
    """The result is a checkpoint, a .pt, a .safetensors or a folder of those."""
    wanted = {k: v for k, v in _flat(_load_all(arguments.source)).items() if torch.is_tensor(v)}
    found = {k: v for k, v in _read_result(Path(arguments.result)) if torch.is_tensor(v)}
    if not found:
        sys.exit(f"{arguments.result} holds no tensor")
    for key, tensor in found.items():
        wanted_key = key if key in wanted else f"model.{key}"
        if not torch.equal(_bits(tensor), _bits(wanted[wanted_key])):
            sys.exit(f"{arguments.result}: {key} is not what {arguments.source} holds")
    if len(found) not in (len(wanted), sum(key.startswith("model.") for key in wanted)):
        sys.exit(f"{arguments.result} has {len(found)} tensors of {len(wanted)}")
    print(f"{len(found)} tensors are the same, bit for bit")


def unpickle(arguments: argparse.Namespace) -> None:
    """How torch's reader opens an index."""
    importlib.import_module("torch.distributed.checkpoint.filesystem")  # classes it names
    mark_ready()
    with open(arguments.metadata, "rb") as file:
        index = pickle.load(file)
    print(len(index.storage_data))


def _shapes(arguments: argparse.Namespace) -> Shapes:
    """Each parameter's shape: rows that 16 ranks divide, unless a vocabulary is given."""
    item = 4 * _COLUMNS
    rows = max(16, arguments.ranks * arguments.chunk_bytes // item // 16 * 16)
    shapes = {f"layers.{i}.weight": (rows, _COLUMNS) for i in range(arguments.params)}
    if arguments.vocab:
        columns = arguments.chunk_bytes * arguments.ranks // arguments.vocab // 4 // 16 * 16
        shapes = {"embed.weight": (arguments.vocab, max(16, columns)), **shapes}
    return shapes


def _state(shapes: Shapes, rank: int, mesh: Any, num_moments: int) -> dict[str, Any]:
    model = {key: _filled(f"model.{key}", shape, rank, mesh) for key, shape in shapes.items()}
    moments = {
        key: {name: _filled(f"{name}.{key}", shape, rank, mesh) for name in _MOMENTS[:num_moments]}
        for key, shape in shapes.items()
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(shapes)}]
    return {"model": model, "optim": {"state": moments, "param_groups": groups}, "step": 12}


def _filled(name: str, shape: tuple[int, ...], rank: int, mesh: Any) -> DTensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + rank)
    local = torch.empty(_local_rows(shape, mesh.size(), rank), *shape[1:])
    return _spread(local.uniform_(-1, 1, generator=generator), shape, mesh)


def _empty(entry: Any, mesh: Any, rank: int) -> DTensor | torch.Tensor:
    shape, dtype = entry.size, entry.properties.dtype
    if not shape:
        return torch.empty((), dtype=dtype)
    local = torch.empty(_local_rows(shape, mesh.size(), rank), *shape[1:], dtype=dtype)
    return _spread(local, shape, mesh)


def _spread(local: torch.Tensor, shape: tuple[int, ...], mesh: Any) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _local_rows(shape: tuple[int, ...], num_ranks: int, rank: int) -> int:
    each = -(-shape[0] // num_ranks)
    return max(0, min(each, shape[0] - rank * each))


def _load_all(source: str) -> dict[str, Any]:
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=_reader(source), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def _read_result(path: Path) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    if path.is_dir() and (path / ".metadata").exists():
        yield from _flat(_load_all(str(path))).items()
    elif path.is_dir():
        for file in sorted(path.glob("*.safetensors")):
            yield from load_file(file).items()
    elif path.suffix == ".safetensors":
        yield from load_file(path).items()
    else:
        yield from _flat(torch.load(path, mmap=True, weights_only=True)).items()


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    found: dict[str, Any] = {}
    for key, child in node.items():
        found |= _flat(child, f"{prefix}.{key}" if prefix else str(key))
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _reader(source: str) -> Any:
    if source.startswith("s3://"):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(source)
    return dcp.FileSystemReader(source)


def _writer(dest: str) -> Any:
    if dest.startswith("s3://"):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(dest)
    return dcp.FileSystemWriter(dest)


def _on_ranks(num_ranks: int, function: Callable[[int, Any], None]) -> None:
    """Call ``function(rank, mesh)`` on gloo ranks, forked so that torch is imported once."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pids = [_fork_rank(rank, num_ranks, scratch, function) for rank in range(num_ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"the ranks ended with {codes}")


def _fork_rank(
    rank: int, num_ranks: int, scratch: str, function: Callable[[int, Any], None]
) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=num_ranks
        )
        function(rank, init_device_mesh("cpu", (num_ranks,)))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # gloo's threads now and then abort an interpreter that ends in the usual way


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "make-hf"):
        command = commands.add_parser(name)
        command.add_argument("dest")
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--chunk-bytes", type=int, required=True)
        command.add_argument("--params", type=int, required=True)
        command.add_argument("--moments", type=int, default=2, choices=[0, 1, 2])
        command.add_argument("--vocab", type=int)
    for name in ("to-torch-save", "consolidate", "reshard"):
        command = commands.add_parser(name)
        command.add_argument("source")
        command.add_argument("dest")
        command.add_argument("--ranks", type=int, default=1)
    command = commands.add_parser("same")
    command.add_argument("source")
    command.add_argument("result")
    commands.add_parser("unpickle").add_argument("metadata")
    return parser.parse_args()


if __name__ == "__main__":
    parsed = _parse()
    {
        "make": make,
        "make-hf": make_hf,
        "to-torch-save": to_torch_save,
        "consolidate": consolidate,
        "reshard": reshard,
        "same": same,
        "unpickle": unpickle,
    }[parsed.command](parsed)
