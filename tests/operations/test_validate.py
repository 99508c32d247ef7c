"""validate: every way to be damaged is found, named with its place, and none hides another."""

from __future__ import annotations

import json

import pytest
from dcp_writer import (
    edited_metadata,
    f4_tensors,
    flip_bit,
    item_of,
    payload_at,
    save_plain,
    write_f4,
)
from recording_store import RecordingStore

from ckptool.dtypes import dtype_named
from ckptool.errors import DamagedError, NoCheckpointError
from ckptool.formats.crc import crc32
from ckptool.formats.partial_bytes import PartialBytes
from ckptool.formats.safetensors_file import encode_header
from ckptool.formats.zip_reading import StoredZip
from ckptool.manifest import Manifest, ObjectFacts, write_manifest
from ckptool.model import Box
from ckptool.operations import open as open_module
from ckptool.operations.validate import validate
from ckptool.storage import open_store


@pytest.fixture
def f4(tmp_path):
    return write_f4(tmp_path / "f4")


def errors(folder, **options):
    report = validate(str(folder), **options)
    return [f for f in report.findings if f.severity == "error"]


def test_a_whole_checkpoint(f4):
    """Every item is read once and is ok; there is nothing to say and nothing to do."""
    report = validate(str(f4), read_data=True)
    assert (report.findings, report.remedy, report.is_ok) == ((), None, True)
    assert report.data.num_ok == report.num_items == 40
    sizes = sum(p.stat().st_size for p in f4.glob("*.distcp"))
    assert report.data.num_bytes_read == sizes


def test_each_byte_is_read_once_in_few_requests(f4, monkeypatch):
    """Neighbouring items are read together: one request a shard file."""
    stores = []

    def opened(url, *, options=None):
        stores.append(RecordingStore(open_store(url, options=options)))
        return stores[-1]

    monkeypatch.setattr(open_module, "open_store", opened)
    validate(str(f4), read_data=True)
    assert dict(stores[0].requests) == {"list": 1, "read": 1 + 4}
    stores.clear()
    validate(str(f4))
    assert dict(stores[0].requests) == {"list": 1, "read": 1}


# what the index says of itself


def drop_chunk(metadata, key, offset, *, from_storage=True):
    entry = metadata.state_dict_metadata[key]
    entry.chunks = [c for c in entry.chunks if tuple(c.offsets) != offset]
    if from_storage:
        for index in list(metadata.storage_data):
            if index.fqn == key and tuple(index.offset or ()) == offset:
                del metadata.storage_data[index]


def test_a_missing_chunk_is_named(f4):
    """One rank's rows are absent from the index: tensor and box are told."""
    with edited_metadata(f4) as metadata:
        drop_chunk(metadata, "model.w", (6, 0))
    found = errors(f4)
    assert [(f.code, f.entry, f.box) for f in found] == [
        ("missing-box", "model.w", Box((6, 0), (3, 6)))
    ]
    assert "[6:9, 0:6]" in found[0].message


def test_no_chunks_at_all(f4):
    """chunks=[] is a missing box as large as the tensor."""
    with edited_metadata(f4) as metadata:
        metadata.state_dict_metadata["model.w"].chunks = []
    assert [(f.code, f.box) for f in errors(f4)] == [("missing-box", Box((0, 0), (10, 6)))]


def test_a_chunk_that_nobody_stored(f4):
    """Listed but not stored (a writer thread that failed): entry and box are told."""
    with edited_metadata(f4) as metadata:
        for index in list(metadata.storage_data):
            lost = index.fqn == "model.w" and tuple(index.offset) == (3, 0)
            if lost or index.fqn == "it":
                del metadata.storage_data[index]
    assert {(f.code, f.entry) for f in errors(f4)} == {
        ("not-stored", "model.w"),
        ("not-stored", "it"),
    }


def test_overlapping_chunks(f4):
    """Two chunks that cover the same rows are named together."""
    with edited_metadata(f4) as metadata:
        import torch

        metadata.state_dict_metadata["model.w"].chunks[1].sizes = torch.Size([4, 6])
    assert ("overlap", Box((6, 0), (1, 6))) in [(f.code, f.box) for f in errors(f4)]


# files


def test_missing_files_are_all_listed(f4):
    """Two hosts' files are absent: both are named, with rank and entries, and how to go on."""
    for name in ("__2_0.distcp", "__3_0.distcp"):
        (f4 / name).unlink()
    report = validate(str(f4), read_data=True)
    found = {f.file: f for f in report.findings}
    assert {f.code for f in report.findings} == {"missing-file"}
    assert found.keys() == {"__2_0.distcp", "__3_0.distcp"}
    assert "rank 2" in found["__2_0.distcp"].message
    assert {"model.w", "model.buf"} <= set(found["__2_0.distcp"].entries)
    assert {"model.w", "rng"} <= set(found["__3_0.distcp"].entries)
    assert "hosts" in report.remedy
    assert report.data.num_damaged == 0
    assert report.data.num_ok + report.data.num_skipped == 40


