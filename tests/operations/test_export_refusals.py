"""export of what is damaged, hostile or of another form: named, and nothing left behind."""

from __future__ import annotations

import pickle
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dcp_writer import edited_metadata, item_of, save_plain
from exports import files, loaded, replace_item, saved_by_torch

from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.operations.export import export

torch = pytest.importorskip("torch")


class Quantized(torch.Tensor):
    """A tensor subclass of some library."""


def test_a_tensor_subclass_is_named(tmp_path):
    """Exit 11: the key and the class, not a wall of traceback."""
    save_plain({"w": torch.ones(4), "v": torch.ones(2)}, tmp_path / "a")
    replace_item(tmp_path / "a", "w", saved_by_torch(torch.ones(4).as_subclass(Quantized)))
    with pytest.raises(UnsupportedError) as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert caught.value.exit_code == 11
    assert caught.value.facts["entry"] == "w"
    assert caught.value.message.startswith("w ")
    assert "Quantized" in caught.value.message or "_rebuild_from_type" in caught.value.message
    assert files(tmp_path) == sorted(f"a/{p.name}" for p in (tmp_path / "a").iterdir())


class Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_hostile_pickles_never_run(tmp_path):
    """Neither the index nor a value is unpickled: named and left out, or refused."""
    marker = tmp_path / "ran"
    save_plain({"w": torch.ones(2), "v": Runs(str(marker))}, tmp_path / "value")
    result = export(str(tmp_path / "value"), str(tmp_path / "x.pt"), everything=True)
    assert list(result.values_left_out) == ["v"]
    assert "open" in result.values_left_out["v"]
    save_plain({"w": torch.ones(2)}, tmp_path / "index")
    with edited_metadata(tmp_path / "index") as metadata:
        metadata.planner_data = {"w": Runs(str(marker))}
    with pytest.raises(CkptoolError) as caught:
        export(str(tmp_path / "index"), str(tmp_path / "y.pt"), everything=True)
    assert caught.value.exit_code == 3
    assert not marker.exists()
    assert not (tmp_path / "y.pt").exists()


def test_an_index_of_an_older_torch(tmp_path):
    """Without planner_data, storage_meta and version: keys stay flat, tensors are whole."""
    save_plain({"a": {"b": torch.ones(2)}, "n": 3}, tmp_path / "a")
    with edited_metadata(tmp_path / "a") as metadata:
        for name in ("planner_data", "storage_meta", "version"):
            metadata.__dict__.pop(name, None)
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)
    export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert set(loaded(tmp_path / "x.pt")) == {"a.b", "n"}


def test_a_class_of_a_newer_torch(tmp_path):
    """An unknown class in the index: named, with the way out; never 'metadata is None'."""
    save_plain({"w": torch.ones(2)}, tmp_path / "a")
    with edited_metadata(tmp_path / "a") as metadata:
        metadata.storage_meta = OrderedDict(x=np.float64(1))
    with pytest.raises(CkptoolError, match="numpy") as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.pt"), everything=True)
    assert caught.value.exit_code in (3, 11)
    assert caught.value.hint


def test_flat_rank_files_are_recognised(tmp_path):
    """A folder of model_world_size_2_rank_*.pt is said to be what it is."""
    (tmp_path / "a").mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / "a" / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(CkptoolError, match="model_world_size_2_rank_0") as caught:
        export(str(tmp_path / "a"), str(tmp_path / "x.pt"))
    assert caught.value.exit_code in (10, 11)


@pytest.fixture
def damaged(stock, tmp_path) -> Path:
    shutil.copytree(stock, tmp_path / "damaged")
    return tmp_path / "damaged"


def refused(source: Path, **how: Any) -> DamagedError:
    """The error of an export; nothing may be left in any form of destination."""
    before = files(source.parent)
    for name in ("x.safetensors", "x.pt", "hf"):
        with pytest.raises(DamagedError) as caught:
            export(str(source), str(source.parent / name), everything=True, **how)
        assert caught.value.exit_code == 3
        assert files(source.parent) == before
    return caught.value


def test_a_missing_chunk(damaged):
    """Stock exports uninitialised memory; here the tensor and the box are named."""
    with edited_metadata(damaged) as metadata:
        entry = metadata.state_dict_metadata["model.w"]
        entry.chunks = [c for c in entry.chunks if tuple(c.offsets) != (6, 0)]
        for index in list(metadata.storage_data):
            if index.fqn == "model.w" and tuple(index.offset) == (6, 0):
                del metadata.storage_data[index]
    error = refused(damaged)
    assert "model.w" in error.message and "[6:9, 0:6]" in error.message
    with edited_metadata(damaged) as metadata:
        metadata.state_dict_metadata["model.w"].chunks = []
    assert "no chunk of 'model.w' is listed; its shape is [10, 6]" in refused(damaged).message


def test_swapped_items_of_other_shapes(damaged):
    """Two entries that point at each other's items are caught by what the items say."""
    with edited_metadata(damaged) as metadata:
        keys = {i.fqn: i for i in metadata.storage_data if i.fqn in ("rng", "model.buf")}
        first, second = (metadata.storage_data[keys[k]] for k in ("rng", "model.buf"))
        metadata.storage_data[keys["rng"]] = second
        metadata.storage_data[keys["model.buf"]] = first
    error = refused(damaged)
    assert error.facts["entry"] == "rng"
    assert "chunk [0:5056] of 'rng' needs 5056 bytes, but its item in" in error.message


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_the_index_disagrees_with_the_payload(damaged, what):
    """int32 over f32, 2-D over 1-D: key, file and byte are named, nothing is cast silently."""
    with edited_metadata(damaged) as metadata:
        entry = metadata.state_dict_metadata["model.buf"]
        if what == "dtype":
            entry.properties.dtype = torch.int32
        else:
            entry.size = entry.chunks[0].sizes = torch.Size([3, 1])
            entry.chunks[0].offsets = torch.Size([0, 0])
            for index in list(metadata.storage_data):
                if index.fqn == "model.buf":
                    info = metadata.storage_data.pop(index)
                    metadata.storage_data[type(index)("model.buf", torch.Size([0, 0]), 0)] = info
    error = refused(damaged)
    path, offset, _ = item_of(damaged, "model.buf")
    assert error.facts == error.facts | {"entry": "model.buf", "file": path.name, "offset": offset}


def test_missing_and_short_files(damaged):
    """Files on other hosts: each one is named with its rank; a short one with its end."""
    (damaged / "__2_0.distcp").unlink()
    (damaged / "__3_0.distcp").unlink()
    data = (damaged / "__1_0.distcp").read_bytes()
    (damaged / "__1_0.distcp").write_bytes(data[: len(data) * 6 // 10])
    error = refused(damaged)
    assert error.facts["files"] == ["__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    for words in ("of rank 1) ends at byte", "of rank 2) is missing", "of rank 3) is missing"):
        assert words in error.message


def test_what_is_not_exported_need_not_be_whole(damaged, tmp_path):
    """A model can be taken out of a checkpoint whose optimizer state is damaged."""
    metadata = pickle.loads((damaged / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "optim.state.w.exp_avg":
            data = bytearray((damaged / info.relative_path).read_bytes())
            data[info.offset + 704] ^= 1
            (damaged / info.relative_path).write_bytes(data)
    export(str(damaged), str(tmp_path / "x.safetensors"))
    with pytest.raises(DamagedError, match=r"optim\.state\.w\.exp_avg"):
        export(str(damaged), str(tmp_path / "y.safetensors"), everything=True)
