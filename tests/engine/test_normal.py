"""Normal payloads: whatever is crowded out is made again, and nothing grows beyond its bound."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import zstandard
from plain_checkpoint import Saved, random_array, rows_of, write_checkpoint

from ckptool.engine.normal import Normaliser
from ckptool.errors import DamagedError
from ckptool.model import Box, Index, Item, TensorEntry
from ckptool.planning.plan import Normal, Payload
from ckptool.storage import open_store


def payload_of(index: Index, key: str) -> Payload:
    entry = index.entries[key]
    assert isinstance(entry, TensorEntry)
    chunk = entry.chunks[0]
    assert chunk.item is not None
    return Payload(chunk.item, entry.dtype, chunk.box, None, 0, key)


def read(normaliser: Normaliser, payload: Payload) -> tuple[bytes, int]:
    """The whole payload, and how many bytes were fetched for it."""
    buffer = memoryview(bytearray(payload.num_bytes))
    _, num_bytes = normaliser.read_into(Normal(payload, 0, payload.num_bytes), buffer)
    return bytes(buffer), num_bytes


@pytest.mark.parametrize("stored", ["transposed", "zstd", "view"])
def test_a_payload_is_made_once(tmp_path: Path, stored: str) -> None:
    """Row by row whatever the item holds; the second reader gets what was kept."""
    array = random_array((5, 7), "int64", seed=1)
    saved = Saved(array, rows_of(array, "int64", 5).boxes, "int64", stored=stored)
    payload = payload_of(write_checkpoint(tmp_path, {"w": saved}), "w")
    normaliser = Normaliser(open_store(str(tmp_path)), max_memory_bytes=1 << 20)
    assert read(normaliser, payload) == (array.tobytes(), payload.item.length)
    assert read(normaliser, payload) == (array.tobytes(), 0)
    normaliser.close()


def test_what_was_crowded_out_is_made_again(tmp_path: Path) -> None:
    """Also when others crowd it out between being found and being read."""
    arrays = {f"t{n}": random_array((4, 4), "float32", seed=n) for n in range(9)}
    saved = {
        key: Saved(array, rows_of(array, "float32", 4).boxes, "float32", stored="zstd")
        for key, array in arrays.items()
    }
    index = write_checkpoint(tmp_path, saved)
    normaliser = Normaliser(open_store(str(tmp_path)), max_memory_bytes=4)
    for key in [*arrays, *arrays]:
        payload = payload_of(index, key)
        assert read(normaliser, payload)[0] == arrays[key].tobytes()
        for kept in normaliser._kept.values():
            kept.close()
    normaliser.close()


def test_a_compressed_item_cannot_fill_the_memory(tmp_path: Path) -> None:
    """A few KiB that stand for gigabytes: stopped at what the index declares, and named."""
    big = zstandard.ZstdCompressor().compressobj()
    data = b"".join(big.compress(bytes(64 << 20)) for _ in range(32)) + big.flush()
    assert len(data) < 512 << 10
    (tmp_path / "f").write_bytes(data)
    array = random_array((2, 2), "float32", seed=1)
    index = write_checkpoint(tmp_path / "c", {"w": rows_of(array, "float32", 2)})
    entry = index.entries["w"]
    assert isinstance(entry, TensorEntry)
    item = Item("f", 0, len(data), ("stream.zstd/1",))
    payload = Payload(item, entry.dtype, Box((0, 0), (2, 2)), None, 0, "w")
    normaliser = Normaliser(open_store(str(tmp_path)), max_memory_bytes=1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="decompresses to more than") as caught:
            read(normaliser, payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.facts["entry"] == "w"
    assert peak < 256 << 20
