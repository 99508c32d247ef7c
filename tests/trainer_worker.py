"""One rank of a test: trains the configurations of a JSON file one after the other."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    plan = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}
    for job in json.loads(plan.read_text()):
        results[job["name"]] = run_job(job, rank)
    Path(f"{plan}.{rank}").write_text(json.dumps(results))


def run_job(job: dict[str, Any], rank: int) -> dict[str, Any]:
    from trainer.config_file import make_config
    from trainer.train import train

    os.environ["MASTER_PORT"] = str(job["port"])
    # The others wait for rank 0 where the process group is made.
    if rank == 0 and "start_from" in job:
        step = Path(job["start_from"])
        shutil.copytree(step, Path(job["config"]["run"]["root"], step.name))
    try:
        return {"code": train(make_config(job["config"]))}
    except Exception:
        print(job["name"], traceback.format_exc(), flush=True)
        os._exit(1)  # the other ranks may wait in a collective for ever


if __name__ == "__main__":
    main()
