"""A script that ends without ``close()``: nothing in flight is lost, and no failure is silent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ROOT, Ended, Ranks
from safetensors.torch import load_file

from ckptool.storage import open_store
from ckptool.torch.retention import committed_steps


def _run(
    what: str, url: str, options: dict[str, Any], *, groups: str = "kept", fault: str = ""
) -> list[Ended]:
    command = [str(ROOT / "tests" / "leaves_early.py"), what, url, json.dumps(options), groups]
    with Ranks(command, num_ranks=2, env={"CKPTOOL_FAULT": fault} if fault else {}) as ranks:
        return ranks.wait(timeout_s=60)


@pytest.mark.parametrize("groups", ["kept", "destroyed"])
def test_the_last_save_is_committed(tmp_path: Path, groups: str) -> None:
    """Also when the script's last act is to destroy all process groups."""
    for end in _run("save", str(tmp_path), {}, groups=groups, fault="before-metadata:slow"):
        assert end.code == 0, end.output
        assert "ends while the save of step 1 is in flight: waiting for it" in end.output
    assert committed_steps(open_store(str(tmp_path))) == {1: "step-00000001"}


def test_the_last_save_is_committed_on_s3(s3_url: str, s3_options: dict[str, Any]) -> None:
    """The client can still do what it does in threads."""
    for end in _run("save", s3_url, s3_options, groups="destroyed"):
        assert end.code == 0, end.output
    assert committed_steps(open_store(s3_url, options=s3_options)) == {1: "step-00000001"}


def test_the_last_export_is_committed(tmp_path: Path) -> None:
    """A live export is no less finished than a save."""
    fault = "before-metadata:slow"
    for end in _run("export", str(tmp_path), {}, groups="destroyed", fault=fault):
        assert end.code == 0, end.output
        assert "model.safetensors is in flight: waiting for it" in end.output
    assert torch.equal(load_file(tmp_path / "model.safetensors")["b"], torch.ones(3))


def test_the_last_failure_is_told(tmp_path: Path) -> None:
    """On every rank, though nobody asks for it any more."""
    for end in _run("save", str(tmp_path), {}, fault="in-part:raise:1"):
        assert "the save of step 1 failed: " in end.output
        assert "was told to fail in-part" in end.output
    assert committed_steps(open_store(str(tmp_path))) == {}
