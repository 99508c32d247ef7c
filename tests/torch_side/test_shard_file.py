"""A shard file: the bytes that torch would write, in parts of any size, its CRC-32s all right."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_store import RecordingStore

from ckptool.dtypes import dtype_named
from ckptool.errors import StorageError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import parse_tensor_item
from ckptool.storage import open_store
from ckptool.torch.image import plan_image
from ckptool.torch.save_run import tensor_payload
from ckptool.torch.shard_file import write_shard_file
from ckptool.torch.shard_items import Cutter, TensorItem, ValueItem

SHAPES = st.lists(st.integers(0, 300), min_size=0, max_size=2).map(tuple)


def _items(shapes: list[tuple[int, ...]]) -> tuple[list[torch.Tensor], list[TensorItem]]:
    tensors = [torch.randn(shape) if shape else torch.tensor(2.5) for shape in shapes]
    f32 = dtype_named("float32")
    return tensors, [TensorItem(f32, tuple(t.shape), tensor_payload(t)) for t in tensors]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=st.lists(SHAPES, min_size=1, max_size=4), part_bytes=st.integers(500, 100_000))
def test_parts_of_any_size_join_to_the_same_file(
    shapes: list[tuple[int, ...]], part_bytes: int
) -> None:
    """With the payloads in an image or apart: equal bytes, and items that say where they are."""
    tensors, items = _items(shapes)
    value = ValueItem(b"v" * 3000)
    rows = [(item.dtype, item.shape) for item in items]
    image_plan = plan_image(rows)
    image = bytearray(image_plan.num_bytes)
    for tensor, region in zip(tensors, image_plan.regions, strict=True):
        end = region.payload_start + region.num_bytes
        image[region.payload_start : end] = tensor.contiguous().numpy().tobytes()
    files = []
    for memory in (None, memoryview(image)):
        num_bytes = image_plan.num_bytes + 3000
        cutter = Cutter([*items, value], num_bytes=num_bytes, part_bytes=part_bytes, image=memory)
        parts = [bytes(part.data(memory)) for part in cutter.parts()]
        assert all(len(part) == part_bytes for part in parts[:-1])
        files.append(b"".join(parts))
        assert crc32(files[-1]) == _joined(cutter)
        for tensor, row in zip(tensors, cutter.results, strict=False):
            item = files[-1][row.offset : row.offset + row.length]
            loaded = torch.load(io.BytesIO(item), weights_only=True)
            assert torch.equal(loaded, tensor)
            parsed = parse_tensor_item(length=len(item), head=item)
            assert parsed.payload_offset == row.payload_start - row.offset
            assert (parsed.crc32 or 0) == row.payload_crc32
    assert files[0] == files[1]


def _joined(cutter: Cutter) -> int:
    from ckptool.formats.crc import crc32_join

    return crc32_join(cutter.crcs)


def test_blocks_have_their_own_checksums(tmp_path: Path) -> None:
    """Each 4 MiB of a payload has its CRC-32, wherever the parts were cut."""
    tensor = torch.randn(2_500_000)
    item = TensorItem(dtype_named("float32"), tuple(tensor.shape), tensor_payload(tensor))
    result = write_shard_file(open_store(tmp_path), "__0_0.distcp", [item])
    raw = tensor.numpy().tobytes()
    blocks = [crc32(raw[at : at + (4 << 20)]) for at in range(0, len(raw), 4 << 20)]
    assert list(result.items[0].block_crc32s) == blocks
    assert result.crc32 == crc32((tmp_path / "__0_0.distcp").read_bytes())


def test_a_file_that_reads_back_altered_fails(tmp_path: Path) -> None:
    """verify_after_write compares what the store gives back with what was sent."""

    class Altering(RecordingStore):
        def put(self, key: str, data: Any, *, if_absent: bool = False) -> Any:
            altered = bytearray(data)
            altered[len(altered) // 2] ^= 8
            return super().put(key, bytes(altered), if_absent=if_absent)

    _, items = _items([(30, 40)])
    store = Altering(open_store(tmp_path))
    with pytest.raises(StorageError, match="reads back"):
        write_shard_file(store, "__0_0.distcp", items, verify_after_write=True)
    plain = open_store(tmp_path / "plain")
    result = write_shard_file(plain, "__0_0.distcp", items, verify_after_write=True)
    assert result.verified == "checksum"


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """A payload that cannot be read aborts the upload; no file, no rest of one."""
    store = open_store(tmp_path)

    def broken(start: int, end: int) -> memoryview:
        if start > 17 << 20:
            raise StorageError("the memory is gone")
        return memoryview(bytes(end - start))

    item = TensorItem(dtype_named("uint8"), (40 << 20,), broken)
    with pytest.raises(StorageError, match="memory is gone"):
        write_shard_file(store, "__0_0.distcp", [item])
    assert not store.list()
    assert not store.list_uploads()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(5).to(torch.float8_e5m2),
        torch.randn(6, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.tensor(True),
    ],
    ids=["transposed", "strided", "float8", "conjugated", "empty", "bool"],
)
def test_any_tensor_becomes_its_own_bytes(tensor: torch.Tensor) -> None:
    """Row-major bytes of what the tensor means, whatever its memory looks like."""
    payload: Any = tensor_payload(tensor)
    size = tensor.numel() * tensor.element_size()
    found = torch.from_numpy(np.frombuffer(bytes(payload(0, size)) or b"", np.uint8).copy())
    if size:
        assert torch.equal(
            found.view(tensor.dtype).reshape(tensor.shape).view(torch.uint8)
            if tensor.dtype == torch.float8_e5m2
            else found.view(tensor.dtype).reshape(tensor.shape),
            tensor.contiguous().view(torch.uint8)
            if tensor.dtype == torch.float8_e5m2
            else tensor.resolve_conj(),
        )
