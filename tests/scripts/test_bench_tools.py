"""The benchmark of export and reshard: its document says what it promises, nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_tools
import pytest
from bench_common import ROOT, Summary
from bench_local import ALL, COPY, TORCH_SAVE, LocalFigures
from bench_remote import CLIENT, EXPORT, RESHARD, RemoteFigures

MIB = 2**20
RATIOS = [
    "export_local_vs_dcp",
    "export_local_vs_cp",
    "export_s3_vs_client",
    "export_read_amplification",
    "reshard_s3_client_share",
    "peak_rss_mib",
]


def summary(name: str, seconds: float, **more: Any) -> Summary:
    facts = {"peak_rss_bytes": 0, "read_bytes": 0, "written_bytes": 0, "output_bytes": 100}
    return Summary(
        name,
        work_seconds=seconds,
        startup_seconds=0.0,
        cpu_seconds=0.0,
        each_seconds=[seconds],
        **(facts | more),
    )


def remote(server: str, *, ours: float, fetched: int) -> RemoteFigures:
    return RemoteFigures(
        server,
        {
            "export": {
                EXPORT: summary(EXPORT, ours, read_bytes=fetched),
                CLIENT: summary(CLIENT, 2.0),
            },
            "reshard 8 to 16": {RESHARD: summary(RESHARD, 1.0)},
        },
        {"export": 0.04, "reshard 8 to 16": 0.18 if server == "seaweedfs" else 0.9},
        {},
    )


def test_each_ratio_is_our_speed_over_theirs() -> None:
    """And of several servers the worst counts; the share is SeaweedFS's."""
    export = {
        ALL: summary(ALL, 2.0, peak_rss_bytes=90 * MIB),
        TORCH_SAVE: summary(TORCH_SAVE, 12.0, peak_rss_bytes=900 * MIB),
        COPY: summary(COPY, 1.5),
    }
    servers = {
        "seaweedfs": remote("seaweedfs", ours=1.0, fetched=3),
        "rgw": remote("rgw", ours=2.5, fetched=101),
    }
    growth = [{"ckptool": {"peak_rss_bytes": 120 * MIB}}]
    found = bench_tools._ratios(LocalFigures(export, {}), servers, growth)
    assert found == dict(zip(RATIOS, [6.0, 0.75, 0.8, 1.01, 0.18, 120.0], strict=True))


def test_what_was_not_measured_is_null() -> None:
    """The keys are there all the same."""
    assert bench_tools._ratios(None, {}, None) == dict.fromkeys(RATIOS)


def test_every_ratio_is_defined() -> None:
    """The document carries a sentence for each."""
    assert list(bench_tools.DEFINITIONS) == RATIOS


@pytest.mark.full
def test_a_small_run_ends_with_its_document(tmp_path: Path) -> None:
    """On the real commands; the scratch folder is empty afterwards."""
    place, scratch = tmp_path / "figures.json", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "scripts/bench_tools.py", "--quick", "--size", "1MiB"]
    command += ["--json", str(place), "--scratch", str(scratch)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    document = json.loads(place.read_text())
    assert document["schema"] == "ckptool.bench_tools/1"
    assert list(document["ratios"]) == RATIOS
    assert all(value > 0 for value in document["ratios"].values())
    assert list(scratch.iterdir()) == []
