"""Interrupted runs on a local disk: what is done is kept, and what is left is done, once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from killed_runs import kill_when, killed_inside, parts_recorded, start
from plain_checkpoint import place_of, random_array, rows_of, write_checkpoint

from ckptool.engine.run import How
from ckptool.errors import DamagedError, NoCheckpointError, RefusedError, StorageError
from ckptool.layout import JOURNAL_NAME
from ckptool.operations.export import discard_export, export
from ckptool.operations.ls import COMMITTED, UNCOMMITTED, list_steps
from ckptool.operations.open import open_checkpoint
from ckptool.operations.reshard import discard_reshard, reshard
from ckptool.operations.validate import validate
from ckptool.storage.local import LocalStore

HOW = How(jobs=1, max_memory=256 << 10)
FLAGS = ["--jobs", 1, "--max-memory", HOW.max_memory]
NUM_KILLS = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 MiB in chunks that both a reshard to 3 and an export have to take apart."""
    folder = tmp_path_factory.mktemp("resume") / "step-00000007"
    tensors = {
        f"model.w{i}": rows_of(random_array((512, 1024), "float32", seed=i), "float32", *[128] * 4)
        for i in range(4)
    }
    write_checkpoint(folder, tensors, values={"step": 7})
    return folder


class Job:
    """One operation with its command line, its Python, and what it makes when left alone."""

    def __init__(self, name: str, source: Path, expected: Path) -> None:
        self.name, self.source = name, source
        self.dest = expected.with_name(f"{name}-cut-short")
        self.run(expected)
        self.expected = expected
        self.num_parts = int(self.run(expected.with_name("again"))["num_parts"])

    def args(self, dest: Path) -> list[object]:
        more = ["--to", 3, "--merge"] if self.name == "reshard" else []
        return [self.name, self.source, dest, *more, *FLAGS]

    def run(self, dest: Path, *, resume: bool = False) -> dict[str, Any]:
        if self.name == "reshard":
            options: dict[str, Any] = {"to": 3, "merge": True}
            return reshard(str(self.source), str(dest), resume=resume, how=HOW, **options).to_json()
        return export(str(self.source), str(dest), resume=resume, how=HOW).to_json()

    def discard(self, dest: Path) -> None:
        (discard_reshard if self.name == "reshard" else discard_export)(str(dest))


@pytest.fixture(params=["export", "reshard"])
def job(request, source, tmp_path) -> Job:
    return Job(request.param, source, tmp_path / "expected")


