"""Trains every layout on the GPUs of one machine, and measures it beside the estimate.

    scripts/bench_layouts fsdp2            FSDP2, tensor parallel, DDP: each trained and resumed
    scripts/bench_layouts fsdp1            FSDP1 with its wrap policies and strategies
    scripts/bench_layouts mfu              a 2 B model beside a bare loop
    scripts/bench_layouts show             the table of what was measured so far

One torchrun for each group; every row is appended to ``--out`` as soon as it is known, so that
a run that is cut short keeps what it has. Each group fits ten minutes on two H200.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("fsdp2", "fsdp1", "mfu")


def main() -> int:
    options = _parser().parse_args()
    out = Path(options.out).resolve()
    code = 0
    if options.group != "show":
        code = _run(options, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for line in table(rows):
        print(line)
    return code


def _run(options: argparse.Namespace, out: Path) -> int:
    out.parent.mkdir(parents=True, exist_ok=True)
    worker = ROOT / "scripts" / "bench_layouts_rank.py"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.gpus), str(worker), options.group),
        *("--out", str(out), "--work", options.work, "--device", options.device),
    ]
    if options.only:
        command += ["--only", options.only]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "4" if options.device == "cuda" else "1",
    }
    return subprocess.run(command, env=environment, check=False).returncode


def table(rows: list[dict[str, Any]]) -> list[str]:
    """What was measured, for people; a later row of one name replaces an earlier one."""
    latest = {(row["group"], row["name"]): row for row in rows}
    lines = [
        f"{'layout':<28}{'loss':>8}{'resumed':>10}{'tokens/s':>11}{'MFU':>7}"
        f"{'steady MiB':>12}{'estimate':>10}{'ratio':>7}{'peak MiB':>10}{'save s':>8}"
    ]
    for row in latest.values():
        if row.get("error"):
            lines.append(f"{row['name']:<28}failed: {row['error']}")
            continue
        lines.append(
            f"{row['name']:<28}{_show(row, 'loss', '.4f'):>8}{row.get('resumed', ''):>10}"
            f"{_show(row, 'tokens_per_s', ',.0f'):>11}{_show(row, 'mfu', '.1%'):>7}"
            f"{_mib(row, 'steady'):>12}{_mib(row, 'estimated_steady'):>10}"
            f"{_ratio(row):>7}{_mib(row, 'peak'):>10}{_show(row, 'save_s', '.2f'):>8}"
        )
    return lines


def _show(row: dict[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return "" if value is None else format(value, form)


def _mib(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else f"{value / 2**20:,.0f}"


def _ratio(row: dict[str, Any]) -> str:
    if not row.get("steady") or not row.get("estimated_steady"):
        return ""
    return f"{row['steady'] / row['estimated_steady']:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("group", choices=(*GROUPS, "show"))
    parser.add_argument("--gpus", type=int, default=2, help="ranks to start (default 2)")
    parser.add_argument("--out", default="bench_layouts.jsonl", help="where rows are appended")
    parser.add_argument("--work", default="/tmp/bench_layouts", help="a folder for the runs")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny model, to try it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
