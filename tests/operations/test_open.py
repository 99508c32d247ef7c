"""Opening: which URL gives which checkpoint, in how many requests, and what is refused how."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from dcp_writer import edited_metadata, save_plain, write_f4
from recording_store import RecordingStore

from ckptool.errors import DamagedError, NoCheckpointError
from ckptool.formats.ckpt_index import write_index
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_metadata import read_metadata
from ckptool.manifest import Manifest, ObjectFacts, write_manifest
from ckptool.operations import open as open_module
from ckptool.operations.inspect import inspect
from ckptool.operations.open import open_checkpoint
from ckptool.storage import open_store


@pytest.fixture
def f4(tmp_path):
    return write_f4(tmp_path / "run" / "step-00000100")


@pytest.fixture
def recorded(monkeypatch):
    """The stores that opening makes, counted."""
    stores = []

    def opened(url, *, options=None):
        stores.append(RecordingStore(open_store(url, options=options)))
        return stores[-1]

    monkeypatch.setattr(open_module, "open_store", opened)
    return stores


def manifest_for(folder: Path, *, step=100, metadata=None) -> Manifest:
    metadata = metadata or (folder / ".metadata").read_bytes()
    sizes = {p.name: ObjectFacts(p.stat().st_size) for p in folder.glob("*.distcp")}
    return Manifest(
        step=step,
        created="2026-01-31T12:00:00Z",
        metadata=ObjectFacts(len(metadata), crc32(metadata)),
        objects=sizes,
        layout={"world_size": 4},
    )


def test_a_step_takes_one_list_and_one_read(f4, recorded):
    """Opening a checkpoint is one LIST and one GET, and inspect adds none."""
    report = inspect(str(f4))
    assert dict(recorded[0].requests) == {"list": 1, "read": 1}
    assert [(c[0], c[1]) for c in recorded[0].calls] == [("list", ""), ("read", ".metadata")]
    assert report.num_tensors == 15


def test_a_manifest_is_one_read_more(f4, recorded):
    """ckpt.json is read in the same batch as .metadata, and gives the step and the world size."""
    (f4 / "ckpt.json").write_bytes(write_manifest(manifest_for(f4, step=123)))
    report = inspect(str(f4))
    assert dict(recorded[0].requests) == {"list": 1, "read": 2}
    assert (report.step, report.world_size) == (123, 4)
    assert report.findings == ()


def test_a_run_opens_its_newest_committed_step(f4, recorded):
    """The newest by number, not by name or time; an uncommitted newer one is told and passed."""
    run = f4.parent
    shutil.copytree(f4, run / "step-9")
    shutil.copytree(f4, run / "step-00000200")
    (run / "step-00000200" / ".metadata").unlink()
    (run / "logs-300").mkdir()
    (run / "logs-300" / "out.txt").write_text("no checkpoint")
    checkpoint = open_checkpoint(str(run))
    assert (checkpoint.step, checkpoint.url) == (100, str(f4))
    assert any("step-00000200" in note and "not committed" in note for note in checkpoint.notes)
    reads = [c[1] for c in recorded[0].calls if c[0] == "read"]
    assert reads == ["step-00000100/.metadata"]


def test_two_steps_of_one_number_are_an_error(f4):
    """Which of the two is meant cannot be told: both are named."""
    shutil.copytree(f4, f4.parent / "ckpt-100")
    with pytest.raises(DamagedError, match=r"ckpt-100, step-00000100"):
        open_checkpoint(str(f4.parent))


def test_an_unreadable_newest_step_is_loud(f4):
    """An older step is never opened in its place silently."""
    newest = shutil.copytree(f4, f4.parent / "step-200")
    data = (newest / ".metadata").read_bytes()
    (newest / ".metadata").write_bytes(data[:1500])
    with pytest.raises(DamagedError, match=r"newest committed step, step-200, cannot be opened"):
        open_checkpoint(str(f4.parent))


@pytest.mark.parametrize("empty", [False, True])
def test_a_save_that_did_not_complete(f4, empty):
    """No .metadata, or one of 0 bytes: not completed, with what is there and what to do."""
    (f4 / ".metadata").unlink()
    if empty:
        (f4 / ".metadata").touch()
    with pytest.raises(NoCheckpointError, match="was not completed") as caught:
        open_checkpoint(str(f4))
    assert "4 shard files" in caught.value.message
    assert "ckptool ls" in caught.value.hint
    assert caught.value.facts["state"] == "uncommitted"
    with pytest.raises(NoCheckpointError, match="no committed step"):
        open_checkpoint(str(f4.parent))


def test_nothing_there(tmp_path):
    """A path that is not there is said to hold nothing, and is not created."""
    with pytest.raises(NoCheckpointError, match="nothing is there"):
        open_checkpoint(str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], "one per rank of 2"),
        (["rank_0.pt", "rank_1.pt"], "each is incomplete"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["mp_rank_00/model_optim_rng.pt"], "Megatron"),
        (["pytorch_model.bin"], "1 torch.save file"),
        (["a/b/c/.metadata"], "lie deeper"),
        (["notes.txt"], "no .metadata and no .distcp"),
    ],
)
def test_other_formats_are_told_by_their_names(tmp_path, names, what):
    """A folder that is no DCP checkpoint is called what it is."""
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    with pytest.raises(NoCheckpointError, match=what) as caught:
        open_checkpoint(str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": ObjectFacts(17)},
        {"metadata": ObjectFacts(1, 0)},
    ],
)
def test_a_manifest_that_disagrees_is_reported(f4, change):
    """.metadata wins over a manifest of another save, and the finding says so."""
    manifest = dataclasses.replace(manifest_for(f4), **change)
    (f4 / "ckpt.json").write_bytes(write_manifest(manifest))
    checkpoint = open_checkpoint(str(f4))
    assert [(f.code, f.severity, f.file) for f in checkpoint.findings] == [
        ("metadata-differs", "warning", "ckpt.json")
    ]
    assert len(checkpoint.index.tensors) == 15


def test_an_unreadable_manifest_is_reported(f4):
    """A broken sidecar never hides a checkpoint."""
    (f4 / "ckpt.json").write_bytes(b"{")
    checkpoint = open_checkpoint(str(f4))
    assert [f.code for f in checkpoint.findings] == ["metadata-differs"]
    assert "cannot be read" in checkpoint.findings[0].message


def test_files_in_subfolders_are_listed(tmp_path):
    """An index may place items in subfolders: they are not missing then."""
    import torch

    folder = save_plain({"w": torch.ones(3)}, tmp_path / "c1")
    (folder / "deep").mkdir()
    (folder / "deep" / "x.txt").write_text("x")
    assert "deep/x.txt" in open_checkpoint(str(folder)).sizes


def write_index_for(folder):
    """A ckpt.index beside a .metadata, with the payloads of its first tensor."""
    metadata = (folder / ".metadata").read_bytes()
    index = read_metadata(metadata)
    data = write_index(index, payloads={}, metadata=metadata)
    (folder / "ckpt.index").write_bytes(data)


def test_an_index_that_agrees_is_used(f4, recorded):
    """ckpt.index says the same as .metadata, and comes in the same batch of reads."""
    plain = open_checkpoint(str(f4))
    write_index_for(f4)
    checkpoint = open_checkpoint(str(f4))
    assert (checkpoint.form, plain.form) == ("ckpt-index", "dcp")
    assert dict(checkpoint.index.entries) == dict(plain.index.entries)
    assert checkpoint.payloads is not None
    assert dict(recorded[1].requests) == {"list": 1, "read": 2}
    assert checkpoint.findings == ()


def test_an_index_that_disagrees_is_not_used(f4):
    """A ckpt.index of another save is reported, and .metadata read instead."""
    write_index_for(f4)
    shutil.copy(f4 / "ckpt.index", f4.parent / "old")
    with edited_metadata(f4) as metadata:
        del metadata.state_dict_metadata["it"]
    checkpoint = open_checkpoint(str(f4))
    assert checkpoint.form == "dcp"
    assert "it" not in checkpoint.index.entries
    assert [(f.code, f.file) for f in checkpoint.findings] == [("metadata-differs", "ckpt.index")]
    (f4 / "ckpt.index").write_bytes(b"garbage")
    assert [f.file for f in open_checkpoint(str(f4)).findings] == ["ckpt.index"]
