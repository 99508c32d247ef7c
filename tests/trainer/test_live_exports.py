"""A run hands its model to inference: the export is that of the checkpoint, and it generates."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, run_jobs
from trainer_jobs import LAYOUTS, config_tree

from ckptool.operations.export import export
from ckptool.operations.ls import list_steps
from trainer.config_file import make_config
from trainer.generate import plain_model

STEP = "step-00000004"
NAMES = ("fsdp2", "hsdp-tp", "fsdp1-tp", "ddp")


def _checkpoint(name: str) -> dict[str, Any]:
    """Two exports while the training goes on, or one that stops it, cast."""
    if name in ("fsdp2", "ddp"):
        return {"every": 2, "export_every": 2}
    return {"every": 2, "export_at_end": True, "export_mode": "stop", "export_dtype": "bf16"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    jobs = [
        {
            "name": name,
            "config": config_tree(
                folder / name,
                model={"tied": name == "hsdp-tp"},
                checkpoint=_checkpoint(name),
                **{k: v for k, v in LAYOUTS[name].items() if k not in ("model", "checkpoint")},
            ),
        }
        for name in NAMES
    ]
    results = run_jobs(jobs, num_ranks=4, folder=folder)
    assert {job["code"] for result in results for job in result.values()} == {0}
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_export_is_that_of_the_checkpoint(runs: Path, tmp_path: Path, name: str) -> None:
    """The weights are, byte for byte, what ``ckptool export`` makes of the saved step."""
    run = runs / name
    steps = ("step-00000002", STEP) if name in ("fsdp2", "ddp") else (STEP,)
    assert sorted(path.name for path in (run / "exports").iterdir()) == sorted(steps)
    for step in steps:
        place = run / "exports" / step
        assert sorted(p.name for p in place.iterdir()) == ["config.json", "model.safetensors"]
        dtype = _checkpoint(name).get("export_dtype")
        export(str(run / step), str(tmp_path / step), dtype=dtype)
        assert (place / "model.safetensors").read_bytes() == (
            tmp_path / step / "model.safetensors"
        ).read_bytes()


def test_exports_are_no_steps(runs: Path) -> None:
    """Exports in the run's folder are not taken for checkpoints, and the metrics tell of them."""
    assert [row.number for row in list_steps(str(runs / "fsdp2")).steps] == [2, 4]
    text = (runs / "fsdp2" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    exports = [line for line in lines if line["event"] == "export"]
    assert [line["step"] for line in exports] == [2, 4]
    assert all(line["mode"] == "snapshot" and line["num_bytes"] for line in exports)


@pytest.mark.parametrize("name", ["fsdp2", "hsdp-tp"])
def test_transformers_generates_the_same_tokens(runs: Path, name: str) -> None:
    """``transformers`` and plain safetensors load the folder, and the model says the same."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    place = runs / name / "exports" / STEP
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    tree = config_tree(runs / name, model={"tied": name == "hsdp-tp"})
    plain = plain_model(make_config(tree))
    weights = {key: value.float() for key, value in load_file(place / "model.safetensors").items()}
    plain.model.load_state_dict(weights)
    plain.model.model.rotary.reset_buffers(torch.device("cpu"))  # type: ignore[union-attr]
    prompt = b"def main("
    ids = torch.tensor([list(prompt)])
    said = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    text = plain.continue_text(prompt.decode(), num_tokens=20)
    assert bytes(said[0].tolist()).decode(errors="replace") == text
    assert json.loads((place / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_signal_asks_for_an_export(tmp_path: Path) -> None:
    """SIGUSR2 on any rank exports one step on all, and the training goes on to its end."""
    root = tmp_path / "run"
    pairs = (
        f"run.root={root}", "run.device=cpu", "run.steps=100000", "model.dim=32",
        "model.num_layers=2", "model.num_heads=4", "data.seq_len=32", "data.global_batch=8",
        "checkpoint.every=0", "run.process_timeout_s=20",
    )  # fmt: skip
    command = ["-m", "trainer", *(part for pair in pairs for part in ("--set", pair))]
    with Ranks(command, num_ranks=2) as ranks:
        _wait_for(ranks, "step 3 ")
        ranks.signal(signal.SIGUSR2, ranks=[1])
        _wait_for(ranks, "exported step")
        ranks.signal(signal.SIGUSR2)
        deadline = time.monotonic() + 60
        while len(list((root / "exports").glob("*/model.safetensors"))) < 2:
            assert time.monotonic() < deadline, ranks.output(0)
            time.sleep(0.05)
        ranks.signal(signal.SIGTERM)
        assert [end.code for end in ranks.wait(timeout_s=60)] == [75, 75]
    assert len(list((root / "exports").iterdir())) == 2


def _wait_for(ranks: Ranks, text: str) -> None:
    deadline = time.monotonic() + 90
    while text not in ranks.output(0):
        assert time.monotonic() < deadline, ranks.output(0)
        assert all(process.poll() is None for process in ranks.processes), ranks.output(0)
        time.sleep(0.02)
