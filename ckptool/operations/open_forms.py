"""The files of a checkpoint folder -> its index, whichever of the known forms it has.

``.metadata`` wins over what ``ckpt.json`` and ``ckpt.index`` say; where they disagree with it,
that is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckptool.errors import CkptoolError, NoCheckpointError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_metadata import merge_rank_local, read_metadata
from ckptool.formats.partial_bytes import NeedMore
from ckptool.formats.safetensors_file import SafetensorsHeader, parse_header
from ckptool.formats.safetensors_shards import read_sharded_headers
from ckptool.layout import INDEX_NAME, MANIFEST_NAME, METADATA_NAME, step_number
from ckptool.manifest import Manifest, read_manifest
from ckptool.model import Chunk, Chunks, Entry, Extent, Index, TensorEntry
from ckptool.operations.ls import RANK_LOCAL, state_of
from ckptool.planning.findings import WARNING, Finding
from ckptool.storage.base import Store

if TYPE_CHECKING:
    from ckptool.formats.ckpt_index import IndexFile
    from ckptool.formats.payloads import Payloads

__all__ = ["Forms", "is_safetensors_folder", "read_forms"]

_HEAD_BYTES = 256 << 10
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Forms:
    """What the metadata files of one folder say."""

    index: Index
    manifest: Manifest | None = None
    findings: tuple[Finding, ...] = ()
    payloads: Mapping[str, Payloads] | None = None


def is_safetensors_folder(sizes: Mapping[str, int]) -> bool:
    """Whether a folder that is no DCP checkpoint has safetensors files of its own."""
    return any(name.endswith(_SAFETENSORS) and "/" not in name for name in sizes)


def read_forms(store: Store, sizes: Mapping[str, int]) -> Forms:
    """Read the index of a folder whose files have these sizes.

    Raises NoCheckpointError where none was committed.
    """
    if sizes.get(METADATA_NAME):
        return _read_committed(store, sizes)
    if state_of(sizes) == RANK_LOCAL:
        return Forms(_read_rank_local(store, sizes))
    if METADATA_NAME not in sizes and is_safetensors_folder(sizes):
        names = [n for n in sizes if n.endswith(_SAFETENSORS) and "/" not in n]
        return Forms(read_sharded_headers(_headers(store, sizes, names)))
    raise _not_committed(store, sizes)


def _read_committed(store: Store, sizes: Mapping[str, int]) -> Forms:
    names = [n for n in (METADATA_NAME, MANIFEST_NAME, INDEX_NAME) if sizes.get(n)]
    data = dict(zip(names, _read_whole(store, sizes, names), strict=True))
    metadata = data[METADATA_NAME]
    manifest, findings = _read_manifest(data.get(MANIFEST_NAME), metadata)
    file, more = _read_index(data.get(INDEX_NAME), metadata)
    index = read_metadata(metadata, name=METADATA_NAME) if file is None else file.index
    if _has_bare_items(index):
        index = _with_header_places(store, sizes, index)
    payloads = None if file is None else file.payloads
    return Forms(index, manifest, (*findings, *more), payloads)


def _read_manifest(
    data: bytes | None, metadata: bytes
) -> tuple[Manifest | None, Sequence[Finding]]:
    if data is None:
        return None, ()
    try:
        manifest = read_manifest(data)
    except CkptoolError as error:
        return None, [_disagrees(MANIFEST_NAME, f"cannot be read: {error.message}")]
    said = manifest.metadata
    return manifest, list(_compare(MANIFEST_NAME, metadata, said.num_bytes, said.crc32))


def _read_index(data: bytes | None, metadata: bytes) -> tuple[IndexFile | None, Sequence[Finding]]:
    """A ``ckpt.index`` that goes with ``.metadata``, None where there is none that does."""
    if data is None:
        return None, ()
    from ckptool.formats.ckpt_index import read_index

    try:
        file = read_index(data)
    except CkptoolError as error:
        return None, [_disagrees(INDEX_NAME, f"cannot be read: {error.message}")]
    said = file.metadata
    findings = list(_compare(INDEX_NAME, metadata, said.num_bytes, said.crc32))
    return (None if findings else file), findings


def _compare(name: str, metadata: bytes, num_bytes: int, crc: int | None) -> Iterator[Finding]:
    if num_bytes != len(metadata):
        what = f"belongs to a .metadata of {num_bytes} bytes, the one here has {len(metadata)}"
        yield _disagrees(name, what)
    elif crc is not None and crc != crc32(metadata):
        what = f"belongs to a .metadata with CRC-32 {crc:#010x}, this one's is "
        yield _disagrees(name, f"{what}{crc32(metadata):#010x}")


def _disagrees(name: str, what: str) -> Finding:
    message = f"{name} {what}; .metadata is believed"
    return Finding("metadata-differs", WARNING, message, file=name)


def _read_rank_local(store: Store, sizes: Mapping[str, int]) -> Index:
    names = [n for n in sizes if n.endswith(METADATA_NAME) and "/" not in n]
    names.sort(key=lambda n: (step_number(n) or 0, n))
    data = _read_whole(store, sizes, names)
    return merge_rank_local([read_metadata(d, name=n) for n, d in zip(names, data, strict=True)])


def _has_bare_items(index: Index) -> bool:
    """Whether the items are as long as their chunks and all start at 0.

    DCP's safetensors serialization records them so; the files' own headers know the places.
    """
    tensors = [t for t in index.tensors if len(t.chunks)]
    return bool(tensors) and all(
        not t.chunks.starts.any()
        and (t.chunks.lengths == t.chunks.sizes.prod(axis=1) * t.dtype.itemsize).all()
        for t in tensors
    )


def _with_header_places(store: Store, sizes: Mapping[str, int], index: Index) -> Index:
    """The index with each item's place taken from the header of its safetensors file."""
    named = {t.chunks.files[i] for t in index.tensors for i in t.chunks.file.tolist() if i >= 0}
    headers = _headers(store, sizes, sorted(n for n in named if sizes.get(n)))
    found = read_sharded_headers(headers)
    entries: dict[str, Entry] = dict(index.entries)
    for tensor in index.tensors:
        places = found.entries.get(tensor.key)
        items = {c.box: c.item for c in places.chunks} if isinstance(places, TensorEntry) else {}
        rows = [Chunk(c.box, items.get(c.box, c.item)) for c in tensor.chunks]
        chunks = Chunks.of(rows, num_dims=len(tensor.shape))
        entries[tensor.key] = replace(tensor, chunks=chunks)
    return replace(index, entries=entries, form="dcp-safetensors")


