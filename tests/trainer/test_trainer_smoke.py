"""The shortest whole life of a run: sharded training, a save, a resume on fewer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from ckptool.operations.export import export
from trainer.config_file import load_config
from trainer.generate import plain_model

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "model.dim": "32",
    "model.num_layers": "2",
    "model.num_heads": "4",
    "data.seq_len": "32",
    "data.global_batch": "8",
    "run.steps": "6",
    "checkpoint.every": "3",
    "checkpoint.keep_last": "4",
}


def _train(folder, num_ranks):
    words = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", "trainer"),
            *(f"--set=run.root={folder}", *words),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def _plain_loss(run, *, step, out):
    """The loss of the exported weights in one plain process, on the batch of a step."""
    export(str(run), str(out))
    plain = plain_model(load_config(None, overrides=[f"{k}={v}" for k, v in SETTINGS.items()]))
    plain.model.load_state_dict(load_file(out))
    return plain.loss(step)


def test_a_run_is_saved_and_resumed_on_fewer_ranks(tmp_path):
    """torchrun as a user types it: FSDP2 on two ranks, then the last step again on one."""
    run = tmp_path / "run"
    _train(run, 2)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["event"] == "step"}
    assert abs(_plain_loss(run, step=6, out=tmp_path / "m.safetensors") - losses[6]) < 0.1
    (run / "step-00000006" / ".metadata").unlink()
    assert "resumed from step 3" in _train(run, 1)
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    repeated = {row["step"]: row["loss"] for row in again[len(rows) :] if row["event"] == "step"}
    assert sorted(repeated) == [4, 5, 6]
    for step, loss in repeated.items():
        assert abs(loss - losses[step]) < 1e-3 * losses[step]