def test_a_short_file_names_what_is_beyond_its_end(f4):
    """A shard cut to 60 % is one error with the byte and the entries that are lost."""
    path = f4 / "__2_0.distcp"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size * 6 // 10])
    (found,) = errors(f4)
    assert (found.code, found.file, found.offset) == ("short-file", path.name, size * 6 // 10)
    assert f"reach byte {size}" in found.message
    assert found.entries
    report = validate(str(f4), read_data=True)
    assert report.data.num_damaged == 0
    assert report.data.num_skipped > 0


def test_an_empty_file(f4):
    """A 0-byte shard is said to be empty."""
    (f4 / "__1_0.distcp").write_bytes(b"")
    (found,) = errors(f4)
    assert (found.code, "is empty" in found.message) == ("short-file", True)


def test_orphans_are_notes(f4):
    """Stale files of an earlier save harm nothing."""
    write_f4(f4, num_ranks=2)
    report = validate(str(f4), read_data=True)
    assert report.is_ok
    assert [(f.code, f.severity, f.file) for f in report.findings] == [
        ("orphan", "note", "__2_0.distcp"),
        ("orphan", "note", "__3_0.distcp"),
    ]


def test_a_manifest_with_other_sizes_is_a_warning(f4):
    """The manifest's sizes are compared; .metadata is what decides."""
    metadata = (f4 / ".metadata").read_bytes()
    manifest = Manifest(
        step=1,
        created="2026-01-31T12:00:00Z",
        metadata=ObjectFacts(len(metadata), crc32(metadata)),
        objects={"__0_0.distcp": ObjectFacts(3), "gone": ObjectFacts(1)},
    )
    (f4 / "ckpt.json").write_bytes(write_manifest(manifest))
    report = validate(str(f4))
    assert report.is_ok
    assert [(f.code, f.severity, f.file) for f in report.findings] == [
        ("manifest-differs", "warning", "__0_0.distcp"),
        ("manifest-differs", "warning", "gone"),
    ]


@pytest.mark.parametrize("length", [0, 1500])
def test_a_cut_metadata(f4, length):
    """0 bytes: not committed. Cut short: damaged, and the file is named."""
    data = (f4 / ".metadata").read_bytes()
    (f4 / ".metadata").write_bytes(data[:length])
    with pytest.raises(DamagedError if length else NoCheckpointError, match=r"\.metadata"):
        validate(str(f4))


# stored bytes


@pytest.mark.parametrize("key", ["model.w", "model.u", "model.buf", "rng", "model.scalar"])
def test_one_flipped_payload_bit(f4, key):
    """Stock torch loads it silently; here tensor, box, file and byte are named."""
    offset = (0,) * f4_tensors()[key].dim()
    path, at = payload_at(f4, key, offset)
    flip_bit(path, at + 1)
    assert errors(f4) == []
    report = validate(str(f4), read_data=True)
    (found,) = report.findings
    assert (found.code, found.entry, found.file, found.offset) == (
        "damaged-payload", key, path.name, at,
    )  # fmt: skip
    assert found.box.offsets == offset
    assert (report.data.num_damaged, report.data.num_ok) == (1, 39)
    assert "older step" in report.remedy


def test_a_flipped_bit_in_a_value(f4):
    """Values are proved too."""
    path, start, length = item_of(f4, "it")
    at = path.read_bytes().index(b"archive/data.pkl", start) + len("archive/data.pkl") + 40
    assert at < start + length
    flip_bit(path, at)
    (found,) = errors(f4, read_data=True)
    assert (found.entry, found.box, found.file) == ("it", None, path.name)


def test_every_fault_is_reported(f4):
    """One damaged item never hides another."""
    keys = ("model.u", "model.buf", "rng", "optim.state.w.exp_avg")
    for key in keys:
        flip_bit(*payload_at(f4, key, (0,) * f4_tensors()[key].dim()))
    with edited_metadata(f4) as metadata:
        drop_chunk(metadata, "model.w", (9, 0))
    seen = []
    report = validate(str(f4), read_data=True, on_finding=seen.append)
    assert seen == list(report.findings)
    assert {f.entry for f in seen} == {*keys, "model.w"}


def test_every_byte_of_every_record_counts(tmp_path):
    """A bit flipped anywhere in a record of an item is found, not only in the payload."""
    import torch

    folder = save_plain({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")
    path, start, length = item_of(folder, "w", (0, 0))
    clean = path.read_bytes()
    item = StoredZip(PartialBytes(length=length, head=clean[start : start + length]))
    assert len(item.records) >= 5
    for name, record in item.records.items():
        first = start + item.locate(name)
        for at in range(first, first + record.num_bytes):
            path.write_bytes(clean)
            flip_bit(path, at)
            found = errors(folder, read_data=True)
            assert [(f.entry, f.file) for f in found] == [("w", path.name)], (name, at - first)


def test_the_index_names_another_dtype(f4):
    """int32 in the index over a float32 payload: stock casts silently."""
    import torch

    with edited_metadata(f4) as metadata:
        metadata.state_dict_metadata["model.w"].properties.dtype = torch.int32
    found = errors(f4, read_data=True)
    assert {(f.code, f.entry) for f in found} == {("wrong-dtype", "model.w")}
    assert len(found) == 4
    assert "the index says int32, the item holds float32" in found[0].message


def test_the_index_names_another_shape(f4):
    """2-D in the index over a 1-D payload."""
    import torch

    with edited_metadata(f4) as metadata:
        entry = metadata.state_dict_metadata["model.buf"]
        entry.size = entry.chunks[0].sizes = torch.Size([3, 1])
        entry.chunks[0].offsets = torch.Size([0, 0])
        for index in list(metadata.storage_data):
            if index.fqn == "model.buf":
                info = metadata.storage_data.pop(index)
                kind = type(index)
                metadata.storage_data[kind("model.buf", torch.Size([0, 0]), 0)] = info
    (found,) = errors(f4, read_data=True)
    assert (found.code, found.entry) == ("wrong-shape", "model.buf")


def swap(folder, one, two):
    """Let two entries point at each other's items."""
    with edited_metadata(folder) as metadata:
        keys = {i.fqn: i for i in metadata.storage_data if i.fqn in (one, two)}
        first, second = metadata.storage_data[keys[one]], metadata.storage_data[keys[two]]
        metadata.storage_data[keys[one]], metadata.storage_data[keys[two]] = second, first


def test_swapped_items_of_other_shapes_are_found(f4):
    """A tensor that points at another's item is caught by what the item says of itself."""
    swap(f4, "model.buf", "rng")
    codes = {(f.code, f.entry) for f in errors(f4, read_data=True)}
    assert {e for _, e in codes} == {"model.buf", "rng"}


def test_a_value_where_a_tensor_should_be(f4):
    """An entry that points at an item of the other kind is named."""
    swap(f4, "it", "model.scalar")
    assert "model.scalar" in {f.entry for f in errors(f4, read_data=True)}


def test_items_without_crc_are_unverifiable(tmp_path):
    """CRCs that the writer left out are neither ok nor damage."""
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        folder = save_plain({"w": torch.ones(6)}, tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(True)
    report = validate(str(folder), read_data=True)
    assert report.is_ok
    assert (report.data.num_ok, report.data.num_unverifiable) == (0, 1)


def test_a_sample_is_the_same_each_time(f4):
    """A share of the items is read, the same ones each time, and at least one."""
    few = [validate(str(f4), read_data=True, percent=20).data for _ in range(2)]
    assert few[0] == few[1]
    assert 1 <= few[0].num_ok < 40
    assert few[0].num_ok + few[0].num_skipped == 40
    assert validate(str(f4), read_data=True, percent=1e-9).data.num_ok == 1


def write_shard(folder, name, *, values, offsets):
    """A safetensors shard as torch's HuggingFaceStorageWriter makes it."""
    info = json.dumps({"w": {"saved_offsets": offsets}})
    shape = (len(values) // 4,)
    header, _ = encode_header(
        {"w": (dtype_named("float32"), shape)}, metadata={"DCP_SHARDING_INFO": info}
    )
    (folder / name).write_bytes(header + values)


def test_replicas_are_compared(tmp_path):
    """The same box stored twice: equal bytes are a note, different ones an error."""
    write_shard(tmp_path, "shard-00001-model.safetensors", values=b"abcdefgh", offsets=[0])
    write_shard(tmp_path, "shard-00002-model.safetensors", values=b"abcdefgh", offsets=[0])
    report = validate(str(tmp_path), read_data=True)
    assert [(f.code, f.severity) for f in report.findings] == [("duplicate-box", "note")]
    write_shard(tmp_path, "shard-00002-model.safetensors", values=b"abcdefgX", offsets=[0])
    (found,) = errors(tmp_path, read_data=True)
    assert (found.code, found.entry, found.box) == ("replicas-differ", "w", Box((0,), (2,)))
