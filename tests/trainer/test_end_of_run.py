"""Runs end for a reason that can be read, and what they leave behind can be resumed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, SIGKILLED, Ended, Ranks, losses

SMALL = (
    "run.device=cpu",
    "run.process_timeout_s=20",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "data.seq_len=32",
    "data.global_batch=8",
    "checkpoint.every=4",
)


def command(root: Path, *settings: str) -> list[str]:
    pairs = [f"run.root={root}", *SMALL, *settings]
    return ["-m", "trainer", *(part for pair in pairs for part in ("--set", pair))]


def finish(root: Path, *settings: str, num_ranks: int = 2, **env: str) -> list[Ended]:
    with Ranks(command(root, *settings), num_ranks=num_ranks, env=env) as ranks:
        return ranks.wait(timeout_s=120)


def exit_document(root: Path) -> dict[str, Any]:
    document = json.loads((root / "exit.json").read_text())
    assert isinstance(document, dict)
    return document


def wait_for_step(ranks: Ranks, step: int) -> None:
    deadline = time.monotonic() + 90
    while f"step {step} " not in ranks.output(0):
        assert time.monotonic() < deadline, ranks.output(0)
        assert all(process.poll() is None for process in ranks.processes), ranks.output(0)
        time.sleep(0.02)


def committed(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in root.glob("step-*/.metadata"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    assert [end.code for end in finish(root, "run.steps=12")] == [0, 0]
    assert exit_document(root)["outcome"] == "done"
    assert committed(root) == [4, 8, 12]
    return losses(root)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_on_one_rank_saves_on_all(tmp_path: Path, number: signal.Signals) -> None:
    """A rank that is told to go takes the others along, and the step is saved."""
    root = tmp_path / "run"
    with Ranks(command(root, "run.steps=100000", "checkpoint.every=0"), num_ranks=2) as ranks:
        wait_for_step(ranks, 3)
        ranks.signal(number, ranks=[1])
        codes = [end.code for end in ranks.wait(timeout_s=60)]
    assert codes == [75, 75]
    document = exit_document(root)
    assert document["outcome"] == "preempted-saved"
    assert committed(root) == [document["step"]]


def test_silent_peer_means_no_save(tmp_path: Path) -> None:
    """When a peer has stopped for good, no save is tried, and the rank still ends in time."""
    root = tmp_path / "run"
    with Ranks(command(root, "run.steps=100000", "checkpoint.every=0"), num_ranks=2) as ranks:
        wait_for_step(ranks, 3)
        ranks.signal(signal.SIGSTOP, ranks=[1])
        ranks.signal(signal.SIGTERM, ranks=[0])
        ranks.processes[0].wait(timeout=60)
        assert ranks.processes[0].returncode in (1, 76)
    assert committed(root) == []
    assert exit_document(root)["outcome"] in ("failed", "preempted-not-saved")


def test_hanging_rank_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    """A rank that makes no progress is noticed, named and ended; nobody waits for ever."""
    root = tmp_path / "run"
    settings = ("run.steps=100000", "checkpoint.every=0", "run.step_timeout_s=5")
    with Ranks(command(root, *settings), num_ranks=2) as ranks:
        wait_for_step(ranks, 3)
        ranks.signal(signal.SIGSTOP, ranks=[1])
        assert ranks.processes[0].wait(timeout=60) == 1
        assert "no progress for 5 s" in ranks.output(0)
    assert exit_document(root)["outcome"] == "failed"
    assert "rank 0" in exit_document(root)["reason"]


def test_nan_stops_before_it_is_saved(tmp_path: Path) -> None:
    """A NaN loss ends the run with 77, and the last good step is still the newest."""
    root = tmp_path / "run"
    codes = [end.code for end in finish(root, "run.steps=4", "checkpoint.every=2")]
    assert codes == [0, 0]
    # A rate this high overflows within a few steps.
    hot = ("run.steps=40", "optim.lr=1e30", "optim.clip_norm=0", "checkpoint.every=50")
    codes = [end.code for end in finish(root, *hot)]
    assert codes == [77, 77]
    document = exit_document(root)
    assert document["outcome"] == "stopped-by-nan"
    assert document["committed_step"] == 4
    assert committed(root) == [2, 4]


def assert_resumes(root: Path, expected: dict[int, float], *settings: str) -> None:
    """Start again what a kill ended: it goes on from the newest committed step."""
    before = committed(root)
    ended = finish(root, "run.steps=12", *settings)
    assert [end.code for end in ended] == [0, 0]
    resumed = re.search(r"resumed from step (\d+)", ended[0].output)
    assert (int(resumed[1]) if resumed else None) == max(before, default=None)
    assert losses(root) == expected


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("before-first-part", marks=pytest.mark.full),
        pytest.param("before-manifest", marks=pytest.mark.full),
        "before-metadata",
        "after-metadata",
    ],
)
def test_kill_in_a_save_resumes_to_the_same_loss(
    tmp_path: Path, undisturbed: dict[int, float], point: str
) -> None:
    """A rank killed anywhere in a save costs steps, never a checkpoint."""
    root = tmp_path / "run"
    rank = 1 if point == "before-first-part" else 0  # only rank 0 commits
    codes = [end.code for end in finish(root, "run.steps=12", CKPTOOL_FAULT=f"{point}:kill:{rank}")]
    assert codes[rank] == SIGKILLED
    assert codes[1 - rank] != 0
    assert committed(root) == ([4] if point == "after-metadata" else [])
    assert_resumes(root, undisturbed)


@pytest.mark.full
def test_kill_in_a_part_resumes_to_the_same_loss(tmp_path: Path) -> None:
    """A rank killed between two parts of a shard file leaves nothing that is taken for a step."""
    large = ("model.dim=512", "model.num_layers=4")  # a shard file of several parts
    root, whole = tmp_path / "run", tmp_path / "undisturbed"
    finish(whole, "run.steps=12", *large)
    codes = [
        end.code for end in finish(root, "run.steps=12", *large, CKPTOOL_FAULT="in-part:kill:1")
    ]
    assert codes[1] == SIGKILLED
    assert committed(root) == []
    assert_resumes(root, losses(whole), *large)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))]
)
def test_kill_at_any_moment_resumes_to_the_same_loss(
    tmp_path: Path, undisturbed: dict[int, float], seed: int
) -> None:
    """A rank killed at a random moment costs steps, and no number changes."""
    generator = random.Random(seed)
    root = tmp_path / "run"
    with Ranks(command(root, "run.steps=12"), num_ranks=2) as ranks:
        wait_for_step(ranks, generator.randrange(1, 12))
        time.sleep(generator.random() * 0.1)
        ranks.signal(signal.SIGKILL, ranks=[generator.randrange(2)])
        ranks.wait(timeout_s=60)
    assert_resumes(root, undisturbed)


def test_restart_after_nan_stops_at_once(tmp_path: Path) -> None:
    """torchrun's restart of a run that NaN stopped does not train into it again."""
    root = tmp_path / "run"
    hot = ("run.steps=40", "optim.lr=1e30", "optim.clip_norm=0", "checkpoint.every=50")
    assert [end.code for end in finish(root, *hot, num_ranks=1)] == [77]
    with Ranks(command(root, *hot), num_ranks=1, restart=1) as ranks:
        ended = ranks.wait(timeout_s=60)
    assert ended[0].code == 77
    assert "step 1 " not in ended[0].output


def test_elastic_restart_goes_on_by_itself(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """torchrun starts the ranks again, and they take up the newest committed step."""
    root = tmp_path / "run"
    arguments = command(root, "run.steps=12")[2:]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "--max-restarts=2", "tests/trainer_dies_once.py"),
            *arguments,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DIE_AFTER": str(root / "step-00000004" / ".metadata"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from step" in done.stderr
    assert exit_document(root)["restart"] == 1
    assert losses(root) == undisturbed


def test_old_steps_go_and_the_newest_stays(tmp_path: Path) -> None:
    """``keep_last`` and ``keep_every`` let the others go, after each commit."""
    root = tmp_path / "run"
    keep = ("checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_every=4")
    assert [end.code for end in finish(root, "run.steps=11", *keep)] == [0, 0]
    assert committed(root) == [4, 8, 10, 11]
    kept = {f"step-{step:08d}" for step in (4, 8, 10, 11)}
    assert {path.parent.name for path in root.glob("step-*/*")} == kept
