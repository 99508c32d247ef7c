"""An Index -> the bytes of a ``.metadata`` that stock ``dcp.load`` (torch 2.4 to 2.14) reads.

Emits the opcodes that Python's pickler would write for torch's own objects: protocol 4, in
frames of about 64 KiB, every global and attribute name once and then from the memo. Linear in
the number of chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from ckptool.dtypes import DType
from ckptool.formats.plain_encoder import int_opcode
from ckptool.model import Chunks, Entry, Index, Ints, Path, TensorEntry

__all__ = ["write_metadata"]

_DCP = "torch.distributed.checkpoint"
_FRAME_BYTES = 64 * 1024
_MAX_CACHED = 100_000
_BATCH = 1000  # items between marks, as Python's pickler has them
_BEGIN = b")\x81\x94}\x94("
_CHUNK = (f"{_DCP}.metadata", "ChunkStorageMetadata")
_KEY = (f"{_DCP}.metadata", "MetadataIndex")
_INFO = (f"{_DCP}.filesystem", "_StorageInfo")
_SIZE = ("torch", "Size")
_TUPLE_CODES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def write_metadata(index: Index, *, version: str | None = None) -> bytes:
    """The bytes of a ``.metadata`` that says what ``index`` says.

    ``version`` is torch's own format version, the index's where it is None. Chunks without an
    item are listed and not stored, as they were.
    """
    writer = _Writer()
    entries = index.entries
    writer.begin_object(f"{_DCP}.metadata", "Metadata")
    writer.emit(b"(")
    writer.text("state_dict_metadata")
    writer.listed(entries)
    writer.text("planner_data")
    writer.paths(entries)
    writer.text("storage_data")
    writer.storage(entries)
    writer.text("storage_meta")
    writer.emit(b"N")
    writer.text("version")
    said = index.version if version is None else version
    writer.emit(b"N") if said is None else writer.text(said)
    writer.emit(b"ub.")
    return writer.finish()


class _Writer:
    """Opcodes, gathered in frames; knows which memo slot holds what."""

    def __init__(self) -> None:
        self.frames: list[bytes] = [b"\x80\x04"]
        self.out: list[bytes] = []
        self.num_bytes = 0
        self.num_put = 0
        self.num_stored = 0
        self.slots: dict[tuple[str, ...], bytes] = {}
        self.dims: dict[tuple[int, ...], bytes] = {}

    def emit(self, opcodes: bytes) -> None:
        self.out.append(opcodes)
        self.num_bytes += len(opcodes)
        if self.num_bytes >= _FRAME_BYTES:
            self.end_frame()

    def end_frame(self) -> None:
        body = b"".join(self.out)
        self.frames.append(b"\x95" + struct.pack("<Q", len(body)) + body)
        self.out, self.num_bytes = [], 0

    def finish(self) -> bytes:
        self.end_frame()
        return b"".join(self.frames)

    def put(self, key: tuple[str, ...] | None = None) -> None:
        """Memoize what is on top; ``key`` names it for later."""
        if key is not None:
            index = self.num_put
            short = index < 256
            self.slots[key] = b"h" + bytes([index]) if short else b"j" + struct.pack("<I", index)
        self.num_put += 1
        self.emit(b"\x94")

    def text(self, text: str) -> None:
        if (text,) in self.slots:
            self.emit(self.slots[text,])
            return
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 256:
            self.emit(b"\x8c" + bytes([len(raw)]) + raw)
        else:
            self.emit(b"X" + struct.pack("<I", len(raw)) + raw)
        self.put((text,))

    def find(self, module: str, name: str) -> None:
        key = (module, name)
        if key in self.slots:
            self.emit(self.slots[key])
            return
        self.text(module)
        self.text(name)
        self.emit(b"\x93")
        self.put(key)

    def begin_object(self, module: str, name: str) -> None:
        """An instance without state, and an empty dict for its state."""
        self.find(module, name)
        self.emit(b")\x81")
        self.put()
        self.emit(b"}")
        self.put()

    def listed(self, entries: Mapping[str, Entry]) -> None:
        self.emit(b"}")
        self.put()
        for key, entry in entries.items():
            self.text(key)
            if isinstance(entry, TensorEntry):
                self.tensor(entry)
            else:
                self.find(f"{_DCP}.metadata", "BytesStorageMetadata")
                self.emit(b")\x81")
                self.put()
            self.emit(b"s")

    def tensor(self, entry: TensorEntry) -> None:
        self.begin_object(f"{_DCP}.metadata", "TensorStorageMetadata")
        self.emit(b"(")
        self.text("properties")
        self.properties(entry.dtype)
        self.text("size")
        self.size(entry.shape)
        self.text("chunks")
        self.emit(b"]")
        self.put()
        self.boxes(entry.chunks)
        self.emit(b"ub")

    def properties(self, dtype: DType) -> None:
        """TensorProperties' own state: dtype, layout, requires_grad, memory format, pin_memory."""
        self.find(f"{_DCP}.metadata", "TensorProperties")
        self.emit(b")\x81")
        self.put()
        self.emit(b"(")
        self.find("torch", dtype.name)
        self.once(("torch.serialization", "_get_layout"), "torch.strided")
        self.emit(b"\x89")
        self.once((f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), 0)
        self.emit(b"\x89t")
        self.put()
        self.emit(b"b")

    def once(self, function: tuple[str, str], argument: str | int) -> None:
        """The result of a call, kept in the memo."""
        key = (*function, str(argument))
        if key in self.slots:
            self.emit(self.slots[key])
            return
        self.find(*function)
        if isinstance(argument, str):
            self.text(argument)
        else:
            self.emit(int_opcode(argument))
        self.emit(b"\x85")
        self.put()
        self.emit(b"R")
        self.put(key)

    def size(self, dims: Sequence[int]) -> None:
        self.find(*_SIZE)
        self.emit(self.size_call(tuple(dims)))
        self.num_put += _puts_of_size(len(dims))

    def size_call(self, dims: tuple[int, ...]) -> bytes:
        """The opcodes after ``torch.Size`` itself."""
        opcodes = self.dims.get(dims)
        if opcodes is None:
            if len(self.dims) > _MAX_CACHED:
                self.dims.clear()
            opcodes = self.dims[dims] = _tuple(dims) + b"\x85\x94R\x94"
        return opcodes

    def boxes(self, chunks: Chunks) -> None:
        kind, size = self.slot(_CHUNK), self.slot(_SIZE)
        begin = kind + _BEGIN + self.slot(("offsets",)) + size
        middle = self.slot(("sizes",)) + size
        num_put = 2 + 2 * _puts_of_size(chunks.offsets.shape[1])
        self.emit(b"(")
        rows = zip(chunks.offsets.tolist(), chunks.sizes.tolist(), strict=True)
        for number, (offsets, sizes) in enumerate(rows):
            if number and not number % _BATCH:
                self.emit(b"e(")
            first, second = self.size_call(tuple(offsets)), self.size_call(tuple(sizes))
            self.emit(begin + first + middle + second + b"ub")
            self.num_put += num_put
        self.emit(b"e")

    def slot(self, key: tuple[str, ...]) -> bytes:
        """The opcode that gets a text or a global from the memo; puts it there if need be."""
        if key not in self.slots:
            self.text(key[0]) if len(key) == 1 else self.find(key[0], key[1])
            self.emit(b"0")
        return self.slots[key]

    def paths(self, entries: Mapping[str, Entry]) -> None:
        paths = {key: entry.path for key, entry in entries.items() if entry.path is not None}
        if not paths:
            self.emit(b"N")
            return
        self.emit(b"}")
        self.put()
        for key, path in paths.items():
            self.text(key)
            self.path(path)
            self.emit(b"s")

    def path(self, path: Path) -> None:
        if not path:
            self.emit(b")")
            return
        self.emit(b"(")
        for part in path:
            self.text(part) if isinstance(part, str) else self.emit(int_opcode(part))
        self.emit(b"t")
        self.put()

    def storage(self, entries: Mapping[str, Entry]) -> None:
        self.emit(b"}")
        self.put()
        self.emit(b"(")
        for key, entry in entries.items():
            if isinstance(entry, TensorEntry):
                self.stored_chunks(key, entry.chunks)
            elif entry.item is not None:
                self.emit(
                    self.slot(_KEY) + _BEGIN + self.slot(("fqn",)) + self.slot((key,)) + b"ub"
                )
                self.num_put += 2
                item = entry.item
                self.info(item.file, item.offset, item.length, item.transforms)
        self.emit(b"u")

    def stored_chunks(self, key: str, chunks: Chunks) -> None:
        """Chunks without elements first: of two at the same offsets, torch keeps the last."""
        stored = np.flatnonzero(chunks.file >= 0)
        filled = np.all(chunks.sizes[stored] != 0, axis=1)
        rows = stored[np.argsort(filled, kind="stable")]
        begin = self.slot(_KEY) + _BEGIN + self.slot(("fqn",)) + self.slot((key,))
        begin += self.slot(("index",))
        middle = self.slot(("offset",)) + self.slot(_SIZE)
        num_put = 2 + _puts_of_size(chunks.offsets.shape[1])
        wrapped = [0] * len(rows) if chunks.transform is None else chunks.transform[rows].tolist()
        columns = (chunks.file[rows], chunks.starts[rows], chunks.lengths[rows])
        numbers = zip(
            rows.tolist(), chunks.offsets[rows].tolist(), *map(_list, columns), wrapped, strict=True
        )
        for row, offsets, file, start, length, transform in numbers:
            call = self.size_call(tuple(offsets))
            self.emit(begin + int_opcode(row) + middle + call + b"ub")
            self.num_put += num_put
            self.info(chunks.files[file], start, length, chunks.transforms[transform])

    def info(self, file: str, offset: int, length: int, transforms: tuple[str, ...]) -> None:
        self.emit(
            self.slot(_INFO) + _BEGIN + self.slot(("relative_path",)) + self.slot((file,))
            + self.slot(("offset",)) + int_opcode(offset)
            + self.slot(("length",)) + int_opcode(length)
        )  # fmt: skip
        self.num_put += 2
        if transforms:
            self.text("transform_descriptors")
            self.emit(b"]")
            self.put()
            for name in transforms:
                self.text(name)
                self.emit(b"a")
        self.emit(b"ub")
        self.num_stored += 1
        if not self.num_stored % _BATCH:
            self.emit(b"u(")


def _list(column: Ints) -> list[int]:
    numbers: list[int] = column.tolist()
    return numbers


def _puts_of_size(num_dims: int) -> int:
    """Memo slots of a torch.Size: itself, its arguments, and the tuple of dims if not empty."""
    return 3 if num_dims else 2


def _tuple(dims: tuple[int, ...]) -> bytes:
    if not dims:
        return b")"
    ints = b"".join(map(int_opcode, dims))
    return ints + _TUPLE_CODES[len(dims)] + b"\x94" if len(dims) < 4 else b"(" + ints + b"t\x94"
