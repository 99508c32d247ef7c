"""inspect: every entry and file is in the report, and what is odd is noted."""

from __future__ import annotations

import shutil

import pytest
from dcp_writer import edited_metadata, f4_tensors, f4_values, save_plain, write_f4

from ckptool.errors import DamagedError, UnsupportedError
from ckptool.operations.inspect import inspect


@pytest.fixture
def f4(tmp_path):
    return write_f4(tmp_path / "f4")


def test_every_entry_is_reported(f4):
    """Kind, dtype, shape, bytes and files of all tensors and values of a 4-rank save."""
    report = inspect(str(f4))
    entries = {e.key: e for e in report.entries}
    tensors, values = f4_tensors(), f4_values()
    assert entries.keys() == tensors.keys() | values.keys()
    for key, tensor in tensors.items():
        found = entries[key]
        assert (found.kind, found.shape) == ("tensor", tuple(tensor.shape))
        assert f"torch.{found.dtype}" == str(tensor.dtype)
        assert found.num_bytes == tensor.numel() * tensor.element_size()
        assert found.num_chunks >= 1
        assert found.stored_bytes > found.num_bytes
    for key in values:
        assert (entries[key].kind, entries[key].dtype) == ("value", None)
        assert len(entries[key].files) == 1
        assert entries[key].stored_bytes > 0
    assert entries["model.w"].num_chunks == 4
    assert entries["model.w"].path == ("model", "w")
    assert len(entries["model.w"].files) == 4
    assert report.num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    assert report.world_size is None


def test_replicated_and_scalar_tensors_keep_their_shape(f4):
    """A buffer that all ranks hold is stored once, with its own shape; 0-dim stays 0-dim."""
    entries = {e.key: e for e in inspect(str(f4)).entries}
    assert entries["model.buf"].shape == (3,)
    assert entries["model.scalar"].shape == ()


def test_totals_add_up(f4):
    """Groups and dtypes each cover every entry once."""
    report = inspect(str(f4))
    assert {t.name for t in report.by_group} == {"model", "optimizer", "rng", "other"}
    assert sum(t.num_entries for t in report.by_group) == len(report.entries)
    assert sum(t.num_bytes for t in report.by_dtype) == report.num_bytes


def test_files_are_accounted_for(f4):
    """Each byte of a shard is referenced; an orphan and a missing file are told apart."""
    shutil.copy(f4 / "__0_0.distcp", f4 / "__9_0.distcp")
    (f4 / "__3_0.distcp").unlink()
    files = {f.name: f for f in inspect(str(f4)).files}
    assert files["__0_0.distcp"].role == "shard"
    assert files["__0_0.distcp"].referenced_bytes == files["__0_0.distcp"].num_bytes
    assert files["__9_0.distcp"].role == "orphan"
    assert (files["__3_0.distcp"].role, files["__3_0.distcp"].num_bytes) == ("missing", None)
    assert files[".metadata"].role == "metadata"


def test_files_of_an_earlier_save_are_orphans(f4):
    """A save with fewer ranks over one with more: the stale files count for nothing."""
    write_f4(f4, num_ranks=2)
    files = {f.name: f.role for f in inspect(str(f4)).files}
    assert [n for n, role in files.items() if role == "orphan"] == ["__2_0.distcp", "__3_0.distcp"]


def test_match_keeps_the_keys_of_its_globs(f4):
    """``*`` crosses dots, and several globs add up."""
    report = inspect(str(f4), match=["model.*", "it"])
    assert {e.key for e in report.entries} == {
        "model.w", "model.u", "model.one", "model.scalar", "model.buf", "it",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "shape", "word"),
    [
        ("_orig_mod.l1.weight", (2, 2), "_orig_mod"),
        ("l1._checkpoint_wrapped_module.weight", (2, 2), "_checkpoint_wrapped_module"),
        ("weight", (24,), "flattened"),
        ("model._flat_param", (24,), "flattened"),
    ],
)
def test_odd_names_and_shapes_are_noted(tmp_path, key, shape, word):
    """Wrapper names in keys, and weights that FSDP flattened, are called out."""
    import torch

    folder = save_plain({key: torch.ones(shape)}, tmp_path / "c")
    assert [n for n in inspect(str(folder)).notes if word in n]


def test_ordinary_names_are_not_noted(f4):
    """F4 has nothing odd."""
    assert inspect(str(f4)).notes == ()


def test_int_param_ids_are_noted(tmp_path):
    """Raw optimizer state is keyed by numbers, which are no names."""
    import torch

    state = {"optim": {"state": {0: {"exp_avg": torch.ones(2, 2)}}, "param_groups": []}}
    folder = save_plain({**state, "model": {"w": torch.ones(2, 2)}}, tmp_path / "c")
    notes = inspect(str(folder)).notes
    assert len(notes) == 1
    assert "optim.state.0.exp_avg" in notes[0]


def test_a_slice_that_drags_its_storage_is_noted(tmp_path):
    """An item far larger than its chunk is called out, and counted in stored bytes."""
    import torch

    folder = save_plain({"w": torch.ones(2, 2), "big": torch.ones(50_000)}, tmp_path / "c")
    with edited_metadata(folder) as metadata:
        metadata.state_dict_metadata["big"].size = torch.Size([2])
        metadata.state_dict_metadata["big"].chunks[0].sizes = torch.Size([2])
    assert any("more than the tensor has" in n and "'big'" in n for n in inspect(str(folder)).notes)


def test_kinds_are_told(tmp_path):
    """The same key saved as an int, then as a tensor: inspect shows which."""
    import torch

    one = save_plain({"step": 1}, tmp_path / "a")
    two = save_plain({"step": torch.tensor(1)}, tmp_path / "b")
    kinds = [inspect(str(folder)).entries[0].kind for folder in (one, two)]
    assert kinds == ["value", "tensor"]


class Evil:
    """What a hostile pickle would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_hostile_index_runs_no_code(f4, tmp_path):
    """A callable in planner_data is refused by name, and not called."""
    with edited_metadata(f4) as metadata:
        metadata.planner_data["x"] = Evil(str(tmp_path / "pwned"))
    with pytest.raises((DamagedError, UnsupportedError), match="open"):
        inspect(str(f4))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "version"])
def test_missing_fields_are_tolerated(f4, field):
    """An index of another torch version lacks fields; entries are read all the same."""
    with edited_metadata(f4) as metadata:
        metadata.__dict__.pop(field, None)
    report = inspect(str(f4))
    assert len(report.entries) == 19
    if field == "planner_data":
        assert {e.path for e in report.entries} == {None}


def test_an_unknown_class_says_newer_torch(f4):
    """A class that no known torch writes is named, with what to do."""
    data = (f4 / ".metadata").read_bytes()
    assert b"BytesStorageMetadata" in data
    (f4 / ".metadata").write_bytes(data.replace(b"BytesStorageMetadata", b"BytesStorageMetadatX"))
    with pytest.raises(UnsupportedError, match="BytesStorageMetadatX") as caught:
        inspect(str(f4))
    assert caught.value.hint
