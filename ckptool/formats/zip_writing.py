"""Records -> the bytes around them, as ``torch.save`` lays them out (see ``zip_records``)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptool.formats.zip_records import (
    CENTRAL,
    CENTRAL_MAGIC,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
    MAX16,
    MAX32,
    STORED,
    UTF8,
    Record,
)

__all__ = ["descriptor", "directory", "end_records", "local_header", "new_record"]


def new_record(full_name: str, *, offset: int, num_bytes: int, crc32: int | None) -> Record:
    """A record whose header will stand at ``offset``; torch gives empty ones no descriptor."""
    return Record(full_name, offset, num_bytes, crc32, num_bytes > 0)


def local_header(record: Record, *, alignment: int) -> bytes:
    """The header of ``record``, padded so that its bytes start at a multiple of ``alignment``."""
    name = record.full_name.encode()
    # torch does not know the stored size yet when it writes this header: it says 0
    big = _zip64_field(record, num_stored_bytes=0)
    start = record.header_offset + LOCAL.size + len(name) + len(big) + 4
    padding = -start % alignment
    extra = big + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    sizes = (len(name), len(extra))
    head = LOCAL.pack(LOCAL_MAGIC, 0, _flags(record), STORED, 0, 0, 0, 0, 0, *sizes)
    return head + name + extra


def descriptor(record: Record, *, crc32: int) -> bytes:
    """What follows the bytes of ``record``; nothing where it is empty."""
    if not record.has_descriptor:
        return b""
    return record.descriptor.pack(DESCRIPTOR_MAGIC, crc32, record.num_bytes, record.num_bytes)


def directory(records: Sequence[Record]) -> bytes:
    """The directory of ``records``, in the order given."""
    return b"".join(map(_central, records))


def end_records(*, directory_offset: int, directory_num_bytes: int, num_records: int) -> bytes:
    """What follows the directory: zip64 end, its locator, end."""
    where = (directory_num_bytes, directory_offset)
    counts = (num_records, num_records)
    end64 = END64.pack(END64_MAGIC, END64.size - 12, 0x031E, 45, 0, 0, *counts, *where)
    locator = LOCATOR.pack(LOCATOR_MAGIC, 0, directory_offset + directory_num_bytes, 1)
    few = (min(num_records, MAX16),) * 2
    end = END.pack(END_MAGIC, 0, 0, *few, *(min(value, MAX32) for value in where), 0)
    return end64 + locator + end


def _central(record: Record) -> bytes:
    name = record.full_name.encode()
    extra = _zip64_field(record, num_stored_bytes=record.num_bytes)
    sizes = (min(record.num_bytes, MAX32),) * 2
    offset = min(record.header_offset, MAX32)
    head = CENTRAL.pack(
        *(CENTRAL_MAGIC, 0, 0, _flags(record), STORED, 0, 0, record.crc32 or 0),
        *(*sizes, len(name), len(extra), 0, 0, 0, 0, offset),
    )
    return head + name + extra


def _zip64_field(record: Record, *, num_stored_bytes: int) -> bytes:
    """The extra field with what does not fit 32 bits, empty where all fits."""
    values = []
    if record.num_bytes >= MAX32:
        values += [record.num_bytes, num_stored_bytes]
    if record.header_offset >= MAX32:
        values.append(record.header_offset)
    if not values:
        return b""
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _flags(record: Record) -> int:
    return UTF8 | (HAS_DESCRIPTOR if record.has_descriptor else 0)
