"""Torch's own classes as writers and readers: what they leave out, and what they must accept."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.dtypes import DTYPES, dtype_named
from ckptool.errors import DamagedError
from ckptool.formats.dcp_metadata import merge_rank_local, read_metadata, write_metadata
from ckptool.model import Box, Chunk, Chunks, Index, Item, TensorEntry, ValueEntry


def stored(
    boxes: list[tuple[list[int], list[int]]], shape: list[int], places: dict[Any, Any]
) -> Metadata:
    """A torch Metadata of one tensor ``w``; ``places`` maps MetadataIndex to _StorageInfo."""
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    return Metadata({"w": tensor}, None, places)


def read(metadata: Metadata, protocol: int = 4) -> Index:
    return read_metadata(pickle.dumps(metadata, protocol))


def tensor(index: Index, key: str = "w") -> TensorEntry:
    entry = index.entries[key]
    assert isinstance(entry, TensorEntry)
    return entry


def whole() -> Metadata:
    metadata = stored(
        [([0], [2]), ([2], [2])],
        [4],
        {
            MetadataIndex("w", [0], 0): _StorageInfo("__0_0.distcp", 0, 10),
            MetadataIndex("w", [2], 1): _StorageInfo("__1_0.distcp", 0, 10),
            MetadataIndex("v"): _StorageInfo("__0_0.distcp", 10, 5),
        },
    )
    metadata.state_dict_metadata["v"] = BytesStorageMetadata()
    metadata.planner_data = {"w": ("w",), "v": ("v", 0)}
    return metadata


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_pickle_protocol(protocol: int) -> None:
    """The index is the same whichever protocol Python pickled it with."""
    assert read(whole(), protocol) == read(whole())


@pytest.mark.parametrize(
    "name", ["planner_data", "storage_data", "storage_meta", "version", "chunk_order"]
)
def test_missing_and_extra_attributes(name: str) -> None:
    """Fields that another release lacks, or has in addition, change nothing else."""
    metadata = whole()
    if name == "chunk_order":
        metadata.chunk_order = {"w": 3}  # type: ignore[attr-defined]
    else:
        vars(metadata).pop(name)
    index = read(metadata)
    assert tensor(index).shape == (4,)
    assert (tensor(index).path is None) == (name == "planner_data")
    assert all((chunk.item is None) == (name == "storage_data") for chunk in tensor(index).chunks)


def test_missing_transform_descriptors() -> None:
    """A storage info pickled before transforms existed means none."""
    metadata = whole()
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors")
    assert read(metadata) == read(whole())


def test_properties_as_plain_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorProperties whose state is a dict, as a later torch may write, has its dtype found."""
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: {"dtype": self.dtype})
    assert tensor(read(whole())).dtype is dtype_named("float32")


def test_empty_chunks_beyond_the_end() -> None:
    """Ranks beyond the last row share one stored empty item at the end of the tensor."""
    places = {
        MetadataIndex("w", [0], 0): _StorageInfo("a", 0, 10),
        MetadataIndex("w", [1], 1): _StorageInfo("b", 0, 6),
    }
    index = read(stored([([0], [1]), ([1], [0]), ([1], [0])], [1], places))
    items = [chunk.item and chunk.item.file for chunk in tensor(index).chunks]
    assert items == ["a", "b", "b"]


def test_empty_chunk_at_the_offsets_of_another() -> None:
    """An empty chunk never takes the item of the chunk with elements that starts there."""
    for boxes in ([([0], [0]), ([0], [4])], [([0], [4]), ([0], [0])]):
        index = read(stored(boxes, [4], {MetadataIndex("w", [0], 0): _StorageInfo("a", 0, 9)}))
        by_size = {chunk.box.sizes: chunk.item for chunk in tensor(index).chunks}
        assert by_size[(4,)] == Item("a", 0, 9)
        assert by_size[(0,)] is None


def test_replicas_of_a_chunk_share_its_item() -> None:
    """The same box listed twice and stored once is the same item twice."""
    places = {MetadataIndex("w", [0], 1): _StorageInfo("a", 0, 9)}
    index = read(stored([([0], [4]), ([0], [4])], [4], places))
    assert [chunk.item for chunk in tensor(index).chunks] == [Item("a", 0, 9)] * 2


def test_chunk_that_is_not_stored() -> None:
    """A chunk that storage_data lacks is listed without an item."""
    metadata = whole()
    del metadata.storage_data[MetadataIndex("w", [2])]
    assert [chunk.item is None for chunk in tensor(read(metadata)).chunks] == [False, True]


def test_stored_but_not_listed_is_noted() -> None:
    """What storage_data places and nothing lists is kept as a note that names it."""
    metadata = whole()
    metadata.storage_data[MetadataIndex("w", [3])] = _StorageInfo("a", 0, 9)
    metadata.storage_data[MetadataIndex("lost")] = _StorageInfo("a", 9, 9)
    assert [note for note in read(metadata).notes if "1 chunks of 'w'" in note]
    assert [note for note in read(metadata).notes if "value of 'lost'" in note]


