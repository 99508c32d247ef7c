"""The index of a large run: 2,169 tensors on 1,024 ranks, 2.2 million chunks, and no payload.

    python scripts/bench_index.py make FOLDER [--ranks 1024]    .metadata, beside it ckpt.index
                                                                with --own

As a library: ``measure_index`` opens it with ckptool and with torch's own classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import Run, fsync_tree, measure, python, quickest, remove, text_size

__all__ = ["NUM_PARAMS", "NUM_RANKS", "measure_index"]

NUM_RANKS = 1024
NUM_PARAMS = 723

_FRAMING_BYTES = 1500
_PAYLOAD_OFFSET = 704
_PARTS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w2")
_STARTS = "import ckptool.cli.app, ckptool.cli.inspect, ckptool.storage.local"


def measure_index(
    scratch: Path,
    *,
    num_ranks: int,
    num_rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Time and memory of opening and planning, start-up and imports taken off both."""
    folder = scratch / "index"
    try:
        say(f"making the index of {num_ranks} ranks")
        for name in ("stock", "own"):
            option = ["--own"] if name == "own" else []
            ranks = ["--ranks", str(num_ranks)]
            measure(python("scripts/bench_index.py", "make", str(folder / name), *ranks, *option))
        return _measure(folder, num_rounds, say)
    finally:
        remove(folder)


def _measure(folder: Path, num_rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    stock, own = folder / "stock", folder / "own"
    commands = {
        "start-up": python("-c", _STARTS),
        "inspect, stock index": python("-m", "ckptool", "inspect", str(stock)),
        "inspect, own index": python("-m", "ckptool", "inspect", str(own)),
        "pickle.load, torch's classes": python(
            "scripts/bench_torch.py", "unpickle", str(stock / ".metadata")
        ),
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(num_rounds):
        for name, command in commands.items():
            runs[name].append(measure(command))
            say(f"round {number + 1} of {num_rounds}: {name}: {runs[name][-1].seconds:.2f} s")
    for name, place in (("stock", stock), ("own", own)):
        dest = str(folder / "never-written")
        command = python("-m", "ckptool", "reshard", str(place), dest, "--to", "64", "--dry-run")
        runs[f"reshard --to 64 --dry-run, {name} index"] = [measure(command)]
    idle = quickest(runs.pop("start-up"))
    rows = {name: _row(some, idle) for name, some in runs.items()}
    ours, theirs = rows["inspect, stock index"], rows["pickle.load, torch's classes"]
    return {
        "metadata_bytes": (stock / ".metadata").stat().st_size,
        "own_index_bytes": (own / "ckpt.index").stat().st_size,
        "startup_seconds": idle.seconds,
        "rows": rows,
        "stock_time_share": ours["work_seconds"] / theirs["work_seconds"],
        "stock_memory_share": ours["memory_bytes"] / theirs["memory_bytes"],
    }


def _row(runs: Sequence[Run], idle: Run) -> dict[str, Any]:
    """``memory_bytes`` is the peak over what the imports take."""
    run = _middle(runs)
    is_marked = run.startup_seconds > 0
    startup = run.startup_seconds if is_marked else idle.seconds
    imports = run.startup_rss_bytes if is_marked else idle.peak_rss_bytes
    return {
        "seconds": run.seconds,
        "work_seconds": run.seconds - startup,
        "cpu_seconds": run.cpu_seconds,
        "peak_rss_bytes": run.peak_rss_bytes,
        "memory_bytes": run.peak_rss_bytes - imports,
    }


def _middle(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def make(folder: Path, *, num_ranks: int, is_own: bool) -> None:
    """A folder with an index, and shard files that are all holes."""
    from ckptool.formats.ckpt_index import Payloads, write_index
    from ckptool.formats.dcp_metadata import write_metadata
    from ckptool.model import Index, TensorEntry

    folder.mkdir(parents=True)
    keys = _keys()
    filled = np.zeros(num_ranks, np.int64)
    files = tuple(f"__{rank}_0.distcp" for rank in range(num_ranks))
    entries: dict[str, TensorEntry] = {}
    payloads: dict[str, Payloads] = {}
    for number, key in enumerate(keys):
        entries[key], num_bytes = _entry(key, number, files, filled)
        crcs = np.random.default_rng(number).integers(0, 2**32, num_ranks)
        payloads[key] = Payloads(
            offsets=np.full(num_ranks, _PAYLOAD_OFFSET, np.int64),
            num_bytes=np.full(num_ranks, num_bytes, np.int64),
            crc32s=crcs,
            block_starts=np.arange(num_ranks + 1, dtype=np.int64),
            block_crc32s=crcs,
        )
    index = Index(entries)
    metadata = write_metadata(index)
    if is_own:
        (folder / "ckpt.index").write_bytes(
            write_index(index, payloads=payloads, metadata=metadata)
        )
    (folder / ".metadata").write_bytes(metadata)
    for name, size in zip(files, filled.tolist(), strict=True):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    fsync_tree(folder)
    print(f"{len(keys)} tensors, {len(keys) * num_ranks} chunks, {text_size(len(metadata))}")


def _keys() -> list[str]:
    params = [f"layers.{i // 6}.{_PARTS[i % 6]}.weight" for i in range(NUM_PARAMS)]
    moments = [f"optim.state.{name}.{m}" for name in params for m in ("exp_avg", "exp_avg_sq")]
    return [f"model.{name}" for name in params] + moments


def _entry(key: str, number: int, files: Sequence[str], filled: Any) -> Any:
    """One tensor, cut evenly along dim 0; ``filled`` is how far each rank's file goes."""
    from ckptool.dtypes import dtype_named
    from ckptool.model import Chunks, TensorEntry

    num_ranks = len(files)
    rows, columns = 4 + 2 * (number % 3), 4096
    num_bytes = rows * columns * 4
    length = num_bytes + _FRAMING_BYTES
    offsets = np.zeros((num_ranks, 2), np.int64)
    offsets[:, 0] = np.arange(num_ranks) * rows
    chunks = Chunks(
        offsets=offsets,
        sizes=np.tile(np.array([rows, columns], np.int64), (num_ranks, 1)),
        file=np.arange(num_ranks, dtype=np.int64),
        starts=filled.copy(),
        lengths=np.full(num_ranks, length, np.int64),
        files=files,
    )
    filled += length
    shape = (rows * num_ranks, columns)
    path = tuple(key.split("."))
    return TensorEntry(key, dtype_named("float32"), shape, chunks, path), num_bytes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["make"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=NUM_RANKS)
    parser.add_argument("--own", action="store_true")
    arguments = parser.parse_args()
    make(arguments.folder, num_ranks=arguments.ranks, is_own=arguments.own)