def everything(folder: Path) -> dict[str, bytes]:
    """All files, hidden ones too; the manifest without its time."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    if "ckpt.json" in found:
        manifest = json.loads(found["ckpt.json"])
        manifest["created"] = None
        found["ckpt.json"] = json.dumps(manifest).encode()
    return found


def assert_not_whole(dest: Path) -> None:
    """Nobody takes what is unfinished for a result."""
    with pytest.raises(NoCheckpointError):
        open_checkpoint(str(dest))
    with contextlib.suppress(NoCheckpointError):
        assert [s.state for s in list_steps(str(dest)).steps] == [UNCOMMITTED]
    assert not list(dest.glob("*.safetensors"))


# kills at any moment


def kill_after(job: Job, num_parts: int) -> int:
    """Kill a run that has so many parts, or fewer where it was too quick; how many are done."""
    journal = job.dest / JOURNAL_NAME
    while True:
        process = start(*job.args(job.dest))
        killed = kill_when(process, lambda n=num_parts: parts_recorded(journal) >= n)
        if killed and journal.exists():
            return parts_recorded(journal)
        shutil.rmtree(job.dest)
        num_parts //= 2


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_kill_loses_only_what_was_in_flight(job, number):
    """Kill -9 anywhere: --resume does the missing parts and no other, for the same bytes."""
    num_done = kill_after(job, random.Random(f"{job.name} {number}").randrange(job.num_parts))
    if num_done < job.num_parts:
        assert_not_whole(job.dest)
    report = job.run(job.dest, resume=True)
    assert (report["num_parts"], report["num_parts_kept"]) == (job.num_parts, num_done)
    assert everything(job.dest) == everything(job.expected)


PLACES = {
    "journal-made": "before(LocalStore, 'open_assembly')",
    "file-begun": "after(LocalStore, 'open_assembly')",
    "in-a-put": "before(local, 'publish')",
    "before-the-first-publish": "before(LocalAssembly, 'commit')",
    "published-not-recorded": "after(LocalAssembly, 'commit')",
    "one-published": "after(Journal, 'published')",
    "all-published": "after(Journal, 'published', lambda self, index: index == LAST)",
    "before-the-index": "before(LocalStore, 'put', lambda self, key, *a: key == 'ckpt.index')",
    "before-the-manifest": "before(LocalStore, 'put', lambda self, key, *a: key == 'ckpt.json')",
    "before-the-metadata": "before(LocalStore, 'put', lambda self, key, *a: key == '.metadata')",
    "in-the-metadata": "before(local, 'publish', lambda hidden, path: path.endswith('.metadata'))",
    "committed": "before(Journal, 'remove')",
}
IMPORTS = """
from ckptool.engine.journal import Journal
from ckptool.storage import local
from ckptool.storage.local import LocalStore
from ckptool.storage.local_writers import LocalAssembly
"""
ONLY_RESHARD = (
    *("before-the-index", "before-the-manifest"),
    *("before-the-metadata", "in-the-metadata"),
)
TURNS = [
    pytest.param(job, place, id=f"{job}-{place}")
    for place in PLACES
    for job in ("export", "reshard")
    if job == "reshard" or place not in ONLY_RESHARD
]


def kill_at(job: Job, place: str) -> None:
    last = 2 if job.name == "reshard" else 0
    killed_inside(f"{IMPORTS}\nLAST = {last}\n{PLACES[place]}", job.args(job.dest))


@pytest.mark.parametrize(("job", "place"), TURNS, indirect=["job"])
def test_a_kill_at_each_turn(job, place):
    """Whatever the run was about to do, --resume ends in the same bytes and leaves nothing else."""
    kill_at(job, place)
    if place == "in-a-put":  # the journal itself is not there yet: nothing was begun
        assert job.run(job.dest)["num_parts"] == job.num_parts
        return
    if place != "committed" and job.name == "reshard":
        assert_not_whole(job.dest)
    report = job.run(job.dest, resume=True)
    started = place in ("journal-made", "file-begun")
    assert report["num_parts_kept"] == (0 if started else job.num_parts)
    assert everything(job.dest) == everything(job.expected)


@pytest.mark.parametrize(
    ("job", "place"), [t for t in TURNS if t.values[1] != "in-a-put"], indirect=["job"]
)
def test_discard_leaves_nothing(job, place):
    """Wherever it was killed: no file is left, hidden or not, and a new run is not refused."""
    kill_at(job, place)
    job.discard(job.dest)
    assert everything(job.dest) == {}
    job.run(job.dest)
    assert everything(job.dest) == everything(job.expected)


def test_a_single_file_beside_others(source, tmp_path):
    """One file's run is taken up or discarded beside files that are not its own."""
    other, hidden = tmp_path / "model.safetensors.bak", tmp_path / f".other.{'0' * 16}.ckptool-part"
    other.write_bytes(b"mine")
    hidden.write_bytes(b"somebody's upload")
    dest = tmp_path / "model.safetensors"
    args = ["export", source, dest, *FLAGS]
    for _ in range(2):
        killed_inside(f"{IMPORTS}\nbefore(LocalAssembly, 'commit')", args)
        discard_export(str(dest))
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([other.name, hidden.name])
    killed_inside(f"{IMPORTS}\nafter(LocalStore, 'open_assembly')", args)
    export(str(source), str(dest), how=HOW, resume=True)
    names = [dest.name, other.name, hidden.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


# what is refused


@pytest.fixture
def half(job) -> Job:
    """A job that was killed before it published anything."""
    killed_inside(f"{IMPORTS}\nbefore(LocalAssembly, 'commit')", job.args(job.dest))
    return job


def test_without_a_flag_it_is_refused(half):
    """A run that finds an interrupted one says how to go on, and touches nothing."""
    before = everything(half.dest)
    process = start(*half.args(half.dest))
    err = process.communicate()[1]
    assert process.returncode == 11
    assert "--resume" in err and "--discard" in err and "interrupted" in err
    assert everything(half.dest) == before


def test_another_plan_is_refused(half, tmp_path):
    """A journal of another run is named, with what it was asked for, and nothing is touched."""
    before = everything(half.dest)
    other = tmp_path / "other"
    shutil.copytree(half.source, other)
    calls = {
        "reshard": [
            lambda: reshard(str(half.source), str(half.dest), to=2, resume=True, how=HOW),
            lambda: reshard(str(half.source), str(half.dest), to=3, resume=True, how=HOW),
            lambda: reshard(str(other), str(half.dest), to=3, merge=True, resume=True, how=HOW),
            lambda: export(str(half.source), str(half.dest), resume=True, how=HOW),
        ],
        "export": [
            lambda: export(str(half.source), str(half.dest), dtype="bf16", resume=True, how=HOW),
            lambda: export(str(other), str(half.dest), resume=True, how=HOW),
        ],
    }[half.name]
    for call in calls:
        with pytest.raises(RefusedError, match="belongs to another run") as caught:
            call()
        assert half.name in str(caught.value) and str(half.source) in str(caught.value)
    assert everything(half.dest) == before


def test_nothing_to_take_up(job):
    """--resume and --discard where nothing was interrupted are refused."""
    with pytest.raises(RefusedError, match="no interrupted run"):
        job.run(job.dest, resume=True)
    with pytest.raises(RefusedError, match="no interrupted run"):
        job.discard(job.dest)
    with pytest.raises(RefusedError, match="no interrupted run"):
        job.discard(job.expected)
    assert everything(job.expected)


def test_an_unreadable_journal(half):
    """A journal of another version is named, and nothing is touched."""
    (half.dest / JOURNAL_NAME).write_bytes(b'{"schema": "ckptool.journal/99"}\n')
    for call in (lambda: half.run(half.dest, resume=True), lambda: half.discard(half.dest)):
        with pytest.raises(DamagedError, match="journal"):
            call()


def test_a_line_that_was_cut_short(half):
    """A record that a crash tore is as if it had not been written, also the one after it."""
    journal = half.dest / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes()[:-9])
    killed_inside(
        f"{IMPORTS}\nbefore(LocalAssembly, 'commit')", [*half.args(half.dest), "--resume"]
    )
    report = half.run(half.dest, resume=True)
    assert report["num_parts_kept"] == half.num_parts
    assert everything(half.dest) == everything(half.expected)


