"""The byte plan of an export: safetensors and torch files as segments. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.formats import torch_file
from ckptool.formats.safetensors_file import encode_header
from ckptool.model import Box
from ckptool.planning.boxes import whole_box
from ckptool.planning.export import ExportFile, ExportLayout, OutTensor
from ckptool.planning.plan import Literal, Output, Plan, Segment, Tail
from ckptool.planning.sources import Source
from ckptool.planning.tensor_bytes import region_segments

__all__ = ["FileTail", "plan_safetensors", "plan_torch"]


def plan_safetensors(
    layout: ExportLayout, *, sources: Mapping[str, Sequence[Source]], metadata: Mapping[str, str]
) -> Plan:
    """Outputs of a safetensors export; ``sources`` by entry.

    Raises UnsupportedError naming a tensor whose dtype the format has no code for.
    """
    outputs = []
    for file in layout.files:
        tensors = {tensor.name: tensor for tensor in file.tensors}
        header, offsets = encode_header(
            {name: (t.dtype, t.shape) for name, t in tensors.items()}, metadata=metadata
        )
        segments: list[Segment] = [Literal(header)]
        for name in offsets:  # in the order in which the bytes stand
            segments += _tensor_segments(tensors[name], sources)
        outputs.append(Output.of(file.name, [s for s in segments if s.num_bytes]))
    return Plan(tuple(outputs), _checks(sources))


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
) -> Plan:
    """Outputs of a torch export.

    ``trees`` has per file name the nested dict that it holds, with TensorSpec leaves whose keys
    are entries; ``records`` has the bytes of tensors inside values, by the record that the
    value's TensorRefs name.
    """
    outputs = [
        Output.of(file.name, _torch_segments(file, trees[file.name], records, sources))
        for file in layout.files
    ]
    return Plan(tuple(outputs), _checks(sources))


def _torch_segments(
    file: ExportFile,
    tree: Mapping[str, Any],
    records: Mapping[str, bytes],
    sources: Mapping[str, Sequence[Source]],
) -> list[Segment]:
    tensors = {tensor.key: tensor for tensor in file.tensors}
    ranges: dict[str, tuple[int, int]] = {}
    segments: list[Segment] = []
    for segment in torch_file.plan_torch_file(tree).segments:
        if isinstance(segment, torch_file.Literal):
            segments.append(Literal(segment.data))
        elif isinstance(segment, torch_file.Payload):
            ranges[segment.key] = (segment.offset, segment.offset + segment.num_bytes)
            if segment.key in tensors:
                segments += _tensor_segments(tensors[segment.key], sources)
            else:
                segments.append(Literal(records[segment.key]))
        else:
            needs = tuple(ranges[key] for key in segment.needs)
            segments.append(Tail(segment.num_bytes, needs, FileTail(segment)))
    return [segment for segment in segments if segment.num_bytes]


def _tensor_segments(tensor: OutTensor, sources: Mapping[str, Sequence[Source]]) -> list[Segment]:
    box: Box = whole_box(tensor.shape)
    return region_segments(tensor.key, box, sources[tensor.key], dtype=tensor.dtype)


def _checks(sources: Mapping[str, Sequence[Source]]) -> tuple[Any, ...]:
    checks = [source.check for rows in sources.values() for source in rows]
    return tuple(sorted(checks, key=lambda check: check.id))
