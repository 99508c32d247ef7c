"""export to a folder: files of a maximum size, and the index that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exports import loaded
from plain_checkpoint import random_array, read_safetensors, rows_of, write_checkpoint

from ckptool.operations.export import export

torch = pytest.importorskip("torch")


def ten_tensors(folder: Path) -> dict[str, Any]:
    arrays = {f"t{n}": random_array((10 + n, 7), "float32", seed=n) for n in range(10)}
    write_checkpoint(folder, {k: rows_of(a, "float32", *([1] * len(a))) for k, a in arrays.items()})
    return arrays


def test_the_index_equals_the_headers(tmp_path):
    """--max-file-size 1KB over ten tensors: names, files and total_size are what is there."""
    arrays = ten_tensors(tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "hf"), everything=True, max_file_size=1000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_bytes())
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [p.name for p in shards] == [
        f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)
    ]
    assert len(shards) > 3
    found: dict[str, str] = {}
    for path in shards:
        held = read_safetensors(path)
        assert sum(len(data) for _, _, data in held.values()) <= 1000
        for name, (_, shape, data) in held.items():
            assert (shape, data) == (arrays[name].shape, arrays[name].tobytes())
            found[name] = path.name
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    from transformers.utils.hub import get_checkpoint_shard_files

    resolved, _ = get_checkpoint_shard_files(
        str(tmp_path / "hf"), str(tmp_path / "hf/model.safetensors.index.json")
    )
    assert [Path(name).name for name in resolved] == [p.name for p in shards]


def test_a_folder_of_torch_files(tmp_path):
    """--format torch: pytorch_model-*.bin with its index."""
    arrays = ten_tensors(tmp_path / "a")
    export(
        str(tmp_path / "a"), str(tmp_path / "hf"), everything=True, max_file_size=1000,
        format="torch",
    )  # fmt: skip
    index = json.loads((tmp_path / "hf/pytorch_model.bin.index.json").read_bytes())
    for name, file in index["weight_map"].items():
        assert loaded(tmp_path / "hf" / file)[name].numpy().tobytes() == arrays[name].tobytes()
    assert index["weight_map"].keys() == arrays.keys()


def test_a_tensor_larger_than_the_maximum(tmp_path):
    """It has a file of its own; nothing is cut."""
    ten_tensors(tmp_path / "a")
    export(str(tmp_path / "a"), str(tmp_path / "hf"), everything=True, max_file_size=1)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 10
