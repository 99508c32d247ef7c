"""Safetensors headers: the serializer's own bytes, and one error for each way to be wrong."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES, dtype_named
from ckptool.errors import CkptoolError, DamagedError, UnsupportedError
from ckptool.formats.partial_bytes import NeedMore
from ckptool.formats.safetensors_file import (
    MAX_HEADER_NUM_BYTES,
    encode_header,
    encode_index,
    parse_header,
)
from ckptool.formats.safetensors_shards import read_sharded_headers

F32, BF16 = dtype_named("float32"), dtype_named("bfloat16")


def file_of(header: Any, num_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def row(*, dtype: Any = "F32", shape: Any = (2,), data_offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def parsed(data: bytes) -> Any:
    return parse_header(data, file_num_bytes=len(data))


def test_headers_equal_the_serializers_own() -> None:
    """Order, offsets, padding and JSON are those of the safetensors library."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    tensors, specs = {}, {}
    for name, dtype in DTYPES.items():
        if dtype.safetensors is None or not hasattr(torch, name):
            continue
        for shape in [(2, 3), (0, 2), (1,)]:
            raw = torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
            key = f"{name}.é\n{len(shape)}{shape[0]}"
            tensors[key] = raw.view(getattr(torch, name)).reshape(shape)
            specs[key] = (dtype, shape)
    header, offsets = encode_header(specs, metadata={"format": "pt"})
    theirs = library.save(tensors, metadata={"format": "pt"})
    assert theirs.startswith(header)
    assert len(theirs) == len(header) + sum(t.nbytes for t in tensors.values())
    read = parse_header(theirs[: len(header)], file_num_bytes=len(theirs))
    assert list(read.tensors) == list(offsets)
    assert {k: (t.dtype, t.shape) for k, t in read.tensors.items()} == specs
    assert {k: t.offset for k, t in read.tensors.items()} == offsets
    assert read.metadata == {"format": "pt"}


