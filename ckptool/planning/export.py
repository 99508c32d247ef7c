"""The layout plan of an export: which tensors go into which file, under which names. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.dtypes import DType
from ckptool.model import Index, Path, TensorEntry
from ckptool.planning.keys import Choice

__all__ = ["ExportFile", "ExportLayout", "OutTensor", "plan_layout"]


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor of the output: the entry it comes from, its name and its dtype there."""

    key: str
    name: str
    path: Path
    source_dtype: DType
    dtype: DType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One file of the output and its tensors, in the order of the index."""

    name: str
    tensors: tuple[OutTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Tensor bytes, without framing."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ExportLayout:
    """All files; ``index_name`` is that of the index of a folder of several, None without one.

    ``values`` maps the keys of chosen values to their names.
    """

    format: str
    files: tuple[ExportFile, ...]
    index_name: str | None
    values: Mapping[str, str]
    choice: Choice

    @property
    def tensors(self) -> list[OutTensor]:
        return [tensor for file in self.files for tensor in file.tensors]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def weight_map(self) -> dict[str, str]:
        return {tensor.name: file.name for file in self.files for tensor in file.tensors}

    def to_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "format": self.format,
            "files": [
                {"name": f.name, "num_bytes": f.num_bytes, "num_tensors": len(f.tensors)}
                for f in self.files
            ],
            "tensors": [
                {
                    "key": t.key,
                    "name": t.name,
                    "dtype": t.dtype.name,
                    "source_dtype": t.source_dtype.name,
                    "shape": list(t.shape),
                    "num_bytes": t.num_bytes,
                }
                for t in self.tensors
            ],
            "values": dict(self.values),
            "left_out": dict(choice.left_out),
            "stripped_prefix": choice.prefix or None,
            "num_wrapper_names_cleaned": choice.renamed,
        }


_NAMES = {
    "safetensors": ("model", ".safetensors", "model.safetensors.index.json"),
    "torch": ("pytorch_model", ".bin", "pytorch_model.bin.index.json"),
}


def plan_layout(
    index: Index,
    choice: Choice,
    *,
    format: str,
    single_file: str | None,
    max_file_num_bytes: int,
    dtype: DType | None,
) -> ExportLayout:
    """Lay out an export.

    ``single_file`` is the name of the one output file; None makes a Hugging Face folder that
    is split where a file would pass ``max_file_num_bytes``. ``dtype`` is what floating
    tensors are cast to; None keeps each one's own.
    """
    tensors = [
        _out_tensor(entry, choice, dtype)
        for key in choice.names
        if isinstance(entry := index.entries[key], TensorEntry)
    ]
    values = {
        key: name
        for key, name in choice.names.items()
        if not isinstance(index.entries[key], TensorEntry)
    }
    if single_file is not None:
        only = ExportFile(single_file, tuple(tensors))
        return ExportLayout(format, (only,), None, values, choice)
    stem, suffix, index_name = _NAMES[format]
    groups = _split(tensors, max_file_num_bytes)
    if len(groups) == 1:
        return ExportLayout(format, (ExportFile(stem + suffix, groups[0]),), None, values, choice)
    files = tuple(
        ExportFile(f"{stem}-{k:05d}-of-{len(groups):05d}{suffix}", group)
        for k, group in enumerate(groups, 1)
    )
    return ExportLayout(format, files, index_name, values, choice)


def _out_tensor(entry: TensorEntry, choice: Choice, dtype: DType | None) -> OutTensor:
    casts = dtype is not None and entry.dtype.kind == "float"
    target = dtype if casts and dtype is not None else entry.dtype
    key = entry.key
    return OutTensor(key, choice.names[key], choice.paths[key], entry.dtype, target, entry.shape)


def _split(tensors: list[OutTensor], max_num_bytes: int) -> list[tuple[OutTensor, ...]]:
    """Greedy, in order; a tensor larger than the maximum has a file of its own."""
    groups: list[list[OutTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_num_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    return [tuple(group) for group in groups]
