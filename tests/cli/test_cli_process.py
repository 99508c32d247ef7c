"""The command line as its own process: what it loads, and how it takes signals and pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from golden_cases import ROOT as GOLDEN

CHECKPOINT = GOLDEN / "torch-2.13.0" / "fsdp2-4" / "ckpt"
PROJECT = Path(__file__).resolve().parents[2]


def ckptool(*args, **options):
    return subprocess.run(
        [sys.executable, "-m", "ckptool", *map(str, args)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def loaded_by(*args):
    """The modules that one command line loads."""
    probe = (
        "import sys, json; from ckptool.cli.app import run; status = run(sys.argv[1:]);"
        "print('LOADED ' + json.dumps([status, sorted(sys.modules)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *map(str, args)],
        cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    status, modules = json.loads(done.stdout.split("LOADED ")[1])
    assert status == 0, done.stderr
    return set(modules)


HEAVY = {"torch", "s3fs", "fsspec", "botocore", "aiohttp", "asyncio", "pandas", "requests"}


@pytest.mark.parametrize(
    "args",
    [
        ["ls", CHECKPOINT.parent],
        ["inspect", CHECKPOINT, "--tensors", "--files"],
        ["inspect", CHECKPOINT, "--json"],
        ["validate", CHECKPOINT, "--read-data"],
        ["reshard", CHECKPOINT, "DEST", "--to", "3"],
        ["export", CHECKPOINT, "DEST"],
        ["export", CHECKPOINT, "DEST.pt", "--all"],
    ],
    ids=lambda args: " ".join(str(a).split("/")[-1] for a in args),
)
def test_a_local_path_loads_nothing_heavy(args, tmp_path):
    """No command loads torch, and none loads an S3 client for a local path."""
    args = [str(a).replace("DEST", str(tmp_path / "dest")) for a in args]
    assert loaded_by(*args) & HEAVY == set()


def test_help_loads_only_what_it_needs():
    """The group's own help is quick: no numpy is needed to know the version."""
    assert "numpy" not in loaded_by("--version")


def test_python_dash_m():
    """``python -m ckptool`` is the command; the exit status is the process's own."""
    assert ckptool("inspect", CHECKPOINT).returncode == 0
    assert ckptool("inspect", "/nonexistent/path").returncode == 10


def test_a_reader_that_goes_away(tmp_path):
    """``| head`` ends quietly: no traceback, and the command's own exit status."""
    command = f"{sys.executable} -m ckptool inspect --json {CHECKPOINT}; echo $? >{tmp_path}/rc"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | head -c 1"],
        cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert (tmp_path / "rc").read_text().strip() == "0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_with_130(tmp_path, number):
    """Ctrl-C and SIGTERM: one line, 130, no traceback."""
    code = (
        "import sys, time\n"
        "from ckptool.cli import app, inspect\n"
        "def slow(*a, **k):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "inspect.inspect = slow\n"
        "sys.exit(app.run(['inspect', 'x']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip() == "ckptool: interrupted"


def test_a_narrow_encoding(tmp_path):
    """A terminal that cannot show a name gets an escape, not a crash."""
    (tmp_path / "\u00fc\u4e2d-3").mkdir()
    (tmp_path / "\u00fc\u4e2d-3" / ".metadata").write_bytes(b"x")
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = ckptool("ls", tmp_path, env=env)
    assert (done.returncode, "\\u4e2d-3" in done.stdout) == (0, True)
