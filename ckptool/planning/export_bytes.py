"""The byte plan of an export: safetensors and torch files as segments. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ckptool.formats import torch_file
from ckptool.formats.safetensors_file import encode_header
from ckptool.planning.boxes import whole_box
from ckptool.planning.export import ExportFile, ExportLayout, OutTensor
from ckptool.planning.made import Recent
from ckptool.planning.plan import Check, Literal, Output, Plan, Segment, Tail
from ckptool.planning.sources import Source
from ckptool.planning.tensor_bytes import region_segments

__all__ = ["FileTail", "plan_safetensors", "plan_torch"]

_Part: TypeAlias = "Literal | Tail | OutTensor"


def plan_safetensors(
    layout: ExportLayout,
    *,
    sources: Mapping[str, Sequence[Source]],
    checks: Sequence[Check],
    metadata: Mapping[str, str],
) -> Plan:
    """Outputs of a safetensors export; ``sources`` by entry, ``checks`` theirs.

    Raises UnsupportedError naming a tensor whose dtype the format has no code for.
    """
    files: dict[str, Sequence[_Part]] = {}
    for file in layout.files:
        tensors = {tensor.name: tensor for tensor in file.tensors}
        header, offsets = encode_header(
            {name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata=metadata
        )
        parts: list[_Part] = [Literal(header)]
        parts += [tensors[name] for name in offsets]  # in the order in which the bytes stand
        files[file.name] = parts
    return Plan(_outputs(files, sources), checks)


@dataclass(frozen=True, slots=True)
class FileTail:
    """Closes records of a torch file once their CRC-32s are known."""

    tail: torch_file.Tail

    def __call__(self, crcs: tuple[int, ...]) -> bytes:
        return self.tail.encode(crcs)


def plan_torch(
    layout: ExportLayout,
    *,
    trees: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, bytes],
    sources: Mapping[str, Sequence[Source]],
    checks: Sequence[Check],
) -> Plan:
    """Outputs of a torch export; ``sources`` by entry, ``checks`` theirs.

    ``trees`` has per file name the nested dict that it holds, with TensorSpec leaves whose keys
    are entries; ``records`` has the bytes of tensors inside values, by the record that the
    value's TensorRefs name.
    """
    files = {file.name: _torch_parts(file, trees[file.name], records) for file in layout.files}
    return Plan(_outputs(files, sources), checks)


def _torch_parts(
    file: ExportFile, tree: Mapping[str, Any], records: Mapping[str, bytes]
) -> list[_Part]:
    tensors = {tensor.key: tensor for tensor in file.tensors}
    ranges: dict[str, tuple[int, int]] = {}
    parts: list[_Part] = []
    for segment in torch_file.plan_torch_file(tree).segments:
        if isinstance(segment, torch_file.Literal):
            parts.append(Literal(segment.data))
        elif isinstance(segment, torch_file.Payload):
            ranges[segment.key] = (segment.offset, segment.offset + segment.num_bytes)
            tensor = tensors.get(segment.key)
            parts.append(Literal(records[segment.key]) if tensor is None else tensor)
        else:
            needs = tuple(ranges[key] for key in segment.needs)
            parts.append(Tail(segment.num_bytes, needs, FileTail(segment)))
    return parts


def _outputs(
    files: Mapping[str, Sequence[_Part]], sources: Mapping[str, Sequence[Source]]
) -> tuple[Output, ...]:
    """The files; the segments of their tensors are made one tensor at a time."""
    make = Recent(_Blocks(tuple(files.values()), sources))
    return tuple(
        Output.in_blocks(
            key,
            (make(number, i, 0) for i in range(len(parts))),
            again=partial(make, number),
        )
        for number, (key, parts) in enumerate(files.items())
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The parts of files as segments, wherever they begin."""

    files: Sequence[Sequence[_Part]]
    sources: Mapping[str, Sequence[Source]]

    def __call__(self, file: int, number: int, start: int) -> Sequence[Segment]:
        part = self.files[file][number]
        if isinstance(part, OutTensor):
            box = whole_box(part.shape)
            return region_segments(part.key, box, self.sources[part.key], dtype=part.dtype)
        return [part] if part.num_bytes else []