def test_the_library_opens_what_we_write() -> None:
    """Headers of ours in front of payloads: every tensor comes out of the library as it went in."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "w": torch.arange(6.0).reshape(2, 3),
        "a": torch.arange(3, dtype=torch.int8),
        "s": torch.tensor(True),
        "e": torch.zeros(0, 4, dtype=torch.float16),
    }
    dtypes = {name: dtype_named(str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    specs = {name: (dtypes[name], tuple(t.shape)) for name, t in tensors.items()}
    header, offsets = encode_header(specs, metadata={"format": "pt"})
    data = header + b"".join(tensors[name].numpy().tobytes() for name in offsets)
    again = library.load(data)
    assert set(again) == set(tensors)
    assert all(torch.equal(again[name], t) for name, t in tensors.items())


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([d for d in DTYPES.values() if d.safetensors not in (None, "F4")]),
            st.lists(st.integers(0, 4), max_size=4).map(tuple),
        ),
        max_size=6,
    )
)
def test_any_header_is_read_back(specs: dict[str, Any]) -> None:
    """What is encoded is parsed, and every tensor is aligned to its element."""
    try:
        header, offsets = encode_header(specs)
    except UnsupportedError:
        assert any(0xD800 <= ord(char) < 0xE000 for name in specs for char in name)
        return
    end = len(header) + sum(dtype.itemsize * _product(shape) for dtype, shape in specs.values())
    read = parse_header(header, file_num_bytes=end)
    assert {k: (t.dtype, t.shape) for k, t in read.tensors.items()} == specs
    for name, offset in offsets.items():
        assert read.tensors[name].offset == offset
        assert offset % min(specs[name][0].itemsize, 8) == 0
    assert encode_header(dict(reversed(specs.items())))[0] == header


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@pytest.mark.parametrize("name", ["complex32", "complex128"])
def test_a_dtype_without_a_code_is_refused_by_name(name: str) -> None:
    """The error names tensor, dtype and what to do instead."""
    with pytest.raises(UnsupportedError, match=rf"'freqs' is {name}.*--exclude.*--format torch"):
        encode_header({"a": (F32, (2,)), "freqs": (dtype_named(name), (2,))})


def test_more_bytes_are_asked_for() -> None:
    """A short read says how much suffices."""
    data = file_of({"a": row()}, 8)
    with pytest.raises(NeedMore) as short:
        parse_header(data[:3], file_num_bytes=len(data))
    assert short.value.head_num_bytes == 8
    with pytest.raises(NeedMore) as short:
        parse_header(data[:8], file_num_bytes=len(data))
    assert parse_header(data[: short.value.head_num_bytes], file_num_bytes=len(data)).tensors


def test_headers_of_other_writers_are_read() -> None:
    """No padding, any order, no alignment: the format allows it."""
    header = {"b": row(dtype="BF16", shape=[1], data_offsets=[8, 10]), "a": row()}
    read = parsed(file_of(header, 10))
    assert list(read.tensors) == ["a", "b"]
    assert read.metadata == {}


WRONG = {
    "a hole": ({"a": row(data_offsets=[4, 12])}, 12, "'a' starts .* hole"),
    "a hole between": ({"a": row(), "b": row(data_offsets=[9, 17])}, 17, "'b' .* hole .* 'a'"),
    "an overlap": ({"a": row(), "b": row(data_offsets=[4, 12])}, 12, "'b' .* overlaps 'a'"),
    "a short file": ({"a": row()}, 7, "end at byte"),
    "a long file": ({"a": row()}, 9, "end at byte"),
    "sizes": ({"a": row(shape=[3])}, 8, "'a' .* needs 12 bytes"),
    "offsets reversed": ({"a": row(data_offsets=[8, 0])}, 8, "'a'"),
    "a negative offset": ({"a": row(data_offsets=[-8, 0])}, 8, "'a'"),
    "a bool for a size": ({"a": row(shape=[True], data_offsets=[0, 4])}, 4, "'a'"),
    "a huge size": ({"a": row(shape=[1 << 70, 0])}, 0, "'a'"),
    "many dims": ({"a": row(shape=[1] * 70, data_offsets=[0, 4])}, 4, "'a'"),
    "a missing field": ({"a": {"dtype": "F32", "shape": [0]}}, 0, "'a'"),
    "no object": ({"a": 3}, 0, "'a'"),
    "a dtype that is no text": ({"a": row(dtype=["F32"])}, 8, "'a'"),
    "half an F4 byte": ({"a": row(dtype="F4", shape=[3], data_offsets=[0, 1])}, 1, "'a'"),
    "metadata": ({"__metadata__": {"format": 1}}, 0, "__metadata__"),
    "a list": ([], 0, "no JSON object"),
    "space before": (b' {"a":1}', 0, "no JSON object"),
    "no JSON": (b"{", 0, "no JSON"),
    "no text": (b'{"\xff":1}', 0, "no JSON"),
    "a name twice": (b'{"a":{},"a":{}}', 0, "'a' twice"),
    "a field twice": (b'{"a":{"dtype":1,"dtype":2}}', 0, "'dtype' twice"),
    "nesting": (b"[" * 100_000, 0, "no JSON"),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_the_format_forbids_is_damage(why: str) -> None:
    """Each way to be wrong has a message that names the tensor."""
    header, num_bytes, message = WRONG[why]
    with pytest.raises(CkptoolError, match=message):
        parsed(file_of(header, num_bytes))


@pytest.mark.parametrize("length", [MAX_HEADER_NUM_BYTES + 1, 1 << 40, (1 << 64) - 1, 100])
def test_a_length_is_not_trusted(length: int) -> None:
    """A header longer than the file or the format's limit is damage before it is read."""
    with pytest.raises(DamagedError, match="claims"):
        parsed(struct.pack("<Q", length) + bytes(20))


