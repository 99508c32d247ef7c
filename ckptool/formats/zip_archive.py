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

    def framing_range(self, number: int) -> tuple[int, int]:
        """Start and end of what stands before the payload of that number.

        ``len(payloads)`` is what follows the last one.
        """
        start = 0
        if number:
            before = self.payloads[number - 1]
            start = self.payload_offset(number - 1) + self.records[before].num_bytes
        end = self.length if number == len(self.payloads) else self.payload_offset(number)
        return start, end

    def framing(self, number: int, crcs: Sequence[int]) -> bytes:
        """The bytes of ``framing_range``.

        ``crcs`` has the CRC-32 of the payload before it; for what follows the last payload,
        those of all.
        """
        first = self.payloads[number - 1] if number else 0
        parts = [descriptor(self.records[first], crc32=crcs[-1])] if number else []
        at = first + 1 if number else 0
        last = number == len(self.payloads)
        end = len(self.records) - 1 if last else self.payloads[number]
        for record, piece in zip(self.records[at:end], self.pieces[at:end], strict=True):
            parts += [piece, descriptor(record, crc32=record.crc32 or 0)]
        parts.append(self.pieces[end])
        if last:
            parts.append(self._ending(crcs))
        return b"".join(parts)

    def _ending(self, crcs: Sequence[int]) -> bytes:
        """Serialization id, directory and ends."""
        known = dict(zip(self.payloads, crcs, strict=True))
        *records, ident = (
            replace(record, crc32=known.get(index, record.crc32))
            for index, record in enumerate(self.records)
        )
        text = _serialization_id(records)
        ident = replace(ident, crc32=crc32(text))
        ends = end_records(
            directory_offset=self.directory_offset,
            directory_num_bytes=self.directory_num_bytes,
            num_records=len(self.records),
        )
        tail = descriptor(ident, crc32=crc32(text))
        return text + tail + directory([*records, ident]) + ends


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
