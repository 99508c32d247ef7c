"""ls: states from names and sizes alone."""

from __future__ import annotations

import pytest
from recording_store import RecordingStore

from ckptool.errors import NoCheckpointError
from ckptool.operations import ls as ls_module
from ckptool.operations.ls import list_steps
from ckptool.storage import open_store


def make(folder, files):
    folder.mkdir(parents=True)
    for name, size in files.items():
        (folder / name).write_bytes(b"x" * size)


@pytest.fixture
def run(tmp_path):
    shards = {"__0_0.distcp": 10, "__1_0.distcp": 20}
    make(tmp_path / "step-00000010", {**shards, ".metadata": 5, "ckpt.json": 1})
    make(tmp_path / "step-00000002", {**shards, ".metadata": 5})
    make(tmp_path / "step-00000030", shards)
    make(tmp_path / "step-00000031", {**shards, ".metadata": 0})
    make(tmp_path / "step-00000032", {**shards, "ckpt.json": 1})
    make(tmp_path / "step-00000033", {**shards, "__0.metadata": 5, "__1.metadata": 5})
    make(tmp_path / "last", {".metadata": 5})
    make(tmp_path / "logs-99", {"events": 5})
    (tmp_path / "metrics.jsonl").write_text("{}")
    return tmp_path


def test_states_sizes_and_order(run):
    """Steps come by number; folders that are no checkpoint are passed over."""
    steps = list_steps(str(run)).steps
    assert [(s.number, s.state, s.num_bytes, s.num_files) for s in steps] == [
        (None, "committed", 5, 1),
        (2, "committed", 35, 3),
        (10, "committed", 36, 4),
        (30, "uncommitted", 30, 2),
        (31, "uncommitted", 30, 3),
        (32, "half-deleted", 31, 3),
        (33, "rank-local", 40, 4),
    ]
    assert all(s.modified is not None and s.modified.tzinfo is not None for s in steps)


def test_one_listing_and_nothing_read(run, monkeypatch):
    """ls reads no object: garbage in .metadata does not matter to it."""
    stores = []

    def opened(url, *, options=None):
        stores.append(RecordingStore(open_store(url, options=options)))
        return stores[-1]

    monkeypatch.setattr(ls_module, "open_store", opened)
    list_steps(str(run))
    assert dict(stores[0].requests) == {"list": 1}


def test_a_checkpoint_is_listed_alone(run):
    """A root that is itself a checkpoint is its own only step."""
    result = list_steps(str(run / "step-00000010"))
    assert result.is_checkpoint
    assert [(s.name, s.number) for s in result.steps] == [("step-00000010", 10)]


def test_the_same_number_twice_is_a_problem(run):
    """Two children with one number are listed and told."""
    make(run / "epoch1-step10", {".metadata": 5})
    result = list_steps(str(run))
    assert result.problems == ("step 10 is there 2 times: epoch1-step10, step-00000010",)


def test_nothing_to_list(tmp_path):
    """A root without steps is an error, a missing one too."""
    make(tmp_path / "a", {"x": 1})
    for url in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NoCheckpointError):
            list_steps(str(url))


def test_names_with_glob_characters_are_literal(tmp_path):
    """``[``, ``*`` and ``?`` in a run's name mean themselves."""
    make(tmp_path / "a[1]*" / "step-1", {".metadata": 5})
    assert [s.name for s in list_steps(str(tmp_path / "a[1]*")).steps] == ["step-1"]
