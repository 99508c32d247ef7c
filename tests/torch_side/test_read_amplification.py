"""How many bytes a load fetches for each byte it needs, counted by a recording store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recording_store import RecordingStore
from simulated_ranks import load_as, save_as

from ckptool.errors import DamagedError
from ckptool.storage import open_store

SHAPES = {"emb": (1024, 1500), "wide": (1000, 2100), "norm": (1500,), "odd": (97, 311), "u": (5, 3)}


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {key: torch.randn(*shape, generator=generator) for key, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("saved", "loaded", "bound"),
    [(4, 4, 1.02), (16, 16, 1.02), (4, 16, 1.1), (16, 4, 1.1), (4, 3, 1.1), (3, 1, 1.02)],
)
def test_a_load_reads_little_more_than_it_needs(
    tmp_path: Path, saved: int, loaded: int, bound: float
) -> None:
    """Whatever the two worlds: the right bits, few bytes beyond them, and the count is honest."""
    tensors, store = _tensors(), RecordingStore(open_store(tmp_path))
    save_as(store, "step-1", tensors, num_ranks=saved)
    store.reset()
    count, found = load_as(store.child("step-1"), tensors, num_ranks=loaded)
    assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    num_read = sum(end - start for verb, key, start, end in store.calls if "distcp" in key)
    assert num_read == count.fetched
    assert count.needed == sum(tensor.nbytes for tensor in tensors.values())
    assert num_read / count.needed < bound


def test_small_entries_share_requests(tmp_path: Path) -> None:
    """A hundred small tensors are read in a few requests, not one by one."""
    tensors = {f"w{number:03}": torch.full((10, 10), float(number)) for number in range(100)}
    store = RecordingStore(open_store(tmp_path))
    save_as(store, "step-1", tensors, num_ranks=2)
    store.reset()
    load_as(store.child("step-1"), tensors, num_ranks=1)
    assert store.requests["read"] <= 6


def test_whole_blocks_are_verified(tmp_path: Path) -> None:
    """A slice of a tensor is checked block by block, so that a flipped bit in it is found."""
    tensors = {"wide": torch.randn(3000, 2100)}
    store = open_store(tmp_path)
    save_as(store, "step-1", tensors, num_ranks=1)
    count, _ = load_as(store.child("step-1"), tensors, num_ranks=2)
    assert count.unverified < 0.2 * count.needed
    (shard,) = (tmp_path / "step-1").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[9_000_000] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(DamagedError, match="wide"):
        load_as(store.child("step-1"), tensors, num_ranks=2)
