"""Items that we write: torch's own bytes, and torch reads them."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES, DType, dtype_named
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import (
    check_item,
    encode_item,
    encode_value_item,
    parse_tensor_item,
    parse_value_item,
)

torch = pytest.importorskip("torch")

SHAPES = [(), (0,), (1,), (3,), (2, 0, 3), (2, 3), (300, 70000), (1, 2, 3, 4), (2,) * 9, (4, 0)]


def item_of(dtype: DType, shape: tuple[int, ...], payload: bytes) -> bytes:
    framing = encode_item(dtype=dtype, shape=shape)
    assert framing.payload_num_bytes == len(payload)
    item = framing.head + payload + framing.tail(crc32(payload))
    assert len(item) == framing.length
    assert len(framing.tail(0)) == framing.tail_num_bytes
    return item


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().untyped_storage().tolist()) if tensor.numel() else b""


@pytest.mark.parametrize("name", DTYPES)
def test_items_equal_what_torch_saves(name: str) -> None:
    """Whatever the dtype, the item is torch 2.13's own, byte for byte."""
    dtype = dtype_named(name)
    tensor_dtype = getattr(torch, name)
    for shape in [(), (0,), (3,), (2, 3)]:
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
        count = torch.Size(shape).numel()
        tensor = raw[: count * dtype.itemsize].clone().view(tensor_dtype).reshape(shape)
        item = item_of(dtype, shape, bytes_of(tensor))
        again = torch.load(io.BytesIO(item), weights_only=True)
        assert again.dtype == tensor_dtype
        assert again.shape == tensor.shape
        assert bytes_of(again) == bytes_of(tensor)
        if torch.__version__.startswith("2.13."):
            assert item == saved(tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_equals_what_torch_saves(shape: tuple[int, ...]) -> None:
    """0-dim, empty, large and many-dim tensors are no special case."""
    tensor = torch.ones(shape, dtype=torch.bool)
    item = item_of(dtype_named("bool"), shape, tensor.numpy().tobytes())
    assert torch.equal(torch.load(io.BytesIO(item), weights_only=True), tensor)
    if torch.__version__.startswith("2.13."):
        assert item == saved(tensor)
    parsed = parse_tensor_item(length=len(item), head=item)
    assert parsed.is_plain
    assert parsed.shape == shape
    assert parsed.payload_offset % 64 == 0
    assert check_item(item) == []


def test_framing_travels_between_processes() -> None:
    """A framing is picklable and gives the same bytes there."""
    framing = encode_item(dtype=dtype_named("float32"), shape=(5, 7))
    again = pickle.loads(pickle.dumps(framing))
    assert again == framing
    assert again.tail(123) == framing.tail(123)
    assert len(pickle.dumps(framing)) < 300


class _Sink:
    """Keeps the small writes and drops payloads, so that 4 GiB cost no memory."""

    def __init__(self) -> None:
        self.at = 0
        self.parts: list[tuple[int, bytes]] = []

    def write(self, data: bytes) -> int:
        if len(data) < 1 << 20:
            self.parts.append((self.at, bytes(data)))
        self.at += len(data)
        return len(data)

    def flush(self) -> None: ...


@pytest.mark.parametrize("num_bytes", [2**32 - 2, 2**32 - 1, 2**32, 2**32 + 8])
def test_items_beyond_4_gib_equal_what_torch_saves(num_bytes: int) -> None:
    """Around 4 GiB, torch's zip64 fields and 64-bit descriptors come out alike."""
    framing = encode_item(dtype=dtype_named("uint8"), shape=(num_bytes,))
    start = len(framing.head)
    head, tail = framing.head, framing.tail(0x12345678)
    parsed = parse_tensor_item(length=framing.length, head=head, tail=tail)
    assert (parsed.payload_offset, parsed.payload_num_bytes) == (start, num_bytes)
    assert parsed.crc32 == 0x12345678
    if not torch.__version__.startswith("2.13."):
        return
    sink = _Sink()
    with_crcs = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.empty(num_bytes, dtype=torch.uint8), sink)
    finally:
        torch.serialization.set_crc32_options(with_crcs)
    assert sink.at == framing.length
    theirs = b"".join(data for at, data in sink.parts if at < start)
    assert without_crcs(head) == without_crcs(theirs)
    theirs = b"".join(data for at, data in sink.parts if at >= start)
    ident = tail.index(b".data/serialization_id")
    assert len(tail) == len(theirs)
    assert without_crcs(tail[:ident]) == without_crcs(theirs[:ident])


def without_crcs(data: bytes) -> bytes:
    """``data`` with the CRC of each data descriptor set to 0."""
    parts = data.split(b"PK\7\10")
    return b"PK\7\10".join([parts[0], *(bytes(4) + part[4:] for part in parts[1:])])


def test_an_item_beyond_4_gib_is_a_zip_to_others(tmp_path) -> None:
    """Python's zipfile finds a 4 GiB record and what stands behind it (a sparse file)."""
    framing = encode_item(dtype=dtype_named("uint8"), shape=(2**32 + 100,))
    path = tmp_path / "item"
    with path.open("wb") as file:
        file.write(framing.head)
        file.seek(framing.payload_num_bytes, 1)
        file.write(framing.tail(1))
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == 2**32 + 100
        assert archive.read("archive/version") == b"3\n"
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (2**32 + 100,)


def test_value_items_equal_what_torch_saves() -> None:
    """A value's pickle gets torch's own framing, which torch reads back."""
    value = {"lr": 0.1, "betas": (0.9, 0.999), "name": "x", "none": None}
    theirs = saved(value)
    parsed = parse_value_item(theirs)
    ours = encode_value_item(parsed.pickle)
    assert torch.load(io.BytesIO(ours), weights_only=True) == value
    if torch.__version__.startswith("2.13."):
        assert ours == theirs


def test_tensors_inside_a_value_keep_their_bytes() -> None:
    """Records beside the pickle are found, and written again under their own names."""
    value = (torch.arange(3), {"rng": torch.arange(5, dtype=torch.uint8)})
    theirs = saved(value)
    parsed = parse_value_item(theirs)
    storages = {
        name: theirs[row.offset : row.offset + row.num_bytes]
        for name, row in parsed.storages.items()
    }
    assert {name: len(data) for name, data in storages.items()} == {"0": 24, "1": 5}
    ours = encode_value_item(parsed.pickle, storages=storages)
    again = torch.load(io.BytesIO(ours), weights_only=True)
    assert torch.equal(again[0], value[0])
    assert torch.equal(again[1]["rng"], value[1]["rng"])
    assert check_item(ours) == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=5), st.randoms())
def test_what_is_encoded_is_parsed(name: str, shape: list[int], random) -> None:
    """Any tensor comes back with dtype, shape, CRC and every payload byte."""
    dtype = dtype_named(name)
    count = dtype.itemsize
    for size in shape:
        count *= size
    payload = random.randbytes(count)
    item = item_of(dtype, tuple(shape), payload)
    parsed = parse_tensor_item(length=len(item), head=item)
    assert (parsed.dtype, parsed.shape) == (dtype, tuple(shape))
    assert parsed.crc32 == crc32(payload)
    start = parsed.payload_offset
    assert item[start : start + parsed.payload_num_bytes] == payload
    assert parsed.is_plain
