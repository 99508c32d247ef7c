"""The job of bench_live_export: its ranks, in which all contenders take turns.

    python scripts/bench_live_export_ranks.py '{"num_ranks": 2, ...}'

Rank 0 prints the result as the last line, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_common import fsync_tree
from bench_ranks import join_ranks, leave_ranks, start_ranks
from bench_save_steps import Training

_WIDTH = 1024


def main() -> None:
    spec = json.loads(sys.argv[1])
    if "RANK" not in os.environ:
        start_ranks(__file__, spec)
        return
    import torch.distributed as dist

    join_ranks(spec["device"])
    result = _measure(spec)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    leave_ranks()


def _measure(spec: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist

    from ckptool.torch import LiveExporter

    folder = Path(spec["folder"])
    on_gpu = spec["device"] == "cuda"
    exporter = LiveExporter()  # before the first step, so that it knows the optimizer
    training = None
    if on_gpu:
        training = Training({**spec, "state_bytes": 3 * spec["model_bytes"]})
        training.steps(3)
    model = training.model if training is not None else _model(spec["model_bytes"])
    place = folder / "model.safetensors"

    def ours(mode: str) -> int:
        exporter.export(model, str(place), mode=mode)
        exporter.wait()
        return exporter.staged_bytes if mode == "snapshot" else 0

    contenders: dict[str, Callable[[], int]] = {
        "live, stop": lambda: ours("stop"),
        "live, snapshot": lambda: ours("snapshot"),
        "full state dict": lambda: _full_state_dict(model, place),
    }
    cases: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in contenders}
    for number in range(spec["num_rounds"] + 1):
        for name, work in contenders.items():
            row = _watched(work, on_gpu=on_gpu)
            file_bytes = _take_away(place)
            # each one's buffers are there after the first round, which counts for memory alone
            for kind in ("host_growth_bytes", "gpu_growth_bytes", "staged_bytes"):
                cases[name][kind] = _larger(cases[name].get(kind), row[kind])
            if number:
                cases[name]["seconds"].append(row["seconds"])
    steps = None
    if training is not None:
        steps = _steps(training, exporter, model, folder / "steps", spec["num_steps"])
    exporter.close()
    dist.barrier()
    return {"file_bytes": file_bytes, "cases": cases, "steps": steps}


def _full_state_dict(model: Any, place: Path) -> int:
    """torch's own way: the whole model on rank 0, then one file."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        save_file(weights, str(place), metadata={"format": "pt"})
        fsync_tree(place)
    return 0


def _model(num_bytes: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    count = max(1, num_bytes // (4 * 4 * _WIDTH * _WIDTH))
    layers = [torch.nn.Linear(_WIDTH, 4 * _WIDTH, bias=False) for _ in range(count)]
    model = torch.nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _watched(work: Callable[[], int], *, on_gpu: bool) -> dict[str, Any]:
    """Seconds from start to end of all ranks, and the memory that the hungriest one took."""
    import torch
    import torch.distributed as dist

    free = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status("VmRSS")
    dist.barrier()
    started = time.perf_counter()
    staged = work()
    dist.barrier()
    seconds = time.perf_counter() - started
    host = max(0, _status("VmHWM") - before - staged)
    gpu = -1
    if on_gpu:
        outside = free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
        gpu = torch.cuda.max_memory_allocated() - held + max(0, outside)
    most = torch.tensor([host, gpu, staged])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    host, gpu, staged = most.tolist()
    return {
        "seconds": seconds,
        "host_growth_bytes": host,
        "gpu_growth_bytes": gpu if on_gpu else None,
        "staged_bytes": staged,
    }


def _steps(
    training: Training, exporter: Any, model: Any, folder: Path, num_steps: int
) -> dict[str, Any]:
    """Steps alone and during snapshot exports, A/B/A/B."""
    phases: dict[str, list[float]] = {}
    for turn in ("A", "B"):
        phases[f"alone, {turn}"] = training.steps(num_steps)
        times: list[float] = []
        number = 0
        while len(times) < num_steps:
            place = folder / f"{turn}{number}"
            exporter.finished()  # those of earlier exports, which would end this turn at once
            started = time.perf_counter()
            exporter.export(model, str(place), mode="snapshot")
            called_s = time.perf_counter() - started
            during = [training.step()]
            during[0] += called_s
            while not training.on_all(bool(exporter.finished())):
                during.append(training.step())
            times += during
            _take_away(place)
            number += 1
        phases[f"exporting, {turn}"] = times
    means = {name: statistics.mean(times) for name, times in phases.items()}
    alone = statistics.mean(mean for name, mean in means.items() if name.startswith("alone"))
    exporting = statistics.mean(mean for name, mean in means.items() if not name.startswith("al"))
    return {
        "phases": {n: {"mean_s": means[n], "count": len(times)} for n, times in phases.items()},
        "slowdown": exporting / alone - 1,
    }


def _take_away(place: Path) -> int:
    """Remove what was written; its size on rank 0."""
    import torch.distributed as dist

    dist.barrier()
    num_bytes = 0
    if dist.get_rank() == 0:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            num_bytes = place.stat().st_size
            place.unlink()
    dist.barrier()
    return num_bytes


def _larger(known: int | None, found: int | None) -> int | None:
    return found if known is None or found is None else max(known, found)


def _status(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    main()