# what is kept is proved


def test_kept_parts_are_proved(half):
    """A part that was altered since is written again."""
    (hidden, *_) = half.dest.glob(".*.ckptool-part")
    data = bytearray(hidden.read_bytes())
    data[len(data) // 2] ^= 1
    hidden.write_bytes(data)
    report = half.run(half.dest, resume=True)
    assert report["num_parts_kept"] == half.num_parts - 1
    assert everything(half.dest) == everything(half.expected)


def test_a_file_that_is_gone_is_begun_again(half):
    """Parts of a file that somebody removed are written again; nothing else is."""
    (hidden, *_) = half.dest.glob(".*.ckptool-part")
    hidden.unlink()
    report = half.run(half.dest, resume=True)
    assert report["num_parts_kept"] < half.num_parts
    assert everything(half.dest) == everything(half.expected)


@pytest.mark.parametrize("when", ["first", "resumed"])
def test_a_damaged_source_leaves_nothing(source, tmp_path, when):
    """Going on would not help: every file goes, the journal too."""
    broken, dest = tmp_path / "broken", tmp_path / "dest"
    shutil.copytree(source, broken)
    index = open_checkpoint(str(broken)).index
    file, start_byte, num_bytes = place_of(broken, index, "model.w2", 3)
    good = (broken / file).read_bytes()
    bad = bytearray(good)
    bad[start_byte + num_bytes - 1] ^= 4
    if when == "first":
        (broken / file).write_bytes(bad)
    else:
        two = "seen = []\nafter(Journal, 'finished', lambda *a: seen.append(1) or len(seen) == 9)"
        killed_inside(f"{IMPORTS}\n{two}", ["reshard", broken, dest, "--to", 3, *FLAGS])
        (broken / file).write_bytes(bad)
    with pytest.raises(DamagedError, match=r"model\.w2"):
        reshard(str(broken), str(dest), to=3, how=HOW, resume=when == "resumed")
    assert everything(dest) == {}


def test_a_failure_before_the_first_part_leaves_nothing(job, monkeypatch):
    """Where nothing was done, nothing is worth keeping."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(LocalStore, "read_into", fail)
    monkeypatch.setattr("ckptool.storage.local_writers.LocalAssembly.write_part", fail)
    with pytest.raises(StorageError, match="the disk is gone"):
        job.run(job.dest)
    assert everything(job.dest) == {}


def test_a_failure_later_keeps_what_is_done(job, monkeypatch):
    """A write that fails names both next commands; what was done by then is kept."""
    from ckptool.storage.local_writers import LocalAssembly

    real, seen = LocalAssembly.write_part, []

    def fail_at_9(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        seen.append(number)
        if len(seen) == 9:
            raise StorageError("the disk is full", hint="free some space")
        return real(self, number, *args, **kwargs)

    monkeypatch.setattr(LocalAssembly, "write_part", fail_at_9)
    with pytest.raises(StorageError, match=r"free some space; .*--resume.*--discard"):
        job.run(job.dest)
    assert job.run(job.dest, resume=True)["num_parts_kept"] == 8
    assert everything(job.dest) == everything(job.expected)


# signals


def assert_session_ends(session: int) -> None:
    """No process of a session that was started for a command outlives it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("worker processes outlived their parent")


@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_is_done(source, tmp_path, number, executor):
    """Ctrl-C and SIGTERM: 130, both next commands, the journal kept, no process left behind."""
    dest, journal = tmp_path / "dest", tmp_path / "dest" / JOURNAL_NAME
    args = ["export", source, dest, *FLAGS[2:], "--jobs", 2, "--executor", executor]
    process = start(*args, start_new_session=True)
    deadline = time.monotonic() + 60
    while parts_recorded(journal) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.0005)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "--resume" in err and "--discard" in err and str(dest) in err
    assert "Traceback" not in err
    assert_session_ends(process.pid)
    num_done = parts_recorded(journal)
    report = export(str(source), str(dest), how=HOW, resume=True).to_json()
    assert report["num_parts_kept"] == num_done >= 3


def test_a_killed_parent_leaves_no_children(source, tmp_path):
    """Kill -9 of the parent: its worker processes end on their own."""
    dest, journal = tmp_path / "dest", tmp_path / "dest" / JOURNAL_NAME
    args = ["export", source, dest, *FLAGS[2:], "--jobs", 2, "--executor", "processes"]
    process = start(*args, start_new_session=True)
    assert kill_when(process, lambda: parts_recorded(journal) >= 2)
    assert_session_ends(process.pid)


# how others see a journal


def test_a_journal_of_a_committed_checkpoint_is_an_orphan(source, tmp_path):
    """Killed after the commit: the checkpoint opens and validates, and a note names the journal."""
    dest = tmp_path / "step-00000007"
    args = ["reshard", source, dest, "--to", 3, *FLAGS]
    killed_inside(f"{IMPORTS}\nbefore(Journal, 'remove')", args)
    report = validate(str(dest), read_data=True)
    assert report.is_ok
    assert [f.file for f in report.findings if f.code == "orphan"] == [JOURNAL_NAME]
    steps = list_steps(str(tmp_path)).steps
    assert [s.name for s in steps if s.state == COMMITTED] == [dest.name]
    discard_reshard(str(dest))
    assert everything(dest) == {}
