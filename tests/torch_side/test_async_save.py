"""Saves in flight: one instant is saved whatever the training does, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks

from ckptool.errors import StorageError, UsageError
from ckptool.storage import open_store
from ckptool.torch import Checkpointer


class Net(torch.nn.Module):
    """Parameters, a buffer that changes in forward, and an average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.BatchNorm1d(512))
        self.head = torch.nn.Linear(512, 8)
        self.average = {n: p.detach().clone() for n, p in self.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for name, p in self.named_parameters():
                self.average[name].lerp_(p, 0.1)
        return self.head(self.body(x))


class Training:
    """A loop whose every class of state changes at another moment of a step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.order = [0]

    def step(self) -> None:
        self.order.append(len(self.order))
        self.net(torch.randn(16, 64)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        optim = self.optimizer.state_dict()
        return {
            "model": self.net.state_dict(),
            "average": self.net.average,
            "moments": {str(k): v for k, v in optim["state"].items()},
            "lr": self.schedule.get_last_lr()[0],
            "order": self.order,
            "rng": torch.get_rng_state(),
        }


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeros(item) for key, item in value.items()}
    return None


def test_the_saved_step_is_one_instant(tmp_path: Path) -> None:
    """Parameters, moments, buffers, averages, RNG, schedule and data position are those of the
    moment of the call, though all of them change while the save is in flight."""
    from torch_side.states import same

    training = Training()
    with Checkpointer(str(tmp_path)) as checkpointer:
        for number in range(1, 6):
            training.step()
            wanted = _copied(training.state())
            report = checkpointer.save(number, training.state())
            assert not report.committed
            for _ in range(3):
                training.step()
            checkpointer.wait()
            assert checkpointer.finished()[-1].committed
            found = _zeros(training.state())
            checkpointer.load(found, step=number)
            assert same(found, wanted)


def test_an_edit_that_does_not_wait_is_found(tmp_path: Path) -> None:
    """A parameter that is edited by hand while it is copied fails the save, not silently."""
    training = Training()
    with Checkpointer(str(tmp_path), on_failure="warn") as checkpointer:
        training.step()
        beside_hook = checkpointer._saver
        beside_hook.prepare(training.state(), {})
        from ckptool.torch import staging

        slow = staging._copy

        def copy_slowly(*arguments: Any) -> None:
            time.sleep(0.02)
            slow(*arguments)

        staging._copy = copy_slowly
        try:
            checkpointer.save(1, training.state())
            with torch.no_grad():
                training.net.head.weight.add_(1)
            checkpointer.wait()
            (report,) = checkpointer.finished()
            assert "edited in place" in str(report.error)
            checkpointer.save(2, training.state())
            checkpointer.wait_staged()
            with torch.no_grad():
                training.net.head.weight.add_(1)
            checkpointer.wait()
            assert checkpointer.finished()[0].committed
        finally:
            staging._copy = slow


def test_one_save_at_a_time(tmp_path: Path) -> None:
    """A save that finds another in flight is left out, or waits, as configured; and says so."""
    state = {"w": torch.randn(3000, 1000)}
    with Checkpointer(str(tmp_path / "skip"), when_busy="skip") as checkpointer:
        checkpointer.prepare(state)
        os.environ["CKPTOOL_FAULT"] = "before-manifest:slow"
        reports = [checkpointer.save(step, state) for step in (1, 2)]
        del os.environ["CKPTOOL_FAULT"]
        assert [report.skipped for report in reports] == [False, True]
        checkpointer.wait()
        assert checkpointer.latest() == 1
    with Checkpointer(str(tmp_path / "wait")) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state)
        checkpointer.wait()
        assert [report.step for report in checkpointer.finished()] == [1, 2, 3]


def test_a_failed_save_is_told_once_and_the_next_one_is_clean(tmp_path: Path) -> None:
    """The uploader that is killed fails the save in flight; the next save has a new one."""
    state = {"w": torch.randn(3000, 3000)}
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        os.environ["CKPTOOL_FAULT"] = "in-part:kill-uploader"
        checkpointer.save(2, state)
        with pytest.raises(StorageError, match="uploader process"):
            checkpointer.wait()
        del os.environ["CKPTOOL_FAULT"]
        assert checkpointer.latest() == 1
        checkpointer.save(2, state)
        checkpointer.wait()
        assert checkpointer.latest() == 2
    assert len(list((tmp_path / "step-00000002").glob("*.distcp"))) == 1


def test_the_next_start_aborts_what_a_dead_one_left(tmp_path: Path) -> None:
    """An upload that nobody will finish is aborted and leaves no bytes."""
    state = {"w": torch.randn(3000, 3000)}
    with Checkpointer(str(tmp_path), on_failure="warn") as checkpointer:
        os.environ["CKPTOOL_FAULT"] = "in-part:kill-uploader"
        checkpointer.save(1, state)
        checkpointer.wait()
        del os.environ["CKPTOOL_FAULT"]
    assert open_store(tmp_path).list_uploads()
    Checkpointer(str(tmp_path)).close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 50 MiB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: Path, mode: str) -> None:
    """The error says that there is no space; the last step stands; the rest is cleared away."""
    state = {"w": torch.ones(2500, 3000)}
    with Checkpointer(str(small_disk), mode=mode, on_failure="warn") as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        report = checkpointer.save(2, state)
        checkpointer.wait()
        report = checkpointer.finished()[-1] if mode == "async" else report
        assert not report.committed
        assert "space" in str(report.error).lower()
        assert checkpointer.latest() == 1
        found = {"w": torch.zeros(2500, 3000)}
        checkpointer.load(found)
        assert torch.equal(found["w"], state["w"])
    assert not open_store(small_disk).list_uploads()


def test_a_save_over_its_staging_budget_blocks(tmp_path: Path) -> None:
    """max_staging_bytes makes a large save a blocking one that needs little memory."""
    with Checkpointer(str(tmp_path), max_staging_bytes=1000) as checkpointer:
        report = checkpointer.save(1, {"w": torch.randn(300, 300)})
        assert (report.mode, report.committed) == ("sync", True)


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """An unknown mode is a usage error that names the choices."""
    with pytest.raises(UsageError, match="async, sync"):
        Checkpointer(str(tmp_path), mode="later")


def test_a_save_with_a_deadline_says_whether_it_made_it(tmp_path: Path) -> None:
    """A save before the end waits for its own step, and gives up in time."""
    state = {"w": torch.randn(300, 300)}
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, state)
        assert checkpointer.save(1, state, deadline_s=20).committed
        assert checkpointer.save(2, state, deadline_s=20).committed
        os.environ["CKPTOOL_FAULT"] = "before-manifest:slow"
        report = checkpointer.save(3, state, deadline_s=0.2)
        del os.environ["CKPTOOL_FAULT"]
        assert not report.committed
        assert "within 0.2 s" in str(report.error)


def dying_worker(rank: int, num_ranks: int, *, root: str) -> dict[str, Any]:
    """Rank 1 is killed while its save is in flight; rank 0 must hear of it, and soon."""
    from ckptool.errors import CkptoolError

    state = {f"w{rank}": torch.randn(3000, 3000)}
    checkpointer = Checkpointer(root, process_timeout_s=30)
    checkpointer.save(1, state)
    checkpointer.wait()
    os.environ["CKPTOOL_FAULT"] = "in-part:kill:1"
    started = time.monotonic()
    checkpointer.save(2, state)
    try:
        checkpointer.wait()
    except CkptoolError as error:
        Path(root, "told").write_text(f"{time.monotonic() - started} {error}")
        os._exit(7)
    return {}


def test_a_rank_that_dies_in_flight_commits_nothing(tmp_path: Path) -> None:
    """The other rank has a clear error at once; the uploaders of both are gone."""
    ends = run_ranks(
        __file__, "dying_worker", num_ranks=2, must_succeed=False, timeout_s=40, root=str(tmp_path)
    )
    assert [end.code for end in ends] == [7, -9], [end.output for end in ends]
    seconds, told = (tmp_path / "told").read_text().split(" ", 1)
    assert float(seconds) < 30  # the timeout of a silent rank, which a dead one is not
    assert "gone" in told
    assert not (tmp_path / "step-00000002" / ".metadata").exists()
    deadline = time.monotonic() + 10
    while open_store(tmp_path).list_uploads():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_uploader_loads_no_torch() -> None:
    """The process beside each rank starts at once and stays small."""
    code = "import ckptool.torch.uploader, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_staged_is_not_kept_alive(tmp_path: Path) -> None:
    """A temporary tensor (a gathered shard, say) may go once it is staged."""
    temporary = torch.randn(100, 100)
    gone = weakref.ref(temporary)
    with Checkpointer(str(tmp_path)) as checkpointer:
        os.environ["CKPTOOL_FAULT"] = "before-manifest:slow"
        checkpointer.save(1, {"w": temporary})
        del os.environ["CKPTOOL_FAULT"], temporary
        gc.collect()
        assert gone() is None
        checkpointer.wait()


class Counter:
    """A Stateful object with a tensor and a value."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, torch.full((4,), float(number))

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.seen = state["number"], state["seen"]


def test_stateful_objects_are_asked_and_told(tmp_path: Path) -> None:
    """Objects with state_dict and load_state_dict are saved and loaded as torch's DCP does."""
    with Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"counter": Counter(5), "plain": 3})
        counter, state = Counter(0), {"plain": 0}
        checkpointer.load({"counter": counter, **state})
        assert counter.number == 5
        assert counter.seen.tolist() == [5.0] * 4
