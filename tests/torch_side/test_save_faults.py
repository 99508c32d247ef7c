"""A rank that fails, dies or hangs in a save: nothing is committed, and all learn of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from gloo import run_ranks

POINTS = ["before-first-part", "in-part", "before-manifest", "before-metadata"]


def raising_worker(rank: int, num_ranks: int, *, root: str) -> dict[str, Any]:
    """Every point raises in turn, on one rank; then a save of the same step succeeds."""
    from torch_side import states

    from ckptool.errors import CkptoolError
    from ckptool.torch import Checkpointer

    told: dict[str, Any] = {}
    with Checkpointer(root, mode="sync") as checkpointer:
        checkpointer.save(1, states.state(num_ranks, seed=1))
        for point in POINTS:
            where = 1 if "part" in point else 0
            os.environ["CKPTOOL_FAULT"] = f"{point}:raise:{where}"
            try:
                checkpointer.save(2, _large(num_ranks))
                told[point] = "no error"
            except CkptoolError as error:
                told[point] = str(error)
            told[f"{point} latest"] = checkpointer.latest()
        del os.environ["CKPTOOL_FAULT"]
        checkpointer.save(2, _large(num_ranks))
        told["latest"] = checkpointer.latest()
    return told


def dying_worker(
    rank: int, num_ranks: int, *, root: str, point: str, where: int, action: str
) -> dict[str, Any]:
    """One rank dies or hangs at a point of the second save."""
    from torch_side import states

    from ckptool.errors import CkptoolError
    from ckptool.torch import Checkpointer

    checkpointer = Checkpointer(root, process_timeout_s=4, mode="sync")
    checkpointer.save(1, states.state(num_ranks, seed=1))
    os.environ["CKPTOOL_FAULT"] = f"{point}:{action}:{where}"
    started = time.monotonic()
    try:
        checkpointer.save(2, _large(num_ranks))
    except CkptoolError as error:
        told = {"error": str(error), "seconds": time.monotonic() - started}
        Path(root, f"told{rank}").write_text(told["error"])
        os._exit(7)
    return {"error": None}


def _large(num_ranks: int) -> dict[str, Any]:
    """Several parts on every rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (num_ranks,))
    return {"wide": distribute_tensor(torch.ones(9000, 1000 * num_ranks), mesh, [Shard(0)])}


def test_a_failure_is_every_ranks_failure(tmp_path: Path) -> None:
    """Wherever one rank fails, both raise its reason, the last step stays the newest, and the
    next save starts clean and leaves nothing of the failed ones."""
    ends = run_ranks(__file__, "raising_worker", num_ranks=2, root=str(tmp_path))
    for end in ends:
        for point in POINTS:
            assert f"was told to fail {point}" in end.result[point]
            assert end.result[f"{point} latest"] == 1
        assert end.result["latest"] == 2
    names = sorted(path.name for path in (tmp_path / "step-00000002").iterdir())
    assert len([name for name in names if name.endswith(".distcp")]) == 2


@pytest.mark.parametrize(
    ("point", "where", "action"),
    [("in-part", 1, "kill"), ("before-metadata", 0, "kill"), ("in-part", 0, "hang")],
)
def test_a_lost_rank_commits_nothing(tmp_path: Path, point: str, where: int, action: str) -> None:
    """A rank that is killed or hangs leaves an uncommitted step, and the other one says so."""
    ends = run_ranks(
        __file__,
        "dying_worker",
        num_ranks=2,
        must_succeed=False,
        until_rank=1 - where,
        root=str(tmp_path),
        point=point,
        where=where,
        action=action,
    )
    other = 1 - where
    assert ends[other].code == 7, ends[other].output
    told = (tmp_path / f"told{other}").read_text()
    assert "gone" in told or "lost each other" in told or "did not reach" in told
    assert (tmp_path / "step-00000001" / ".metadata").exists()
    assert not (tmp_path / "step-00000002" / ".metadata").exists()
