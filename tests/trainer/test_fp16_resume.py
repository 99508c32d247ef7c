"""A run in fp16 goes on where it was: the scale of its losses is a part of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import losses, run_jobs
from trainer_jobs import config_tree

from ckptool.torch import Checkpointer

NUM_STEPS = 4


def _config(root: Path, **tables: dict[str, Any]) -> dict[str, Any]:
    """The scale grows at every step, from one that is far too small for exact gradients."""
    precision = {"mode": "fp16", "fp16_initial_scale": 1.0, "fp16_growth_steps": 1}
    return config_tree(root, precision=precision, **tables)


def _scaler(root: Path) -> Any:
    state = {"scaler": {"scale": None, "good_steps": None}}
    with Checkpointer(str(root)) as checkpointer:
        checkpointer.load(state, step=NUM_STEPS)
    return state["scaler"]


def test_an_fp16_run_resumes_bit_identically(tmp_path: Path) -> None:
    """Scale and count of good steps come back, and so every loss is that of an unbroken run."""
    jobs = [
        {"name": "whole", "config": _config(tmp_path / "whole", checkpoint={"every": 2})},
        {
            "name": "resumed",
            "start_from": str(tmp_path / "whole" / "step-00000002"),
            "config": _config(tmp_path / "resumed"),
        },
    ]
    for result in run_jobs(jobs, num_ranks=2, folder=tmp_path):
        assert {job["code"] for job in result.values()} == {0}
    assert _scaler(tmp_path / "whole") == {"scale": 2.0**NUM_STEPS, "good_steps": 0}
    assert _scaler(tmp_path / "resumed") == _scaler(tmp_path / "whole")
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert resumed == {step: whole[step] for step in (3, 4)}
