"""What saves cost the training around them: steps with and without, A/B/A/B, in one job.

On GPUs: an FSDP2 transformer in bf16 whose state has about the size asked for, saved to the
local disk. On the CPU: a small FSDP2 model, for the same code without a GPU.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["Training", "measure_steps"]

_BYTES_PER_PARAMETER = 12  # weight and two moments in fp32


def measure_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """Step times of each phase, the stall of a save as a share of a step, and staging alone."""
    from ckptool.torch import Checkpointer

    training = Training(spec)
    num_steps = spec["num_steps"]
    root = Path(spec["url"])
    checkpointer = Checkpointer(str(root / "ours"), keep_last=1)
    training.steps(3)
    checkpointer.prepare(training.state())
    training.saved_by(checkpointer, number=0)
    phases: dict[str, dict[str, Any]] = {}
    for phase in ("no save, A", "our save, A", "no save, B", "our save, B"):
        if phase.startswith("our"):
            number = 1 if phase.endswith("A") else 2
            phases[phase] = training.steps_during(checkpointer, number, at_least=num_steps)
        else:
            phases[phase] = _summary(training.steps(num_steps), 0.0)
    checkpointer.wait()
    staging = _staging(training, checkpointer, spec)
    checkpointer.close()
    _remove(root)
    phases["our save, no disk"] = _without_disk(training, spec)
    for kind in spec["stock"]:
        phases[kind] = training.steps_during_stock(kind, root / "stock", num_steps)
        _remove(root)
    alone, saved = (
        statistics.mean(phases[f"{kind}, {turn}"]["mean_s"] for turn in "AB")
        for kind in ("no save", "our save")
    )
    return {
        "phases": phases,
        "stall_share": saved / alone - 1,
        "own_state_bytes": training.own_bytes,
        **staging,
    }


class Training:
    """A model in training on this rank, of about ``state_bytes`` with its optimizer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.torch, self.device = torch, spec["device"]
        on_gpu = self.device == "cuda"
        dim = 4096 if on_gpu else 128
        count = max(2, spec["state_bytes"] // _BYTES_PER_PARAMETER // (12 * dim * dim))
        if not on_gpu:
            count = min(count, 6)
        torch.manual_seed(1)
        mesh = init_device_mesh(self.device, (dist.get_world_size(),))
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16) if on_gpu else MixedPrecisionPolicy()
        )
        with torch.device("meta"):
            layers = [
                torch.nn.TransformerEncoderLayer(
                    dim, dim // 128 or 1, 4 * dim, batch_first=True, dropout=0.0, norm_first=True
                )
                for _ in range(count)
            ]
            model = torch.nn.Sequential(*layers)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=self.device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.01)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        shape = (8, 1024, dim) if on_gpu else (2, 32, dim)
        self.batch = torch.randn(shape, device=self.device)
        self.group = dist.new_group(backend="gloo")  # a step's collectives would meet a save's

    @property
    def own_bytes(self) -> int:
        return sum(3 * p.to_local().nbytes for p in self.model.parameters())

    def state(self) -> dict[str, Any]:
        moments = {
            name: self.optimizer.state[parameter]
            for name, parameter in self.model.named_parameters()
        }
        return {"model": self.model.state_dict(), "moments": moments}

    def steps(self, num_steps: int) -> list[float]:
        return [self.step() for _ in range(num_steps)]

    def step(self) -> float:
        started = time.perf_counter()
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter() - started

    def saved_by(self, checkpointer: Any, *, number: int) -> None:
        checkpointer.save(number, self.state())
        checkpointer.wait()

    def steps_during(self, checkpointer: Any, number: int, *, at_least: int) -> dict[str, Any]:
        """Steps from the start of a save until its commit; the save's own call is in the first."""
        checkpointer.finished()  # those of earlier saves, which would end this phase at once
        started = time.perf_counter()
        report = checkpointer.save(number, self.state())
        called_s = time.perf_counter() - started
        times = self.steps(1)
        times[0] += called_s
        while len(times) < at_least or not self.on_all(bool(checkpointer.finished())):
            times.append(self.step())
            if len(times) > 40 * at_least:
                break
        return _summary(times, report.blocked_s)

    def steps_during_stock(self, kind: str, folder: Path, num_steps: int) -> dict[str, Any]:
        """``kind`` is one of torch's own ways; the save's call is in the first step."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        future = None
        started = time.perf_counter()
        if kind == "dcp.save":
            dcp.save(self.state(), checkpoint_id=str(folder))
        else:
            future = dcp.async_save(
                self.state(),
                checkpoint_id=str(folder),
                process_group=self.group,
                async_checkpointer_type=AsyncCheckpointerType(kind.rpartition(" ")[2]),
            )
        called_s = time.perf_counter() - started
        times = self.steps(1)
        times[0] += called_s
        times += self.steps(num_steps - 1)
        if future is not None:
            future.result()
        return _summary(times, called_s)

    def on_all(self, mine: bool) -> bool:
        """Whether it is so on every rank; the ranks must make the same number of steps."""
        import torch.distributed as dist

        self._ended = getattr(self, "_ended", False) or mine
        flag = self.torch.tensor([int(self._ended)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if flag.item():
            self._ended = False
        return bool(flag.item())


def _without_disk(training: Training, spec: dict[str, Any]) -> dict[str, Any]:
    """The same with an uploader that drops what it would write: what our own work costs."""
    from ckptool.torch import Checkpointer

    place, null_disk = Path(spec["url"], "dropped"), str(Path(__file__).parent / "null_disk")
    sys.path.insert(0, null_disk)  # the uploader gets this path
    try:
        checkpointer = Checkpointer(str(place))
        checkpointer.prepare(training.state())
    finally:
        sys.path.remove(null_disk)
    training.steps(1)  # which shows it the optimizer, as the first steps did to the other one
    training.saved_by(checkpointer, number=0)
    found = training.steps_during(checkpointer, 1, at_least=spec["num_steps"])
    checkpointer.close()
    _remove(place)
    return found


def _remove(folder: Path) -> None:
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def _staging(training: Training, checkpointer: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Blocking staging beside the bare copy of the same bytes into the same kept memory."""
    import torch.distributed as dist

    from ckptool.torch.local_state import flatten

    torch, saver, state = training.torch, checkpointer._saver, training.state()
    if training.device == "cpu":  # the model that trains here is too small to time its copy
        rows = spec["state_bytes"] // spec["num_ranks"] // 24 // 4096
        names = [f"rank{dist.get_rank()}.{number}" for number in range(24)]
        state = {name: torch.randn(rows, 1024) for name in names}
    saver.prepare(state, {})
    plan = saver._planner.plan(99, flatten(state), flatten({}))
    memory = saver._beside._memory
    sources = [
        shard.tensor.detach().reshape(-1).view(torch.uint8)
        for shard in plan.shards
        if shard.tensor.numel()
    ]
    bare, ours = [], []
    for _ in range(5):
        bare.append(_timed(training, lambda: _bare_copy(sources, memory.tensor)))
        ours.append(_timed(training, lambda: saver._beside.stage(plan, overlap=False).wait()))
    bare_s, our_s = statistics.median(bare), statistics.median(ours)
    return {
        "bare_copy_s": bare_s,
        "staging_s": our_s,
        "staging_vs_pinned_copy": bare_s / our_s,
    }


def _bare_copy(sources: list[Any], memory: Any) -> None:
    at = 0
    for source in sources:
        memory[at : at + len(source)].copy_(source, non_blocking=True)
        at += len(source)


def _timed(training: Training, work: Any) -> float:
    if training.device == "cuda":
        training.torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if training.device == "cuda":
        training.torch.cuda.synchronize()
    return time.perf_counter() - started


def _summary(times: list[float], blocked_s: float) -> dict[str, Any]:
    return {
        "num_steps": len(times),
        "mean_s": statistics.mean(times),
        "median_s": statistics.median(times),
        "slowest_s": max(times),
        "spread_s": statistics.pstdev(times),
        "blocked_s": blocked_s,
    }
