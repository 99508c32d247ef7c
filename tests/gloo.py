"""Calls a function of a test file on several gloo ranks of this machine, each its own process.

    results = run_ranks(__file__, "worker", num_ranks=2, root=str(tmp_path))

calls ``worker(rank, num_ranks, root=...)`` on each rank; what it returns must be JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended; ``result`` is what its function returned, None where it did not."""

    code: int
    result: Any
    output: str
    seconds: float


def run_ranks(
    file: str,
    function: str,
    *,
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    must_succeed: bool = True,
    until_rank: int | None = None,
    **arguments: Any,
) -> list[RankEnd]:
    """Run the ranks to their end; raises AssertionError with the output of one that failed.

    With ``until_rank``, the others are killed once that one has ended.
    """
    with tempfile.TemporaryDirectory() as scratch:
        started = time.monotonic()
        processes = []
        for rank in range(num_ranks):
            command = [
                sys.executable, __file__, file, function, str(rank), str(num_ranks), scratch,
                json.dumps(arguments),
            ]  # fmt: skip
            with open(Path(scratch, f"log{rank}"), "wb") as log:
                processes.append(
                    subprocess.Popen(command, env=_env(env), cwd=ROOT, stdout=log, stderr=log)
                )
        ends = _collect(processes, scratch, started, timeout_s, until_rank)
    if must_succeed:
        for rank, end in enumerate(ends):
            assert end.code == 0, f"rank {rank} ended with {end.code}:\n{end.output[-6000:]}"
    return ends


def _collect(
    processes: list[subprocess.Popen[bytes]],
    scratch: str,
    started: float,
    timeout_s: float,
    until_rank: int | None,
) -> list[RankEnd]:
    ended: dict[int, float] = {}
    while len(ended) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - started
        if time.monotonic() - started > timeout_s or until_rank in ended:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            break
        time.sleep(0.05)
    ends = []
    for rank, process in enumerate(processes):
        output = Path(scratch, f"log{rank}").read_text(errors="replace")
        place = Path(scratch, f"result{rank}")
        result = json.loads(place.read_text()) if place.exists() else None
        ends.append(RankEnd(process.returncode, result, output, ended.get(rank, timeout_s)))
    return ends


def _env(extra: Mapping[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(extra or {})}


def _main() -> None:
    file, function, rank, size, scratch, arguments = sys.argv[1:]
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/store",
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=60),
    )
    spec = importlib.util.spec_from_file_location("worker_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["worker_module"] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(int(rank), int(size), **json.loads(arguments))
    Path(scratch, f"result{rank}").write_text(json.dumps(result))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a gloo thread that still frees a collective aborts an interpreter that ends


if __name__ == "__main__":
    _main()
