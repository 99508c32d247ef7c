"""max_staging_bytes: a save that would need more goes in pieces, while the training waits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptool.torch.shard_file import threads_within

MIB = 1 << 20
NUM_TENSORS = 8
BUDGET = 96 * MIB

CHILD = """
import json, sys
from pathlib import Path
import torch
from ckptool.torch import Checkpointer

def peak():
    rows = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024

root, budget, compress, num_tensors = json.loads(sys.argv[1])
with Checkpointer(root, max_staging_bytes=budget, compress=compress, num_threads=16) as saver:
    saver.save(1, {"w": torch.ones(10)}, mode="sync")
    state = {f"w{i}": torch.randn(50 << 18) * 8 for i in range(num_tensors)}
    for i in range(0, num_tensors, 2):
        state[f"w{i}"].round_()  # compresses well
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = peak()
    report = saver.save(2, state)
    print(json.dumps({"mode": report.mode, "growth": peak() - before}))
"""


def _save(root: Path, **options: Any) -> dict[str, Any]:
    """A save of 400 MiB in a process of its own: its mode and how far its memory grew."""
    row = [str(root), options.get("budget"), options.get("compress"), NUM_TENSORS]
    command = [sys.executable, "-c", CHILD, json.dumps(row)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_memory_stays_within_the_budget(tmp_path: Path, compress: str | None) -> None:
    """A save of four times the budget blocks, and takes no more memory than it was given."""
    found = _save(tmp_path, budget=BUDGET, compress=compress)
    assert found["mode"] == "sync"
    assert found["growth"] < BUDGET + (64 * MIB if compress else 0)


@pytest.mark.parametrize(
    ("budget", "wanted"), [(None, 8), (0, 1), (64 * MIB, 1), (96 * MIB, 2), (10_000 * MIB, 8)]
)
def test_a_budget_is_a_number_of_parts(budget: int | None, wanted: int) -> None:
    """Two parts wait, and each one that is sent may be there twice."""
    assert threads_within(budget, num_threads=8, part_bytes=16 * MIB) == wanted
