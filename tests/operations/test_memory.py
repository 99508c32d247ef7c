"""Memory: what an operation holds is bounded by --max-memory, whatever the checkpoint's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from plain_checkpoint import random_array, rows_of, write_checkpoint
from s3_server import S3Server

from ckptool.dtypes import dtype_named
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import encode_item
from ckptool.formats.dcp_metadata import write_metadata
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry

PROJECT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SHAPE = (4096, 4096)  # 64 MiB of float32
CUTS = {
    "rows": [Box((r, 0), (1024, 4096)) for r in range(0, 4096, 1024)],
    "columns": [Box((0, c), (4096, 1024)) for c in range(0, 4096, 1024)],
}

# Runs the command line without syncing files that go at once; prints the growth of its peak.
# getrusage would not do: a child starts with the peak of the process that it was forked from.
MEASURE = """
import json, os, sys
from ckptool.cli.app import run
import aiobotocore.session, ckptool.cli.export, ckptool.cli.reshard, ml_dtypes, numpy, s3fs

def peak():
    rows = dict(row.split(":", 1) for row in open("/proc/self/status"))
    return int(rows["VmHWM"].split()[0]) * 1024

os.fsync = lambda fd: None
before = peak()
status = run(sys.argv[1:])
print(json.dumps([status, peak() - before]))
"""


@pytest.fixture(params=CUTS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """16 tensors of 64 MiB on four ranks; all zeros, so the files are sparse."""
    dtype = dtype_named("float32")
    folder = tmp_path / "source"
    folder.mkdir()
    crc = crc32(bytes(16 * MIB))
    chunks: list[list[Chunk]] = [[] for _ in range(16)]
    for rank, box in enumerate(CUTS[request.param]):
        framing = encode_item(dtype=dtype, shape=box.sizes)
        name = f"__{rank}_0.distcp"
        with open(folder / name, "wb") as file:
            for rows in chunks:
                rows.append(Chunk(box, Item(name, file.tell(), framing.length)))
                file.write(framing.head)
                file.seek(16 * MIB, 1)
                file.write(framing.tail(crc))
    entries = {}
    for number, rows in enumerate(chunks):
        key = f"model.layer{number}.weight"
        entries[key] = TensorEntry(key, dtype, SHAPE, Chunks.of(rows, num_dims=2))
    (folder / ".metadata").write_bytes(write_metadata(Index(entries)))
    return folder


def growth(*args: str, env: Mapping[str, str] | None = None) -> int:
    """Bytes by which the peak of a command's resident memory grew."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *args, "--quiet"],
        cwd=PROJECT, capture_output=True, text=True, timeout=240, check=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    status, num_bytes = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return int(num_bytes)


def test_a_gigabyte_in_a_budget_of_128_mib(source: Path, tmp_path: Path) -> None:
    """Export, cast export and a merging reshard of 1 GiB grow by less than the budget."""
    commands = [
        ["export", str(source), str(tmp_path / "x.safetensors")],
        ["export", str(source), str(tmp_path / "x.pt"), "--all", "--dtype", "bfloat16"],
        ["reshard", str(source), str(tmp_path / "r"), "--to", "3", "--merge"],
        ["reshard", str(source), str(tmp_path / "r"), "--to", "3", "--merge", "--compress", "zstd"],
    ]
    for command in commands:
        grown = growth(*command, "--max-memory", "128MiB")
        assert grown < 128 * MIB, f"{command[0]}: {grown / MIB:.0f} MiB"
        for path in [*tmp_path.glob("x.*"), *tmp_path.glob("r/*")]:
            path.unlink()
        if (tmp_path / "r").exists():
            (tmp_path / "r").rmdir()


@pytest.mark.parametrize("how", [["--compress", "zstd"], []])
def test_a_small_budget_on_s3(
    tmp_path: Path, s3_server: S3Server, s3_url: str, how: list[str]
) -> None:
    """256 MiB that do not compress, in parts as large as S3 asks: the budget, and its client."""
    array = random_array((4096, 4096), "float32", seed=0)
    tensors = {key: rows_of(array, "float32", *[1024] * 4) for key in "abcd"}
    write_checkpoint(tmp_path / "source", tensors)
    grown = growth(
        "reshard", str(tmp_path / "source"), s3_url, "--to", "2", "--merge",
        "--max-memory", "32MiB", *how, env=s3_server.env(),
    )  # fmt: skip
    assert grown < (32 + 96) * MIB, f"{grown / MIB:.0f} MiB"
