"""Saves and loads on gloo ranks: bit for bit, at any world size, and as stock DCP has it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks


def worker(rank: int, num_ranks: int, *, root: str, stock: str, mode: str) -> dict[str, Any]:
    """One spawn for many promises; each fact is asserted by the tests below."""
    import torch.distributed.checkpoint as dcp
    from torch_side import states

    from ckptool.torch import Checkpointer

    facts: dict[str, Any] = {}
    layout = {"dp_shard": num_ranks}
    with Checkpointer(root, keep_last=2, layout=layout, mode=mode) as checkpointer:
        assert checkpointer.load(states.state(num_ranks)) is None
        for step in (1, 2, 3):
            state = states.state(num_ranks, seed=step)
            own = {"rng": {str(rank): {"cpu": states.pattern((5056,), torch.uint8, seed=rank)}}}
            report = _save(checkpointer, step, state, rank_state=own)
        facts["deleted"] = report.deleted
        facts["latest"] = checkpointer.latest()

        target, rng = (
            states.state(num_ranks),
            {"rng": {str(rank): {"cpu": torch.zeros(5056).byte()}}},
        )
        target["step"] = 0
        loaded = checkpointer.load(target, rank_state=rng)
        wanted = states.state(num_ranks, seed=3)
        facts["same"] = states.same(states.whole(target), states.whole(wanted))
        facts["rng"] = bool((rng["rng"][str(rank)]["cpu"] == own["rng"][str(rank)]["cpu"]).all())
        facts["report"] = [loaded.step, loaded.missing, loaded.amplification]

        other = {"rng": {str(rank + 100): {"cpu": torch.zeros(5056).byte()}}}
        facts["missing"] = checkpointer.load(target, rank_state=other).missing

        template = states.state(num_ranks)
        dcp.load(template, checkpoint_id=f"{root}/step-00000003")
        facts["stock reads ours"] = states.same(states.whole(template), states.whole(wanted))

        dcp.save(states.state(num_ranks, seed=5, hsdp=True), checkpoint_id=f"{stock}/step-5")
        with Checkpointer(stock) as reader:
            target = states.state(num_ranks)
            reader.load(target)
            wanted = states.state(num_ranks, seed=5)
            facts["we read stock"] = states.same(states.whole(target), states.whole(wanted))

        _save(checkpointer, 4, states.state(num_ranks, seed=4, hsdp=True))
        target = states.state(num_ranks)
        again = checkpointer.load(target)
        wanted = states.state(num_ranks, seed=4)
        facts["hsdp"] = states.same(states.whole(target), states.whole(wanted))
        target = states.state(num_ranks, hsdp=True)
        replicated = checkpointer.load(target)
        facts["into replicas"] = states.same(states.whole(target), states.whole(wanted))
        size = sum(t.nbytes for t in states.tensors(wanted))
        facts["read once"] = [replicated.needed_bytes / size, replicated.fetched_bytes / size]
        facts["errors"] = _errors(checkpointer, rank, num_ranks)
        facts["amplification"] = again.amplification
    return facts


def _save(checkpointer: Any, step: int, state: Any, **more: Any) -> Any:
    """Save and wait; the final report."""
    report = checkpointer.save(step, state, **more)
    checkpointer.wait()
    return report if report.mode == "sync" else checkpointer.finished()[-1]


def _errors(checkpointer: Any, rank: int, num_ranks: int) -> dict[str, str]:
    from torch_side import states

    from ckptool.errors import CkptoolError

    state = states.state(num_ranks)
    tries = {
        "taken": lambda: _save(checkpointer, 4, state),
        "values differ": lambda: checkpointer.save(9, {**state, "step": rank}),
        "steps differ": lambda: checkpointer.save(10 + rank, state),
        "shapes differ": lambda: checkpointer.save(9, {"x": torch.zeros(rank + 1)}),
        "one rank fails": lambda: checkpointer.save(9, {"x": object()} if rank == 1 else {"x": 1}),
        "missing key": lambda: checkpointer.load({**state, "no": torch.zeros(2), "way": 1}),
        "other shape": lambda: checkpointer.load({"model": {"buf": torch.zeros(4).long()}}),
        "other dtype": lambda: checkpointer.load({"model": {"buf": torch.zeros(3)}}),
        "no such step": lambda: checkpointer.load(state, step=77),
    }
    told = {}
    for name, attempt in tries.items():
        try:
            attempt()
            told[name] = "no error"
        except CkptoolError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


@pytest.fixture(scope="module", params=["async", pytest.param("sync", marks=pytest.mark.full)])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("runs")
    ends = run_ranks(
        __file__,
        "worker",
        num_ranks=4,
        root=str(root / "run"),
        stock=str(root / "stock"),
        mode=request.param,
    )
    return root, [end.result for end in ends]


def test_every_entry_comes_back_bit_for_bit(saved: Any) -> None:
    """Shards, columns, replicas, plain tensors of any dtype and values are what was saved."""
    assert all(facts["same"] and facts["rng"] and facts["hsdp"] for facts in saved[1])


def test_stock_torch_reads_what_we_write(saved: Any) -> None:
    """Stock ``dcp.load`` gets the same bits."""
    assert all(facts["stock reads ours"] for facts in saved[1])


def test_we_read_what_stock_torch_writes(saved: Any) -> None:
    """A checkpoint of stock ``dcp.save`` on another mesh loads bit for bit."""
    assert all(facts["we read stock"] for facts in saved[1])


def test_a_load_names_the_rank_keys_that_are_missing(saved: Any) -> None:
    """A rank beyond the saved world learns that its keys are not there, and goes on."""
    for rank, facts in enumerate(saved[1]):
        assert facts["missing"] == [f"rng.{rank + 100}.cpu"]
        assert facts["report"][:2] == [3, []]


def test_replicas_are_read_once(saved: Any) -> None:
    """On a replicated mesh each byte is fetched by one rank of those that need it."""
    for facts in saved[1]:
        assert facts["into replicas"]
        needed, fetched = facts["read once"]
        assert needed < 1.05  # the values count too
        assert fetched < 1.15  # framing between small items is read along


def test_retention_keeps_the_newest(saved: Any) -> None:
    """keep_last=2 lets step 1 go once step 3 is committed."""
    assert saved[1][0]["deleted"] == ["step-00000001"]
    assert saved[1][0]["latest"] == 3


def test_errors_are_the_same_on_every_rank(saved: Any) -> None:
    """What one rank cannot do, no rank does, and each one hears why."""
    wanted = {
        "taken": ("NotEmptyError", "never written over"),
        "values differ": ("UsageError", "step differs between ranks 0 and 1"),
        "steps differ": ("UsageError", "the ranks save different steps"),
        "shapes differ": ("UsageError", "x is float32 [1] on rank 0 and float32 [2] on rank 1"),
        "one rank fails": ("", "rank"),
        "missing key": ("UsageError", "has no no, way"),
        "other shape": ("UsageError", "model.buf has shape [3] in the checkpoint and [4]"),
        "other dtype": ("UsageError", "model.buf is int64 in the checkpoint and float32"),
        "no such step": ("NoCheckpointError", "no committed step 77"),
    }
    for facts in saved[1]:
        for name, (kind, text) in wanted.items():
            told = facts["errors"][name]
            assert told.startswith(kind), told
            assert text in told


def test_the_manifest_names_every_object(saved: Any) -> None:
    """``ckpt.json`` has each shard file's size, the step and the layout."""
    folder = saved[0] / "run" / "step-00000004"
    manifest = json.loads((folder / "ckpt.json").read_text())
    shards = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert {name: manifest["objects"][name]["num_bytes"] for name in shards} == shards
    assert manifest["step"] == 4
    assert manifest["layout"] == {"world_size": 4, "dp_shard": 4}


def test_replicas_are_stored_once(saved: Any) -> None:
    """On a replicated mesh the files together hold little more than the state itself."""
    folder = saved[0] / "run" / "step-00000004"
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert len(sizes) == 4
    assert sum(sizes) < 300 * 700 * 4 + 50_000


def test_one_process_resumes_from_four_ranks(saved: Any) -> None:
    """Without torch.distributed the same run loads whole, and saves."""
    from ckptool.torch import Checkpointer

    state: dict[str, Any] = {
        "model": {"big": torch.zeros(300, 700), "u": torch.zeros(5).bfloat16()}
    }
    with Checkpointer(str(saved[0] / "run")) as checkpointer:
        report = checkpointer.load(state, strict=False)
        assert report is not None
        checkpointer.save(20, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        again: dict[str, Any] = {"model": {"big": torch.zeros(300, 700)}}
        dcp.load(again, checkpoint_id=str(saved[0] / "run" / "step-00000020"))
    from torch_side.states import pattern

    assert torch.equal(again["model"]["big"], pattern((300, 700), torch.float32, seed=4))