def test_shared_sizes_come_from_the_memo() -> None:
    """Objects that a pickle shares are found even where a run was read in one step."""
    size = torch.Size([2])
    chunks = [ChunkStorageMetadata(torch.Size([2 * i]), torch.Size([2])) for i in range(50)]
    shared = [ChunkStorageMetadata(chunk.offsets, chunk.sizes) for chunk in chunks]
    first = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([100]), chunks)
    second = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([100]), shared)
    third = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([100]), chunks[3:])
    places = {MetadataIndex("a", c.offsets, 0): _StorageInfo("f", 0, 1) for c in chunks}
    index = read(Metadata({"a": first, "b": second, "c": third}, None, places))
    assert [c.box for c in tensor(index, "b").chunks] == [c.box for c in tensor(index, "a").chunks]
    assert [c.box for c in tensor(index, "c").chunks] == [c.box for c in tensor(index, "a").chunks][
        3:
    ]
    assert tensor(index, "a").chunks[49].box == Box((98,), tuple(size))


def test_every_dtype_that_torch_has() -> None:
    """Each dtype of the table goes to torch and back by its own name."""
    boxes = Chunks.of([Chunk(Box((0,), (2,)), Item("f", 0, 9))], num_dims=1)
    entries = {
        name: TensorEntry(name, dtype, (2,), boxes)
        for name, dtype in DTYPES.items()
        if hasattr(torch, name)
    }
    data = write_metadata(Index(entries))
    for name, entry in pickle.loads(data).state_dict_metadata.items():
        assert entry.properties.dtype is getattr(torch, name)
    assert read_metadata(data).entries == entries


@pytest.mark.parametrize("num_dims", range(7))
def test_any_number_of_dims(num_dims: int) -> None:
    """Boxes of 0 to 6 dims, with numbers of every width, go to torch and back."""
    sizes = tuple([3, 300, 70_000, 2**31, 5, 7][:num_dims])
    chunks = [
        Chunk(Box((0,) * num_dims, sizes), Item("f", 2**40, 2**33)),
        Chunk(Box(sizes, sizes), Item("x" * 300, 255, 65535, ("stream.zstd/1", "other/2"))),
    ]
    shape = tuple(2 * size for size in sizes)
    columns = Chunks.of(chunks[: 1 + bool(num_dims)], num_dims=num_dims)
    index = Index(
        {"w": TensorEntry("w", DTYPES["int8"], shape, columns, ("é", 0, ""))}, version="9"
    )
    data = write_metadata(index)
    assert read_metadata(data) == index
    assert pickle.loads(data).state_dict_metadata["w"].size == torch.Size(shape)


def test_written_in_frames() -> None:
    """A large index is written in frames, as Python's pickler does, and reads back the same."""
    many = [Chunk(Box((i,), (1,)), Item(f"__{i % 7}_0.distcp", i * 9, 9)) for i in range(3000)]
    entry = TensorEntry("w", DTYPES["int8"], (3000,), Chunks.of(many, num_dims=1))
    data = write_metadata(Index({"w": entry, "v": ValueEntry("v", None)}))
    assert data.count(b"\x95") > 3
    assert read_metadata(data).entries["w"] == entry
    assert len(pickle.load(io.BytesIO(data)).storage_data) == 3000


def test_stock_load_reads_what_we_write(tmp_path: Path) -> None:
    """dcp.load of a checkpoint whose `.metadata` we rewrote gives every tensor bit for bit."""
    state = {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "nested": {"b": torch.ones(2, dtype=torch.bfloat16), "n": 5},
        "list": [torch.tensor(1), torch.tensor(2)],
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    path.write_bytes(write_metadata(read_metadata(path.read_bytes())))
    loaded: dict[str, Any] = {
        "w": torch.zeros(3, 4),
        "nested": {"b": torch.zeros(2, dtype=torch.bfloat16), "n": 0},
        "list": [torch.tensor(0), torch.tensor(0)],
    }
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["w"], state["w"])  # type: ignore[arg-type]
    assert torch.equal(loaded["nested"]["b"], torch.ones(2, dtype=torch.bfloat16))
    assert loaded["nested"]["n"] == 5
    assert loaded["list"] == [torch.tensor(1), torch.tensor(2)]


def local(file: str, offset: int, dtype: str = "int8", item: bool = True) -> Index:
    chunk = Chunk(Box((offset,), (2,)), Item(file, 0, 9) if item else None)
    entry = TensorEntry("w", DTYPES[dtype], (4,), Chunks.of([chunk], num_dims=1))
    return Index({"w": entry, "step": ValueEntry("step", Item(file, 9, 9))})


def test_merge_keeps_replicas_once() -> None:
    """Of a box that several ranks stored, the lowest rank's item stays; values too, with a note."""
    merged = merge_rank_local([local("r0", 0), local("r1", 2), local("r2", 0)])
    items = [chunk.item and chunk.item.file for chunk in tensor(merged).chunks]
    assert items == ["r0", "r1"]
    assert merged.entries["step"] == ValueEntry("step", Item("r0", 9, 9))
    assert "1 values are stored by more than one rank" in merged.notes[0]


def test_merge_prefers_what_is_stored() -> None:
    """A replica that is stored is taken before one that is only listed."""
    merged = merge_rank_local([local("r0", 0, item=False), local("r1", 0)])
    assert [chunk.item for chunk in tensor(merged).chunks] == [Item("r1", 0, 9)]


def test_merge_refuses_ranks_that_disagree() -> None:
    """Two ranks that give one tensor two dtypes are named."""
    with pytest.raises(DamagedError, match=r"'w': int8 \[4\] and int16 \[4\]"):
        merge_rank_local([local("r0", 0), local("r1", 2, "int16")])
