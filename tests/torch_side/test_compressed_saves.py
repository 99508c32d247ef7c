"""Saves with compress="zstd": what pays is compressed, and every reader gets the same bits."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptool.errors import UsageError
from ckptool.model import TensorEntry, ValueEntry
from ckptool.operations.open import open_checkpoint
from ckptool.operations.validate import validate
from ckptool.torch import Checkpointer, shard_stream


def _state() -> dict[str, Any]:
    """Tensors that compress, that do not, that only begin as if they did, and small ones."""
    torch.manual_seed(3)
    turns = torch.randint(0, 256, (12 << 20,), dtype=torch.uint8)
    turns[: 1 << 20] = 0
    return {
        "zeros": torch.zeros(3000, 1000),
        "noise": torch.randn(1500, 1000),
        "turns": turns,
        "small": torch.zeros(10),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(200_000).reshape(400, 500).t(),
        "order": list(range(100_000)),
        "step": 3,
    }


def _blank() -> dict[str, Any]:
    return {k: torch.full_like(v, 7) if isinstance(v, torch.Tensor) else v
            for k, v in {**_state(), "order": [], "step": 0}.items()}  # fmt: skip


def _same(found: dict[str, Any]) -> bool:
    from torch_side.states import same

    return same(found, _state())


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_pays_is_compressed_and_loads_bit_for_bit(tmp_path: Path, mode: str) -> None:
    """Stock dcp.load and ours get the same bits, validate finds no damage and no unchecked
    tensor, and only entries that get a tenth smaller as a whole are compressed."""
    with Checkpointer(str(tmp_path), mode=mode, compress="zstd") as checkpointer:
        report = checkpointer.save(3, _state())
        checkpointer.wait()
        if mode == "async":
            (report,) = checkpointer.finished()
        found = _blank()
        loaded = checkpointer.load(found)
        assert loaded is not None
        assert loaded.unverified_bytes == 0
        assert _same(found)
    url = str(tmp_path / "step-00000003")
    index = open_checkpoint(url).index
    wrapped = {key for key, entry in index.entries.items() if _transforms(entry)}
    assert wrapped == {"zeros", "turned", "order"}
    plain_bytes = sum(t.nbytes for t in _state().values() if isinstance(t, torch.Tensor))
    assert report.num_bytes < plain_bytes - _state()["zeros"].nbytes
    if find_spec("torch.distributed.checkpoint._extension"):  # torch 2.8 and later
        found = _blank()
        dcp.load(found, checkpoint_id=url)
        assert _same(found)
    checked = validate(url, read_data=True)
    assert checked.is_ok, checked.findings


def _transforms(entry: TensorEntry | ValueEntry) -> tuple[str, ...]:
    item = entry.item if isinstance(entry, ValueEntry) else entry.chunks.item(0)
    return item.transforms if item is not None else ()


def test_an_item_too_large_to_hold_back_is_judged_by_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory stays bounded: what does not fit is sent on, compressed, and loads all the same."""
    monkeypatch.setattr(shard_stream, "_HELD_BYTES", 1 << 20)
    torch.manual_seed(4)
    state = {
        "half": torch.randint(0, 8, (9_000_000,), dtype=torch.uint8),
        "noise": torch.randint(0, 256, (9_000_000,), dtype=torch.uint8),
    }
    state["noise"][: 1 << 18] = 0
    with Checkpointer(str(tmp_path), mode="sync", compress="zstd") as checkpointer:
        checkpointer.save(1, state)
        found = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        checkpointer.load(found)
    assert all(torch.equal(found[key], state[key]) for key in state)
    index = open_checkpoint(str(tmp_path / "step-00000001")).index
    assert [bool(_transforms(index.entries[key])) for key in state] == [True, False]


def test_a_compressed_upload_that_dies_leaves_nothing(tmp_path: Path) -> None:
    """The next start drops what a killed uploader left, as with plain files."""
    with Checkpointer(str(tmp_path), compress="zstd", on_failure="warn") as checkpointer:
        os.environ["CKPTOOL_FAULT"] = "in-part:kill-uploader"
        checkpointer.save(1, _state())
        checkpointer.wait()
        del os.environ["CKPTOOL_FAULT"]
        assert "uploader process" in str(checkpointer.finished()[0].error)
    Checkpointer(str(tmp_path)).close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_compressed_upload_that_fails_is_aborted(tmp_path: Path) -> None:
    """The error is told, nothing is left, and the next save is whole."""
    with Checkpointer(str(tmp_path), compress="zstd", on_failure="warn") as checkpointer:
        os.environ["CKPTOOL_FAULT"] = "in-part:raise"
        checkpointer.save(1, _state())
        checkpointer.wait()
        del os.environ["CKPTOOL_FAULT"]
        assert "was told to fail in-part" in str(checkpointer.finished()[0].error)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        checkpointer.save(1, _state())
        checkpointer.wait()
        assert checkpointer.latest() == 1


def test_another_way_to_compress_is_refused(tmp_path: Path) -> None:
    """A name that is not known is a usage error that says which one is."""
    with pytest.raises(UsageError, match="not one of zstd"):
        Checkpointer(str(tmp_path), compress="gzip")
