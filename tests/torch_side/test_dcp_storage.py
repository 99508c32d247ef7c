"""Our storage writer and reader under torch's own functions."""

from __future__ import annotations

import glob
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch_side import states
from torch_side.states import pattern

from ckptool.errors import DamagedError, NotEmptyError, StorageError
from ckptool.torch import CkptoolReader, CkptoolWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _state(*, seed: int = 1) -> dict[str, Any]:
    tensors = {
        name: pattern(shape, dtype, seed=seed) for name, (shape, dtype) in states.PLAIN.items()
    }
    return {
        "model": {**tensors, "turned": pattern((40, 60), torch.float32, seed=seed).t()},
        "optim": {
            "param_groups": [{"lr": 0.5, "params": ["w"]}],
            "state": {"w": {"m": pattern((9,), torch.bfloat16)}},
        },
        "step": 12,
    }


def _empty() -> dict[str, Any]:
    state = _state(seed=0)
    state["step"] = 0
    return state


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/run/step-12"


def test_stock_reads_what_our_writer_wrote(url: str) -> None:
    """``dcp.save`` with our writer, ``dcp.load`` without it: the same bits."""
    dcp.save(_state(), storage_writer=CkptoolWriter(url))
    target = _empty()
    dcp.load(target, checkpoint_id=url.removeprefix("file://"))
    assert states.same(target, _state())


def test_our_reader_reads_what_stock_wrote(tmp_path: Path) -> None:
    """``dcp.load`` with our reader gets the bits of a stock ``dcp.save``, and counts them."""
    dcp.save(_state(), checkpoint_id=tmp_path / "step-1")
    target, reader = _empty(), CkptoolReader(tmp_path / "step-1")
    dcp.load(target, storage_reader=reader)
    assert states.same(target, _state())
    assert reader.count.needed < reader.count.fetched


def test_async_save_with_our_writer(url: str) -> None:
    """``dcp.async_save`` commits through our writer too."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.async_save(_state(), storage_writer=CkptoolWriter(url)).result()
    finally:
        dist.destroy_process_group()
    target = _empty()
    dcp.load(target, storage_reader=CkptoolReader(url))
    assert states.same(target, _state())


def test_reset_keeps_the_options(tmp_path: Path) -> None:
    """``dcp.save(checkpoint_id=)`` moves the writer and keeps how it reaches the storage."""
    writer = CkptoolWriter(tmp_path / "a", storage_options={"ckptool_deadline_s": 1.0})
    dcp.save(_state(), storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert not (tmp_path / "a" / ".metadata").exists()
    assert (tmp_path / "b" / ".metadata").exists()


def test_a_committed_checkpoint_is_never_written_over(url: str) -> None:
    """A second save into the same place is refused, and leaves it as it was."""
    dcp.save(_state(), storage_writer=CkptoolWriter(url))
    folder = Path(url.removeprefix("file://"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(_state(seed=2), storage_writer=CkptoolWriter(url))
    assert isinstance(caught.value.failures[0][0], NotEmptyError)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_flipped_bit_is_found(url: str) -> None:
    """A payload that does not match its checksum is named, not loaded."""
    dcp.save(_state(), storage_writer=CkptoolWriter(url))
    (shard,) = glob.glob(url.removeprefix("file://") + "/*.distcp")
    wanted = states.bits(_state()["model"]["turned"])
    data = bytearray(Path(shard).read_bytes())
    at = data.index(wanted)
    data[at + 77] ^= 4
    Path(shard).write_bytes(bytes(data))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(_empty(), storage_reader=CkptoolReader(url))
    error = caught.value.failures[0][0]
    assert isinstance(error, DamagedError)
    assert "model.turned" in str(error)


def test_a_chunk_that_nobody_stored_is_no_commit(url: str) -> None:
    """Results that lack a chunk raise, and ``.metadata`` is not written."""

    class Forgetful(CkptoolWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [rows[1:] for rows in results])

    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(_state(), storage_writer=Forgetful(url))
    assert isinstance(caught.value.failures[0][0], StorageError | DamagedError)
    assert not Path(url.removeprefix("file://"), ".metadata").exists()


def test_a_writer_survives_a_pickle(url: str) -> None:
    """The process-based ``async_save`` sends the writer to another process."""
    file = io.BytesIO()
    pickle.dump(CkptoolWriter(url), file)
    writer = pickle.loads(file.getvalue())
    dcp.save(_state(), storage_writer=writer)
    assert Path(url.removeprefix("file://"), ".metadata").exists()


def test_a_large_tensor_goes_in_parts(url: str) -> None:
    """A tensor of several parts comes back whole, its slices too."""
    wide = torch.randn(5000, 2100)
    dcp.save({"wide": wide, "after": torch.ones(3)}, storage_writer=CkptoolWriter(url))
    target = {"wide": torch.zeros_like(wide), "after": torch.zeros(3)}
    dcp.load(target, storage_reader=CkptoolReader(url))
    assert torch.equal(target["wide"], wide)
    stock = {"wide": torch.zeros_like(wide)}
    dcp.load(stock, checkpoint_id=url.removeprefix("file://"))
    assert torch.equal(stock["wide"], wide)
