"""What tests of exports share: reading them back, comparing them, other bytes for an item."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import stock_ranks
from dcp_writer import edited_metadata

torch = pytest.importorskip("torch")


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def tensors_of(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(str(path)))


def assert_same_tree(one: Any, two: Any, path: str = "") -> None:
    """Two trees are equal in nesting, types, values, and every bit of their tensors."""
    assert type(one) is type(two), path
    if isinstance(one, torch.Tensor):
        assert stock_ranks.same(one, two), path
    elif isinstance(one, dict):
        assert list(one) == list(two), path
        for key in one:
            assert_same_tree(one[key], two[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), path
        for number, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same_tree(a, b, f"{path}.{number}")
    else:
        assert one == two, path


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def replace_item(folder: Path, key: str, data: bytes) -> None:
    """Store other bytes for a tensor of one chunk, in a file of their own."""
    (folder / "other.distcp").write_bytes(data)
    with edited_metadata(folder) as metadata:
        for index, info in metadata.storage_data.items():
            if index.fqn == key:
                info.relative_path, info.offset, info.length = "other.distcp", 0, len(data)


def saved_by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
