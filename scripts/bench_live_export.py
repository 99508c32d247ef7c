"""A live model -> one safetensors file: ours, and torch's full state dict, in one run.

All contenders take turns in one group of ranks (bench_live_export_ranks.py), write to the same
folder, and have what they wrote on the disk when their time is taken. ``ratios``: the speed is
ours / theirs; memory is of the rank with the most, beyond staging buffers; null where this
machine cannot measure one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from typing import Any

from bench_common import machine, measure, parse_size, print_table, python, text_size, write_json
from bench_ranks import rank_parser, say

SCHEMA = "ckptool.bench_live_export/1"
RATIOS = ("live_vs_full_state_dict", "host_growth_mib", "gpu_growth_mib", "step_slowdown")
MIB = 1 << 20


def main() -> None:
    arguments = rank_parser("scripts/bench_live_export", measured="weights").parse_args()
    on_gpu = arguments.device == "cuda"
    default = "8.8GiB" if on_gpu else "1GiB"
    num_bytes = parse_size(arguments.size or ("128MiB" if arguments.quick else default))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        say(f"exporting {text_size(num_bytes)} from {arguments.ranks} ranks")
        spec = {
            "num_ranks": arguments.ranks,
            "device": arguments.device,
            "model_bytes": num_bytes,
            "num_rounds": 1 if arguments.quick else 3,
            "num_steps": 8 if arguments.quick else 30,
            "folder": scratch,
        }
        run = measure(python("scripts/bench_live_export_ranks.py", json.dumps(spec)))
    result = json.loads(run.stdout.strip().splitlines()[-1])
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine(),
        "device": arguments.device,
        "num_ranks": arguments.ranks,
        **result,
        "ratios": _ratios(result),
    }
    _print(document)
    if arguments.json:
        write_json(arguments.json, document)


def _ratios(result: Mapping[str, Any]) -> dict[str, float | None]:
    cases, steps = result["cases"], result["steps"]
    ours = [case for name, case in cases.items() if name.startswith("live")]
    stopped, theirs = cases["live, stop"]["seconds"], cases["full state dict"]["seconds"]
    gpu = [case["gpu_growth_bytes"] for case in ours if case["gpu_growth_bytes"] is not None]
    return {
        "live_vs_full_state_dict": statistics.median(theirs) / statistics.median(stopped),
        "host_growth_mib": max(case["host_growth_bytes"] for case in ours) / MIB,
        "gpu_growth_mib": max(gpu) / MIB if gpu else None,
        "step_slowdown": steps and steps["slowdown"],
    }


def _print(document: Mapping[str, Any]) -> None:
    num_bytes = document["file_bytes"]
    rows = []
    for name, case in document["cases"].items():
        middle = statistics.median(case["seconds"])
        rows.append(
            {
                "contender": name,
                "seconds": f"{middle:.2f}",
                "GiB/s": f"{num_bytes / middle / 2**30:.2f}",
                "spread": f"{min(case['seconds']):.2f}-{max(case['seconds']):.2f}",
                "host memory": text_size(case["host_growth_bytes"]),
                "staging": text_size(case["staged_bytes"]),
                "GPU memory": text_size(case["gpu_growth_bytes"]),
            }
        )
    print_table(f"{text_size(num_bytes)} from {document['num_ranks']} {document['device']}s", rows)
    if document["steps"]:
        rows = [
            {"steps": name, "mean ms": f"{1000 * row['mean_s']:.1f}", "number": f"{row['count']}"}
            for name, row in document["steps"]["phases"].items()
        ]
        print_table("training meanwhile", rows)
    rows = [
        {"ratio": name, "value": "-" if value is None else f"{value:.3f}"}
        for name, value in document["ratios"].items()
    ]
    print_table("ratios", rows)


if __name__ == "__main__":
    main()