def _headers(
    store: Store, sizes: Mapping[str, int], names: Sequence[str]
) -> dict[str, SafetensorsHeader]:
    extents = [Extent(n, 0, min(sizes[n], _HEAD_BYTES)) for n in names]
    heads = store.read_many(extents)
    return {n: _header(store, n, h, sizes[n]) for n, h in zip(names, heads, strict=True)}


def _header(store: Store, name: str, head: bytes, num_bytes: int) -> SafetensorsHeader:
    try:
        while True:
            try:
                return parse_header(head, file_num_bytes=num_bytes)
            except NeedMore as more:
                head = store.read(name, start=0, end=more.head_num_bytes)
    except CkptoolError as error:
        raise type(error)(
            f"{name}: {error.message}", hint=error.hint, **{**error.facts, "file": name}
        ) from error


def _read_whole(store: Store, sizes: Mapping[str, int], names: Sequence[str]) -> Sequence[bytes]:
    return store.read_many([Extent(n, 0, sizes[n]) for n in names])


def _not_committed(store: Store, sizes: Mapping[str, int]) -> NoCheckpointError:
    shards = [n for n in sizes if n.endswith(".distcp")]
    what = "its .metadata is empty" if METADATA_NAME in sizes else "it has no .metadata"
    there = f"{len(shards)} shard files of {sum(sizes[n] for n in shards)} bytes are there"
    parent = store.url.rsplit("/", 1)[0]
    return NoCheckpointError(
        f"the save of {store.url} was not completed: {what}; {there}",
        hint=f"if no save is running, use an older step: ckptool ls {parent} lists them",
        url=store.url,
        state=state_of(sizes),
        files=sorted(sizes),
    )
