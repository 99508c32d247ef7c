"""Names and sizes of records -> every byte of a ``torch.save`` zip but the payloads.

All offsets and the length are fixed before the first payload byte is read; CRC-32s of the
payloads are needed only for what follows them, so payloads may be written in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptool.formats.crc import crc32
from ckptool.formats.zip_records import END, END64, LOCATOR, Record
from ckptool.formats.zip_writing import descriptor, directory, end_records, local_header, new_record

__all__ = ["ALIGNMENT", "Archive", "plan_archive", "torch_records"]

ALIGNMENT = 64

_FOLDER = "archive/"
_ID_NAME = ".data/serialization_id"
_ID_NUM_BYTES = 40
# what libstdc++ gives for the names of a tensor's records and of a value's
_NAME_HASHES: dict[tuple[str, ...], int] = {
    ("data/0",): 15728199511854643026,
    (): 2908468677762923104,
}
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Archive:
    """A planned zip; picklable, since it holds bytes and numbers alone.

    ``pieces`` has each record's header and, where they are known, its bytes; ``payloads``
    says which records get their bytes later. Their CRC-32 stands as None in ``records``.
    """

    records: tuple[Record, ...]
    pieces: tuple[bytes, ...]
    payloads: tuple[int, ...]
    directory_offset: int
    directory_num_bytes: int

    @property
    def length(self) -> int:
        ends = END64.size + LOCATOR.size + END.size
        return self.directory_offset + self.directory_num_bytes + ends

    def payload_offset(self, number: int) -> int:
        """Where the bytes of the payload of that number stand."""
        index = self.payloads[number]
        return self.records[index].header_offset + len(self.pieces[index])

    @property
    def head(self) -> bytes:
        """All that stands before the first payload; the whole zip where there is none."""
        if not self.payloads:
            return self._fixed(0, len(self.records) - 1) + self._closing({})
        return self._fixed(0, self.payloads[0])

    def after(self, number: int) -> Between | Ending:
        """What stands behind the payload of that number: bytes that need CRC-32s."""
        index = self.payloads[number]
        if number + 1 == len(self.payloads):
            return Ending(self)
        return Between(self.records[index], self._fixed(index + 1, self.payloads[number + 1]))

    def ending(self, crcs: Sequence[int]) -> bytes:
        """All that stands behind the last payload; ``crcs`` are those of all payloads."""
        last = self.payloads[-1]
        fixed = self._fixed(last + 1, len(self.records) - 1)
        closing = self._closing(dict(zip(self.payloads, crcs, strict=True)))
        return descriptor(self.records[last], crc32=crcs[-1]) + fixed + closing

    def _closing(self, crcs: Mapping[int, int]) -> bytes:
        """Serialization id, directory and ends."""
        *records, ident = (
            replace(record, crc32=crcs.get(index, record.crc32))
            for index, record in enumerate(self.records)
        )
        text = _serialization_id(records)
        ident = replace(ident, crc32=crc32(text))
        ends = end_records(
            directory_offset=self.directory_offset,
            directory_num_bytes=self.directory_num_bytes,
            num_records=len(self.records),
        )
        closed = text + descriptor(ident, crc32=crc32(text))
        return closed + directory([*records, ident]) + ends

    def _fixed(self, start: int, end: int) -> bytes:
        """Records from ``start`` (inclusive) to ``end`` (exclusive), and the header of ``end``."""
        parts = []
        for record, piece in zip(self.records[start:end], self.pieces[start:end], strict=True):
            parts += [piece, descriptor(record, crc32=record.crc32 or 0)]
        return b"".join([*parts, self.pieces[end]])


@dataclass(frozen=True, slots=True)
class Between:
    """What stands between two payloads; needs the CRC-32 of the first."""

    record: Record
    fixed: bytes

    @property
    def num_bytes(self) -> int:
        return self.record.num_descriptor_bytes + len(self.fixed)

    def __call__(self, crcs: Sequence[int]) -> bytes:
        return descriptor(self.record, crc32=crcs[0]) + self.fixed


@dataclass(frozen=True, slots=True)
class Ending:
    """What stands behind the last payload; needs the CRC-32s of all."""

    archive: Archive

    @property
    def num_bytes(self) -> int:
        archive = self.archive
        last = archive.records[archive.payloads[-1]]
        return archive.length - archive.payload_offset(-1) - last.num_bytes

    def __call__(self, crcs: Sequence[int]) -> bytes:
        return self.archive.ending(crcs)


def torch_records(
    data_pkl: bytes, storages: Mapping[str, bytes | int]
) -> list[tuple[str, bytes | int]]:
    """The records that torch 2.13 writes, but for the last two, in its order.

    ``storages`` has the bytes, or their number, of each record ``data/{name}``.
    """
    return [
        ("data.pkl", data_pkl),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % ALIGNMENT),
        ("byteorder", b"little"),
        *((f"data/{name}", content) for name, content in storages.items()),
    ]


def plan_archive(contents: Sequence[tuple[str, bytes | int]]) -> Archive:
    """Lay out records by name: bytes that are known, or the size of a payload that is not."""
    records: list[Record] = []
    pieces: list[bytes] = []
    payloads: list[int] = []
    at = 0
    for name, content in [*contents, ("version", b"3\n"), (_ID_NAME, _ID_NUM_BYTES)]:
        if isinstance(content, int):
            num_bytes, crc, data = content, None, b""
            payloads.append(len(records))
        else:
            num_bytes, crc, data = len(content), crc32(content), content
        record = new_record(_FOLDER + name, offset=at, num_bytes=num_bytes, crc32=crc)
        header = local_header(record, alignment=ALIGNMENT)
        records.append(record)
        pieces.append(header + data)
        at += len(header) + record.num_bytes + record.num_descriptor_bytes
    return Archive(
        records=tuple(records),
        pieces=tuple(pieces),
        payloads=tuple(payloads[:-1]),  # the last is the serialization id
        directory_offset=at,
        directory_num_bytes=len(directory(records)),
    )


def _serialization_id(records: Sequence[Record]) -> bytes:
    """A fingerprint of names and CRC-32s, 20 digits each.

    torch hashes names in the order of a C++ hash set, which is only worth knowing for the
    names that nearly every file has; other sets get a hash of our own, in their order.
    """
    tensors = tuple(record.name for record in records if record.name.startswith("data/"))
    names = _NAME_HASHES.get(tensors)
    if names is None:
        names = _combined([crc32(record.name.encode()) for record in records])
    crcs = [record.crc32 or 0 for record in records if record.num_bytes]
    return b"%020d%020d" % (names, _combined(crcs))


def _combined(values: Sequence[int]) -> int:
    """Boost's hash_combine over 64-bit values."""
    seed = 0
    for value in values:
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK64
    return seed
