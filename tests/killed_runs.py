"""Runs of ``python -m ckptool`` that are killed at a moment that the test chooses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["flags", "kill_when", "killed_inside", "parts_recorded", "start"]

PROJECT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 120.0


def flags(options: Mapping[str, Any]) -> list[str]:
    """Storage options as the command line takes them."""
    pairs = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())
    return [part for pair in pairs for part in ("--storage-option", pair)]


def start(*args: object, **options: Any) -> subprocess.Popen[str]:
    """A command of its own process, its output kept."""
    return subprocess.Popen(
        [sys.executable, "-m", "ckptool", *map(str, args)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def kill_when(process: subprocess.Popen[str], moment: Callable[[], bool]) -> bool:
    """SIGKILL once ``moment`` has come; False when the process ended before."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not moment():
        if process.poll() is not None:
            break
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.0005)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def killed_inside(place: str, args: Sequence[object]) -> None:
    """Run a command that kills itself; ``place`` is Python that arranges it.

    ``place`` may use ``die`` (the kill), ``before`` and ``after``, which wrap a method so that
    it dies instead of its call, or after it, when its arguments say so.
    """
    done = subprocess.run(
        [sys.executable, "-c", _HARNESS + place + _RUN, *map(str, args)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def parts_recorded(journal: Path) -> int:
    """How many finished parts a local journal tells of; -1 before there is one.

    A line that stands twice, written by an interrupt in the middle of a flush, is one part.
    """
    if not journal.exists():
        return -1
    lines = journal.read_bytes().split(b"\n")[:-1]
    return len({line for line in lines if b'"part":' in line})


_HARNESS = """
import os, sys
from ckptool.cli.app import run
def die():
    os.kill(os.getpid(), 9)
def before(owner, name, when=lambda *a: True):
    real = getattr(owner, name)
    def method(*args, **kwargs):
        if when(*args):
            die()
        return real(*args, **kwargs)
    setattr(owner, name, method)
def after(owner, name, when=lambda *a: True):
    real = getattr(owner, name)
    def method(*args, **kwargs):
        result = real(*args, **kwargs)
        if when(*args):
            die()
        return result
    setattr(owner, name, method)
"""
_RUN = "\nsys.exit(run(sys.argv[1:]))\n"
