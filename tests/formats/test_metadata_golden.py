"""What real torch releases wrote: each `.metadata` says what that release's own reader found."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from golden_cases import Golden, golden_cases

from ckptool.formats.dcp_fast import FastMetadataMachine
from ckptool.formats.dcp_metadata import merge_rank_local, read_metadata, write_metadata
from ckptool.formats.dcp_objects import MetadataMachine
from ckptool.formats.dcp_reader import _Reader
from ckptool.model import Index, TensorEntry

CASES = list(golden_cases())
WITH_METADATA = [case for case in CASES if (case.path / ".metadata").exists()]
RANK_LOCAL = [case for case in CASES if (case.path / "__0.metadata").exists()]
METADATA_FILES = sorted(path for case in CASES for path in case.path.glob("*.metadata"))


def index_of(case: Golden) -> Index:
    return read_metadata((case.path / ".metadata").read_bytes())


@pytest.mark.parametrize("case", WITH_METADATA, ids=str)
def test_entries_are_what_the_release_loads(case: Golden) -> None:
    """Keys, kinds, dtypes and shapes agree with what the writing release itself loaded."""
    index = index_of(case)
    assert set(index.entries) == set(case.entries)
    for key, entry in index.entries.items():
        row = case.entries[key]
        assert (row["kind"] == "tensor") == isinstance(entry, TensorEntry)
        if isinstance(entry, TensorEntry):
            assert (entry.dtype.name, list(entry.shape)) == (row["dtype"], row["shape"])


@pytest.mark.parametrize("case", WITH_METADATA, ids=str)
def test_chunks_and_paths_are_what_the_release_loads(case: Golden) -> None:
    """Boxes and nested paths agree where the release told them; everything listed is stored."""
    for key, entry in index_of(case).entries.items():
        row = case.entries[key]
        if row.get("path") is not None:
            assert list(entry.path or ()) == row["path"]
        if isinstance(entry, TensorEntry):
            boxes = [[list(c.box.offsets), list(c.box.sizes)] for c in entry.chunks]
            assert boxes == row.get("chunks", boxes)
            assert all(chunk.item is not None for chunk in entry.chunks)
        else:
            assert entry.item is not None


@pytest.mark.parametrize("case", WITH_METADATA, ids=str)
def test_items_lie_in_the_files(case: Golden) -> None:
    """Every item lies inside its shard file; nothing is left over in the index."""
    index = index_of(case)
    assert index.notes == ()
    for entry in index.entries.values():
        chunks = entry.chunks if isinstance(entry, TensorEntry) else [entry]
        for item in (chunk.item for chunk in chunks):
            assert item is not None
            assert item.end <= (case.path / item.file).stat().st_size


@pytest.mark.parametrize("path", METADATA_FILES, ids=str)
def test_steps_over_runs_change_nothing(path: Path) -> None:
    """Reading whole runs at once gives the very index that single opcodes give."""
    data = path.read_bytes()
    fast = _Reader("x").index(FastMetadataMachine(data, what="x").run())
    slow = _Reader("x").index(MetadataMachine(data, what="x").run())
    assert fast == slow


@pytest.mark.parametrize("path", METADATA_FILES, ids=str)
def test_written_again_it_says_the_same_to_torch(path: Path) -> None:
    """Torch's own classes, loaded from what we write, equal those loaded from the original."""
    original = path.read_bytes()
    written = write_metadata(read_metadata(original))
    assert read_metadata(written) == read_metadata(original)
    old, new = pickle.loads(original), pickle.loads(written)
    assert list(new.state_dict_metadata) == list(old.state_dict_metadata)
    for key, entry in old.state_dict_metadata.items():
        if hasattr(entry, "properties"):
            entry.properties.requires_grad = False  # deprecated, and not ours to keep
        assert new.state_dict_metadata[key] == entry
    assert (new.planner_data or {}) == (old.planner_data or {})
    assert new.storage_data.keys() == old.storage_data.keys()
    for key, info in old.storage_data.items():
        transforms = getattr(info, "transform_descriptors", None)
        again = new.storage_data[key]
        assert vars(again) == {
            "relative_path": info.relative_path,
            "offset": info.offset,
            "length": info.length,
            **({"transform_descriptors": transforms} if transforms else {}),
        }


def test_versions_are_told() -> None:
    """The format version is what the release wrote: none before 2.9."""
    versions = {case.name.split("/")[0]: index_of(case).version for case in WITH_METADATA}
    assert versions == {"torch-2.4.1": None, "torch-2.8.0": None, "torch-2.13.0": "1.0.0"}


@pytest.mark.parametrize("case", RANK_LOCAL, ids=str)
def test_rank_local_indexes_merge_into_one(case: Golden) -> None:
    """`__R.metadata` of all ranks give each chunk once, replicas from the lowest rank."""
    files = sorted(case.path.glob("__*.metadata"))
    index = merge_rank_local([read_metadata(f.read_bytes(), name=f.name) for f in files])
    assert index.form == "dcp-rank-local"
    assert set(index.entries) == set(case.entries)
    for key, row in case.tensors.items():
        entry = index.entries[key]
        assert isinstance(entry, TensorEntry)
        num_elements = sum(chunk.box.num_elements for chunk in entry.chunks)
        assert num_elements == entry.num_elements, row
    table = index.entries["table"]
    assert isinstance(table, TensorEntry)
    assert [chunk.item.file for chunk in table.chunks if chunk.item] == ["__0_0.distcp"]
