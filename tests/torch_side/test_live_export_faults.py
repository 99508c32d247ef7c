"""A live export that fails anywhere leaves nothing visible, and every rank knows why."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from gloo import run_ranks

from ckptool.storage import open_store

MIB = 1 << 20


def failing_worker(rank: int, num_ranks: int, *, root: str) -> dict[str, Any]:
    """Failures on one rank or another, each followed by nothing but its error."""
    import torch
    from torch_side import live_models

    from ckptool.errors import CkptoolError
    from ckptool.torch import LiveExporter

    model = live_models.build("tp")  # rows that interlock: ranks wait for each other
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    told: dict[str, Any] = {}

    def attempt(what: str, **options: Any) -> None:
        try:
            exporter.export(model, f"{root}/{what}", **{"max_memory": 2 * MIB, **options})
            exporter.wait()
            told[what] = "no error"
        except CkptoolError as error:
            told[what] = str(error)

    with LiveExporter(process_timeout_s=30) as exporter:
        for mode in ("snapshot", "stop"):
            for where in (0, 3):
                os.environ["CKPTOOL_FAULT"] = f"in-part:raise:{where}"
                attempt(f"{mode}-{where}", mode=mode)
        os.environ["CKPTOOL_FAULT"] = "before-metadata:raise:0"
        attempt("commit", beside={"config.json": b"{}"})
        del os.environ["CKPTOOL_FAULT"]
        attempt("missing", only=["nothing.*"])
        attempt("budget", max_memory=100_000)
        Path(root, f"taken-{rank}").mkdir()
        Path(root, f"taken-{rank}", "file").write_text("here")
        attempt("taken-0")
        attempt("small.pt")
        exporter.export(model, f"{root}/slow", max_memory=2 * MIB)
        exporter.cancel(timeout_s=30)
        attempt("good", mode="snapshot")
    after = {name: p.to_local() for name, p in model.named_parameters()}
    told["same"] = all(
        torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before
    )
    return told


def dying_worker(
    rank: int, num_ranks: int, *, url: str, options: dict[str, Any], action: str, marks: str
) -> None:
    """One rank dies or hangs in the middle of the export."""
    from torch_side import live_models

    from ckptool.errors import CkptoolError
    from ckptool.torch import LiveExporter

    big = bool(options)
    model = live_models.build("tp", dim=912 if big else 228)
    exporter = LiveExporter(process_timeout_s=5)
    os.environ["CKPTOOL_FAULT"] = f"in-part:{action}"
    started = time.monotonic()
    try:
        exporter.export(model, url, max_memory=(40 if big else 2) * MIB, storage_options=options)
        exporter.wait()
    except CkptoolError as error:
        Path(marks, f"told{rank}").write_text(f"{time.monotonic() - started:.1f} {error}")
        os._exit(7)


def test_a_failure_is_every_ranks_failure(tmp_path: Path) -> None:
    """Wherever one rank fails, all raise its reason, nothing is left, the model is as it was,
    and the next export is whole."""
    ends = run_ranks(__file__, "failing_worker", num_ranks=4, root=str(tmp_path))
    for end in ends:
        told = end.result
        for mode in ("snapshot", "stop"):
            for where in (0, 3):
                assert "was told to fail in-part" in told[f"{mode}-{where}"]
        assert "was told to fail before-metadata" in told["commit"]
        assert "no entry matches" in told["missing"]
        assert "max_memory to 1048576 or more" in told["budget"]
        assert "taken-0" in told["taken-0"]
        assert "safetensors only" in told["small.pt"]
        assert told["good"] == "no error"
        assert told["same"]
    left = sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.name != "file")
    assert left == ["model.safetensors"]
    assert (tmp_path / "good" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "action",
    ["kill:2", *(pytest.param(action, marks=pytest.mark.full) for action in ("kill:0", "hang:1"))],
)
def test_a_lost_rank_leaves_nothing(tmp_path: Path, action: str) -> None:
    """A rank that is killed or hangs in the middle: the others say so in time, and the
    destination is empty, hidden files included."""
    place = tmp_path / "out"
    marks = tmp_path / "marks"
    marks.mkdir()
    ends = run_ranks(
        __file__, "dying_worker", num_ranks=4, url=str(place), options={}, action=action,
        marks=str(marks), must_succeed=False, timeout_s=40,
    )  # fmt: skip
    lost = int(action[-1])
    for rank, end in enumerate(ends):
        assert end.code == (7 if rank != lost else end.code), end.output
    assert ends[lost].code != 0
    assert not place.exists() or list(place.rglob("*")) == []


def test_a_killed_rank_leaves_no_upload(
    tmp_path: Path, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """On S3 the survivors abort the upload that the dead rank had begun."""
    ends = run_ranks(
        __file__, "dying_worker", num_ranks=4, url=s3_url, options=s3_options, action="kill:0",
        marks=str(tmp_path), must_succeed=False, timeout_s=60,
    )  # fmt: skip
    assert [end.code for end in ends] == [-9, 7, 7, 7], ends[1].output
    store = open_store(s3_url, options=s3_options)
    assert list(store.list()) == []
    assert list(store.list_uploads()) == []