def test_an_unknown_dtype_is_named() -> None:
    """Codes that we do not know are unsupported, not damage."""
    with pytest.raises(UnsupportedError, match=r"'a'.*'F6_E2M3'"):
        parsed(file_of({"a": row(dtype="F6_E2M3")}, 8))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_headers_raise_our_errors_alone(data: st.DataObject) -> None:
    """Whatever the bytes, nothing but a ckptool error (or a wish for more bytes) comes out."""
    whole = bytearray(file_of({"a": row(), "b": row(data_offsets=[8, 16])}, 16))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 17))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CkptoolError):
        parse_header(bytes(whole), file_num_bytes=len(whole))


def test_the_index_file_is_what_transformers_reads() -> None:
    """Sorted names, the sum of bytes, and a final newline."""
    data = encode_index({"b": "m-2.safetensors", "a": "m-1.safetensors"}, total_num_bytes=20)
    assert json.loads(data) == {
        "metadata": {"total_size": 20},
        "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"},
    }
    assert data.endswith(b"}\n")


def shard(offsets: dict[str, Any], sizes: dict[str, Any], *, info: Any = None) -> Any:
    specs = {name: (F32, tuple(shape)) for name, shape in sizes.items()}
    text = info or json.dumps({name: {"saved_offsets": o} for name, o in offsets.items()})
    header, _ = encode_header(specs, metadata={"DCP_SHARDING_INFO": text, "DCP_VERSION": "1.0"})
    num_bytes = sum(4 * _product(shape) for _, shape in specs.values())
    return parse_header(header, file_num_bytes=len(header) + num_bytes)


def test_shards_add_up_to_tensors() -> None:
    """Offsets stand in the headers; shapes are what the chunks reach to; items are payloads."""
    files = {
        "s-2": shard({"w": [3, 0], "s": []}, {"w": (2, 4), "s": ()}),
        "s-1": shard({"w": [0, 0]}, {"w": (3, 4)}),
    }
    index = read_sharded_headers(files)
    assert index.form == "hf-distributed"
    assert index.version == "1.0"
    weight = index.entries["w"]
    assert weight.shape == (5, 4)
    assert [str(chunk.box) for chunk in weight.chunks] == ["[0:3, 0:4]", "[3:5, 0:4]"]
    first = weight.chunks[0].item
    assert (first.file, first.length, first.transforms) == ("s-1", 48, ("payload",))
    assert first.offset == files["s-1"].tensors["w"].offset
    assert index.entries["s"].shape == ()


@pytest.mark.parametrize(
    "info",
    ["{", "[]", '{"w": 1}', '{"w": {}}', '{"w": {"saved_offsets": [0]}}',
     '{"w": {"saved_offsets": [0, -1]}}', '{"w": {"saved_offsets": [0, 9223372036854775807]}}',
     "[" * 100_000],
)  # fmt: skip
def test_sharding_info_is_not_trusted(info: str) -> None:
    """Malformed offsets are damage in a named file."""
    with pytest.raises(DamagedError, match="s-1"):
        read_sharded_headers({"s-1": shard({}, {"w": (3, 4)}, info=info)})


def test_contradicting_shards_are_named() -> None:
    """One tensor has one number of dims and one dtype in all files."""
    files = {"s-1": shard({"w": [0]}, {"w": (3,)}), "s-2": shard({"w": [3, 0]}, {"w": (3, 1)})}
    with pytest.raises(DamagedError, match=r"'w'.*s-2.*s-1"):
        read_sharded_headers(files)


def test_a_whole_tensor_in_two_files_is_damage() -> None:
    """A plain folder holds each tensor once."""
    header = parsed(file_of({"a": row()}, 8))
    assert read_sharded_headers({"x": header}).form == "hf"
    with pytest.raises(DamagedError, match="'a' stands in x and in y"):
        read_sharded_headers({"x": header, "y": header})
