"""One rank of a test: trains the configurations of a JSON file one after the other."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.process import leave_at_once


def main() -> None:
    plan = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    # Made once: torch remembers a mesh's groups, and would look for those of an earlier job.
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, Any] = {}
    for job in json.loads(plan.read_text()):
        results[job["name"]] = run_job(job, rank)
    Path(f"{plan}.{rank}").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()
    leave_at_once(0)


def run_job(job: dict[str, Any], rank: int) -> dict[str, Any]:
    from trainer.config_file import make_config
    from trainer.train import train

    # The others wait for rank 0 where the training makes its groups.
    if rank == 0 and "start_from" in job:
        step = Path(job["start_from"])
        shutil.copytree(step, Path(job["config"]["run"]["root"], step.name))
    try:
        return {"code": train(make_config(job["config"]))}
    except Exception:  # any reason is the job's answer, and must not be lost
        print(job["name"], traceback.format_exc(), flush=True)
        os._exit(1)  # the other ranks may wait in a collective for ever


if __name__ == "__main__":
    main()
