"""Stopped in the middle: nothing visible, exit 130, and the way on or back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_checkpoint import random_array, rows_of, write_checkpoint

from ckptool.errors import NoCheckpointError, StorageError
from ckptool.operations.export import export
from ckptool.operations.open import open_checkpoint
from ckptool.operations.reshard import reshard
from ckptool.storage import open_store

PROJECT = Path(__file__).resolve().parents[2]

# runs the command line, and dawdles over every part from the third on, so that it can be stopped
DRIVER = """
import itertools, pathlib, sys, time
from ckptool.cli.app import run
from ckptool.storage.local_writers import LocalAssembly
from ckptool.storage.s3_writers import S3Assembly

marker, counter = pathlib.Path(sys.argv[1]), itertools.count(1)

def dawdling(write_part):
    def slow(self, *args, **kwargs):
        receipt = write_part(self, *args, **kwargs)
        if next(counter) >= 3:
            marker.touch()
            time.sleep(0.5)
        return receipt
    return slow

for kind in (LocalAssembly, S3Assembly):
    kind.write_part = dawdling(kind.write_part)
sys.exit(run(sys.argv[2:]))
"""
COMMANDS = {
    "reshard": ["reshard", "SOURCE", "DEST", "--to", "16"],
    "file": ["export", "SOURCE", "DEST/x.safetensors", "--all"],
    "pt": ["export", "SOURCE", "DEST/x.pt", "--all"],
    "folder": ["export", "SOURCE", "DEST", "--all", "--max-file-size", "100KB"],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """1 MiB in sixteen tensors of two chunks."""
    arrays = [random_array((64, 256), "float32", seed=n) for n in range(16)]
    tensors = {f"t{n:02d}": rows_of(a, "float32", 40, 24) for n, a in enumerate(arrays)}
    write_checkpoint(tmp_path / "source", tensors, values={"it": 3})
    return tmp_path / "source"


def arguments(command: str, source: Path, dest: Any) -> list[str]:
    places = {"SOURCE": str(source)}
    line = [places.get(a, a).replace("DEST", str(dest)) for a in COMMANDS[command]]
    return [*line, "--max-memory", "1MiB", "--jobs", "2"]


def stopped(args: list[str], scratch: Path, number: int) -> subprocess.CompletedProcess[str]:
    """Run a command until its third part is written, then send the signal."""
    marker = scratch / "marker"
    marker.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(marker), *args],
        cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not marker.exists():
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def ckptool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptool", *args],
        cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def visible(dest: Path) -> list[str]:
    """Names that a reader of the destination would take for results."""
    names = [str(p.relative_to(dest)) for p in dest.rglob("*") if p.is_file()]
    return sorted(n for n in names if "ckptool-journal" not in n and "ckptool-part" not in n)


def contents(dest: Path) -> dict[str, bytes]:
    return {name: (dest / name).read_bytes() for name in visible(dest) if name != "ckpt.json"}


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("reshard", signal.SIGINT),
        ("reshard", signal.SIGTERM),
        ("reshard", signal.SIGKILL),
        ("file", signal.SIGINT),
        ("file", signal.SIGKILL),
        ("pt", signal.SIGTERM),
        ("folder", signal.SIGKILL),
    ],
)
def test_nothing_is_visible_and_resume_finishes(source, tmp_path, command, number):
    """No result under its final name; a new run is refused; --resume makes the very same bytes."""
    dest = tmp_path / "dest"
    args = arguments(command, source, dest)
    ended = stopped(args, tmp_path, number)
    if number == signal.SIGKILL:
        assert ended.returncode == -number
    else:
        assert ended.returncode == 130, ended.stderr
        assert "Traceback" not in ended.stderr
        assert "--resume" in ended.stderr and "--discard" in ended.stderr
    assert visible(dest) == []
    if command == "reshard":
        with pytest.raises(NoCheckpointError):
            open_checkpoint(str(dest))
    again = ckptool(*args)
    assert again.returncode == 11
    assert "--resume" in again.stderr and "--discard" in again.stderr
    assert visible(dest) == []
    resumed = ckptool(*args, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    whole = tmp_path / "whole"
    assert ckptool(*arguments(command, source, whole)).returncode == 0
    assert contents(dest) == contents(whole)
    assert sorted(p.name for p in dest.rglob("*")) == sorted(p.name for p in whole.rglob("*"))


@pytest.mark.parametrize("command", ["reshard", "file"])
def test_discard_leaves_nothing(source, tmp_path, command):
    """--discard takes back all that an interrupted run left, hidden files included."""
    dest = tmp_path / "dest"
    args = arguments(command, source, dest)
    assert stopped(args, tmp_path, signal.SIGTERM).returncode == 130
    assert any(dest.rglob("*"))
    discarded = ckptool(*args, "--discard")
    assert discarded.returncode == 0, discarded.stderr
    assert [p for p in dest.rglob("*") if p.is_file()] == []
    assert ckptool(*args).returncode == 0


def test_on_s3(source, tmp_path, s3_url, s3_options):
    """The same on S3: no object but the journal, then --discard leaves no upload open."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in s3_options.items()}
    options = [f"--dest-option={k}={text}" for k, text in texts.items()]
    args = [*arguments("reshard", source, f"{s3_url}/new"), *options]
    ended = stopped(args, tmp_path, signal.SIGTERM)
    assert ended.returncode == 130, ended.stderr
    assert s3_options["secret"] not in ended.stderr
    store: Any = open_store(f"{s3_url}/new", options=s3_options)
    assert [i.key for i in store.list() if "ckptool-journal" not in i.key] == []
    assert ckptool(*args, "--discard").returncode == 0
    assert list(store.list()) == []
    assert list(store.list_uploads()) == []


