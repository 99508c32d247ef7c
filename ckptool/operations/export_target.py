"""Where an export goes, what it may be cast to, and whether it arrived: what every export asks."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from ckptool.dtypes import DType, dtype_named
from ckptool.errors import (
    NotEmptyError,
    ObjectMissingError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptool.formats.safetensors_file import parse_header
from ckptool.layout import JOURNAL_NAME, journal_key_for_file
from ckptool.operations.commit import refuse_unless_empty
from ckptool.planning.export import ExportLayout
from ckptool.planning.plan import Plan
from ckptool.storage.base import Store

__all__ = [
    "Destination",
    "cast_target",
    "check_written",
    "destination_of",
    "refuse_existing",
    "require_codes",
]

_SINGLE = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an export goes: ``name`` of the one file in ``folder``, or None for a folder."""

    folder: str
    name: str | None
    format: str

    @property
    def journal_key(self) -> str:
        return JOURNAL_NAME if self.name is None else journal_key_for_file(self.name)


def destination_of(dest_url: str, format: str | None, max_file_size: int | None) -> Destination:
    protocol, separator, path = dest_url.rpartition("://")
    head, slash, name = path.rpartition("/")
    suffix = posixpath.splitext(name)[1]
    if suffix not in _SINGLE:
        return Destination(dest_url, None, format or "safetensors")
    if max_file_size is not None:
        raise UsageError(
            f"--max-file-size splits a folder, but {dest_url} is one file",
            hint="name a folder, or leave --max-file-size out",
        )
    if format is not None and format != _SINGLE[suffix]:
        raise UsageError(
            f"--format {format} does not fit the ending of {dest_url}",
            hint=f"end the name in {'.safetensors' if format == 'safetensors' else '.pt'}",
        )
    folder = protocol + separator + (head or slash)
    return Destination(folder or ".", name, _SINGLE[suffix])


def refuse_existing(dest: Store, form: Destination) -> None:
    if form.name is None:
        refuse_unless_empty(dest)
        return
    try:
        dest.info(form.name)
    except ObjectMissingError:
        refuse_unless_empty(dest.child(form.name))
        return
    raise NotEmptyError(
        f"{dest.url_of(form.name)} exists already",
        hint="remove it first, or give another name",
        url=dest.url_of(form.name),
    )


def cast_target(name: str | None) -> DType | None:
    if name is None:
        return None
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    target = dtype_named(short.get(name, name))
    if target.kind != "float" or target.numpy is None:
        raise UnsupportedError(
            f"--dtype {name}: only floating dtypes can be cast to", hint="for instance bfloat16"
        )
    return target


def require_codes(layout: ExportLayout) -> None:
    if layout.format != "safetensors":
        return
    for tensor in layout.tensors:
        if tensor.dtype.safetensors is None:
            raise UnsupportedError(
                f"{tensor.key}: safetensors has no dtype {tensor.dtype}",
                hint=f"--exclude '{tensor.key}', or export to a .pt file",
                entry=tensor.key,
                dtype=tensor.dtype.name,
            )


def check_written(dest: Store, layout: ExportLayout, plan: Plan) -> None:
    """Reopen what was written: sizes as planned, headers that hold the tensors they should."""
    for file, output in zip(layout.files, plan.outputs, strict=True):
        info = dest.info(file.name)
        ok = info.num_bytes == output.num_bytes
        if ok and layout.format == "safetensors":
            start = dest.read(file.name, start=0, end=8)
            head = dest.read(file.name, start=0, end=8 + int.from_bytes(start, "little"))
            header = parse_header(head, file_num_bytes=info.num_bytes)
            ok = set(header.tensors) == {tensor.name for tensor in file.tensors}
        if not ok:
            raise StorageError(
                f"{dest.url_of(file.name)} does not read back as what was written",
                hint="remove it and run again",
                url=dest.url_of(file.name),
            )
