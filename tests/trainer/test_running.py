"""What happens inside a running trainer is what theory and the estimate say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ROOT, Ranks, losses, run_jobs
from trainer_jobs import config_tree, fsdp1

FOUR_BLOCKS = {"model": {"dim": 32, "num_layers": 4, "num_heads": 4}}
PLAN: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("count", FOUR_BLOCKS),
    "kept": ("count", {**FOUR_BLOCKS, "parallel": {"reshard_after_forward": False}}),
    "accumulate": ("count", {**FOUR_BLOCKS, "data": {"micro_batch": 1}}),
    "fsdp1": ("count", {**FOUR_BLOCKS, **fsdp1()}),
    "mistakes": ("mistakes", {"parallel": {"dp_replicate": 2}}),
    "scale": ("scale", {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("running")
    plan = folder / "plan.json"
    jobs = {
        name: {"call": call, "config": config_tree(folder / name, **tables)}
        for name, (call, tables) in PLAN.items()
    }
    plan.write_text(json.dumps(jobs))
    worker = str(ROOT / "tests" / "trainer_checks_worker.py")
    with Ranks([worker, str(plan)], num_ranks=4) as ranks:
        ranks.wait(timeout_s=120, together=True)
    return [json.loads(Path(f"{plan}.{rank}").read_text()) for rank in range(4)]


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    [("fsdp2", 9, 5), ("kept", 5, 5), ("accumulate", 18, 5), ("fsdp1", 9, 5)],
)
def test_collectives_match_theory(
    answers: list[dict[str, Any]], name: str, gathers: int, scatters: int
) -> None:
    """Four blocks and a root: 9 all-gathers and 5 reduce-scatters, as the estimate says."""
    from trainer.config_file import make_config
    from trainer.estimate import estimate
    from trainer.layout import resolve_parallel
    from trainer.model import complete_model_config

    for counts in (answer[name] for answer in answers):
        seen = {
            kind: sum(count for call, count in counts.items() if kind in call)
            for kind in ("gather", "reducescatter")
        }
        assert seen == {"gather": gathers, "reducescatter": scatters}
    config = make_config(config_tree(Path("unused"), **PLAN[name][1]))
    model = complete_model_config(config.model, config.data, tokenizer_vocab_size=256)
    parallel = resolve_parallel(config.parallel, world_size=4, model=model)
    calls = estimate(config, model, parallel).collectives
    assert (calls.num_all_gathers, calls.num_reduce_scatters) == (gathers, scatters)


def test_mistakes_are_explained(answers: list[dict[str, Any]]) -> None:
    """The mistakes that torch lets pass are named, with what to do, on every rank."""
    for answer in (answer["mistakes"] for answer in answers):
        assert answer["fine"] == answer["same start"] == answer["mesh"] == ""
        assert "built before the model was sharded" in answer["optimizer"]
        assert "shard first" in answer["optimizer"]
        assert "both read sample 1" in answer["same data"]
        assert "rank 3 starts from other weights than rank 1" in answer["other weights"]


def test_one_overflow_is_everybodys(answers: list[dict[str, Any]]) -> None:
    """A rank that overflows makes all skip the step and halve the scale; good steps double it."""
    for answer in (answer["scale"] for answer in answers):
        assert answer["finite"] == [True, False, True, True]
        assert answer["scales"] == [8.0, 4.0, 4.0, 8.0]
        assert answer["gradients"] == [2.0, 2.0, 4.0, 4.0]


def test_whole_model_travels_as_one_torch_file(tmp_path: Path) -> None:
    """FSDP1 exports its weights to one file, and any strategy starts from it."""
    file = tmp_path / "whole.pt"
    export = {"checkpoint": {"every": 0, "final": False, "export_full": str(file)}}
    take = {"checkpoint": {"every": 0, "final": False, "import_full": str(file)}}
    still = {"optim": {"lr": 0.0}, "run": {"steps": 1}}
    other = {"optim": {"lr": 0.0}, "run": {"steps": 1, "seed": 0}}
    jobs = [
        {"name": "export", "config": config_tree(tmp_path / "export", **fsdp1(), **export)},
    ]
    for name, tables in (("fsdp1", fsdp1()), ("fsdp2", {})):
        config = config_tree(tmp_path / name, **tables, **take, **still)
        jobs.append({"name": name, "config": config})
    jobs.append({"name": "fresh", "config": config_tree(tmp_path / "fresh", **other)})
    run_jobs(jobs, num_ranks=2, folder=tmp_path)
    weights = torch.load(file, weights_only=True)
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (128, 32)
    taken = [losses(tmp_path / name)[1] for name in ("fsdp1", "fsdp2")]
    assert taken[0] == pytest.approx(taken[1], rel=1e-5)
    assert taken[0] < losses(tmp_path / "fresh")[1] - 0.05


def test_scaler_is_saved_and_resumed(tmp_path: Path) -> None:
    """An fp16 run goes on with the loss scale that it had; one that was fp32 starts afresh."""
    fp16 = {"precision": {"mode": "fp16", "fp16_growth_steps": 1, "fp16_initial_scale": 2.0}}
    step = str(tmp_path / "whole" / "step-00000002")
    plain = str(tmp_path / "plain" / "step-00000002")
    jobs = [
        {"name": "whole", "config": config_tree(tmp_path / "whole", **fp16)},
        {"name": "plain", "config": config_tree(tmp_path / "plain")},
        {"name": "again", "start_from": step, "config": config_tree(tmp_path / "again", **fp16)},
        {"name": "late", "start_from": plain, "config": config_tree(tmp_path / "late", **fp16)},
    ]
    run_jobs(jobs, num_ranks=2, folder=tmp_path)
    assert _scale(tmp_path / "whole", 2) == 8.0
    assert _scale(tmp_path / "whole", 4) == _scale(tmp_path / "again", 4) == 32.0
    assert _scale(tmp_path / "late", 4) == 8.0


def _scale(run: Path, step: int) -> float:
    from ckptool.torch import Checkpointer

    state = {"scaler": {"scale": 0.0, "good_steps": 0}}
    with Checkpointer(str(run), mode="sync") as checkpointer:
        checkpointer.load(state, step=step)
    return state["scaler"]["scale"]


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    """With TensorBoard installed, the same numbers go there."""
    pytest.importorskip("tensorboard")
    config = config_tree(tmp_path / "run", run={"steps": 2}, metrics={"tensorboard": True})
    run_jobs([{"name": "run", "config": config}], num_ranks=1, folder=tmp_path)
    (file,) = (tmp_path / "run" / "tensorboard").glob("events.out.*")
    assert b"step/loss" in file.read_bytes()


def test_memory_is_as_estimated(tmp_path: Path) -> None:
    """A run reports what it holds after a step beside the estimate, and they agree."""
    jobs = [
        {"name": name, "config": config_tree(tmp_path / name, run={"steps": 2}, **tables)}
        for name, tables in {
            "fsdp2": {},
            "ddp": {"parallel": {"strategy": "ddp"}},
            "bf16": {"precision": {"mode": "bf16"}},
            "fsdp1": fsdp1(),
        }.items()
    ]
    run_jobs(jobs, num_ranks=2, folder=tmp_path)
    for job in jobs:
        lines = (tmp_path / job["name"] / "metrics.jsonl").read_text().splitlines()
        memory = next(row for row in map(json.loads, lines) if row["event"] == "memory")
        assert memory["steady"] == pytest.approx(memory["estimated_steady"], rel=0.1), job["name"]