# a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_full_disk_is_found_before_the_work(source, small_disk, name):
    """The space is taken first: one sentence, and neither file nor hidden file stays."""
    with pytest.raises(StorageError) as caught:
        export(str(source), str(small_disk / name), everything=True)
    assert caught.value.exit_code == 12
    assert str(small_disk / name) in caught.value.message
    assert "space" in caught.value.message
    assert [p for p in small_disk.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("command", ["reshard", "folder"])
def test_a_disk_that_fills_up_on_the_way(source, small_disk, command):
    """Several files, of which the last ones do not fit: none is visible, and all can go."""
    dest = small_disk / "new"
    args = arguments(command, source, dest)
    failed = ckptool(*args)
    assert failed.returncode == 12, failed.stderr
    assert "space" in failed.stderr
    assert visible(dest) == []
    if any(dest.rglob("*")):
        assert ckptool(*args, "--discard").returncode == 0
    assert [p for p in small_disk.rglob("*") if p.is_file()] == []


def test_a_disk_without_room_for_the_index(tmp_path, small_disk):
    """Payloads fit and the last small files do not: nothing stays that looks like a result."""
    array = random_array((1000, 4), "uint8", seed=1)
    tensors = {f"t{n:03d}": rows_of(array, "uint8", 1000) for n in range(200)}
    write_checkpoint(tmp_path / "many", tensors)
    ballast = small_disk / "ballast"
    hf = tmp_path / "hf"
    export(str(tmp_path / "many"), str(hf), everything=True, max_file_size=100_000)
    pages = sum(-(-p.stat().st_size // 4096) * 4096 for p in hf.glob("*.safetensors"))
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    assert pages < free
    ballast.write_bytes(bytes(free - pages - 4096 * 3))
    with pytest.raises(StorageError, match="space"):
        export(
            str(tmp_path / "many"), str(small_disk / "hf"), everything=True, max_file_size=100_000
        )
    assert not (small_disk / "hf" / "model.safetensors.index.json").exists()
    ballast.unlink()


def test_a_damaged_source_leaves_nothing(source, tmp_path):
    """Damage that shows in the middle: going on would not help, so all is taken back."""
    path = source / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for name in COMMANDS:
        dest = tmp_path / name
        assert ckptool(*arguments(name, source, dest)).returncode == 3
        assert [p for p in dest.rglob("*") if p.is_file()] == []


def test_reshard_never_commits_over_what_came_meanwhile(source, tmp_path, monkeypatch):
    """A .metadata that another writer put there in the meantime is not replaced."""
    from ckptool.operations import reshard as module

    real = module.commit_checkpoint
    dest = tmp_path / "dest"

    def late(store: Any, **how: Any) -> Any:
        (dest / ".metadata").write_bytes(b"theirs")
        return real(store, **how)

    monkeypatch.setattr(module, "commit_checkpoint", late)
    with pytest.raises(Exception, match="already there") as caught:
        reshard(str(source), str(dest), to=2)
    assert getattr(caught.value, "exit_code", None) == 11
    assert (dest / ".metadata").read_bytes() == b"theirs"
