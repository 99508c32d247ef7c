"""The bytes of a stored zip, or its start and end alone -> records (see ``zip_records``).

No count or length is trusted: whatever contradicts the bytes, another structure or the length
is a DamagedError that says what and at which byte.
"""

from __future__ import annotations

import struct

from ckptool.errors import DamagedError, UnsupportedError
from ckptool.formats.crc import crc32
from ckptool.formats.partial_bytes import PartialBytes
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

__all__ = ["StoredZip"]

_ENCRYPTED = 0x1 | 0x40 | 0x2000
_MAX_DIRECTORY_NUM_BYTES = 1 << 28


class StoredZip:
    """A parsed directory, and the way from a record's name to its bytes.

    ``records`` are in the order of their offsets, by their name without the archive's folder.
    Raises DamagedError where the zip contradicts itself, UnsupportedError for compressed or
    encrypted records, NeedMore where bytes are missing.
    """

    def __init__(self, zip_bytes: PartialBytes) -> None:
        self._bytes = zip_bytes
        self.directory_offset, records = _read_directory(zip_bytes)
        self.records = {record.name: record for record in records}
        if len(self.records) != len(records):
            raise _damage("the zip directory names a record twice,", self.directory_offset)
        starts = [record.header_offset for record in records]
        self._limits = dict(zip(self.records, [*starts[1:], self.directory_offset], strict=True))
        for record in records:
            self._check_room(record, record.header_offset + LOCAL.size + len(record.full_name))

    def record(self, name: str) -> Record:
        """The record of that name; raises DamagedError where there is none."""
        if name not in self.records:
            raise _damage(f"no record {name!r} is in the zip directory", self.directory_offset)
        return self.records[name]

    def locate(self, name: str) -> int:
        """Where the bytes of a record start.

        Directory, local header and data descriptor must say the same.
        """
        record = self.record(name)
        start = _read_local(self._bytes, record)
        self._check_room(record, start)
        if record.has_descriptor:
            _check_descriptor(self._bytes, record, start + record.num_bytes)
        return start

    def read(self, name: str, *, max_num_bytes: int | None = None) -> bytes:
        """The bytes of a record, which must have its CRC-32 where the writer left one."""
        record = self.record(name)
        if max_num_bytes is not None and record.num_bytes > max_num_bytes:
            raise _damage(f"record {name!r} claims {record.num_bytes} bytes", record.header_offset)
        start = self.locate(name)
        data = self._bytes.take(start, record.num_bytes, f"record {name!r}")
        if record.crc32 is not None and crc32(data) != record.crc32:
            raise DamagedError(
                f"record {name!r} at byte {start} has CRC-32 {crc32(data):#010x}, "
                f"{record.crc32:#010x} was stored with it",
                offset=start,
                record=name,
            )
        return data

    def _check_room(self, record: Record, payload_offset: int) -> None:
        """The record ends before the next one, or the directory, begins."""
        end = payload_offset + record.num_bytes + record.num_descriptor_bytes
        if end > self._limits[record.name]:
            raise _damage(
                f"record {record.name!r} ends at byte {end}, beyond what follows it",
                self._limits[record.name],
            )


def _read_directory(zip_bytes: PartialBytes) -> tuple[int, list[Record]]:
    """Where the directory starts, and its records in the order of their offsets."""
    start, num_bytes, num_records = _read_ends(zip_bytes)
    if num_bytes > _MAX_DIRECTORY_NUM_BYTES:
        raise _damage(f"the zip directory claims {num_bytes} bytes", start)
    data = zip_bytes.take(start, num_bytes, "the zip directory")
    records: list[Record] = []
    at = 0
    while at < num_bytes:
        record, at = _read_central(data, at, start)
        records.append(record)
    if len(records) != num_records:
        raise _damage(
            f"the zip directory has {len(records)} records, its end says {num_records}", start
        )
    records.sort(key=lambda record: record.header_offset)
    return start, records


def _read_ends(zip_bytes: PartialBytes) -> tuple[int, int, int]:
    """Offset and length of the directory, and how many records it has."""
    at = zip_bytes.length - END.size
    if at < 0:
        raise _damage(f"{zip_bytes.length} bytes are too few for a zip", 0)
    end = END.unpack(zip_bytes.take(at, END.size, "the zip end record"))
    magic, disk, first_disk, here, num_records, num_bytes, start, num_comment = end
    if magic != END_MAGIC or num_comment:
        raise _damage("no zip end record is", at)
    if disk or first_disk or here != num_records:
        raise _damage("the zip end record speaks of several disks", at)
    found = (start, num_bytes, num_records)
    locator_at = at - LOCATOR.size
    if locator_at >= 0:
        locator = zip_bytes.take(locator_at, LOCATOR.size, "the zip64 locator")
        if locator[:4] == LOCATOR_MAGIC:
            found = _read_end64(zip_bytes, locator, locator_at)
            limits = (MAX32, MAX32, MAX16)
            if (start, num_bytes, num_records) != tuple(map(min, found, limits)):
                raise _damage("the zip end record contradicts the zip64 end record", at)
            return found
    if sum(found[:2]) != at:
        raise _damage("the zip directory does not end where the zip end record is,", at)
    return found


def _read_end64(zip_bytes: PartialBytes, locator: bytes, locator_at: int) -> tuple[int, int, int]:
    _, disk, at, num_disks = LOCATOR.unpack(locator)
    if disk or num_disks > 1 or at != locator_at - END64.size:
        raise _damage(f"the zip64 locator points at byte {at} of disk {disk}", locator_at)
    end = END64.unpack(zip_bytes.take(at, END64.size, "the zip64 end record"))
    magic, size, _, _, disk, first_disk, here, num_records, num_bytes, start = end
    if magic != END64_MAGIC or size != END64.size - 12:
        raise _damage("no zip64 end record is", at)
    if disk or first_disk or here != num_records:
        raise _damage("the zip64 end record speaks of several disks", at)
    if start + num_bytes != at:
        raise _damage("the zip directory does not end where the zip64 end record is,", at)
    return start, num_bytes, num_records


def _read_central(data: bytes, at: int, base: int) -> tuple[Record, int]:
    """The directory's record at ``at``, and where the next one begins."""
    if at + CENTRAL.size > len(data):
        raise _damage("the zip directory ends within a record", base + at)
    fields = CENTRAL.unpack_from(data, at)
    magic, _, _, flags, method, _, _, crc, stored, size, num_name, num_extra = fields[:12]
    num_comment, disk, _, _, offset = fields[12:]
    if magic != CENTRAL_MAGIC:
        raise _damage("no directory record is", base + at)
    extra_at = at + CENTRAL.size + num_name
    end = extra_at + num_extra + num_comment
    if end > len(data):
        raise _damage("the zip directory ends within a record", base + at)
    try:
        full_name = data[at + CENTRAL.size : extra_at].decode()
    except UnicodeDecodeError:
        raise _damage("the name of a record is not UTF-8", base + at) from None
    _check_flags(full_name, flags, method, base + at)
    if MAX32 in (size, stored, offset):
        extra = data[extra_at : extra_at + num_extra]
        size, stored, offset = _read_zip64(extra, (size, stored, offset), base + extra_at)
    if stored != size or disk:
        raise _damage(f"record {full_name!r} has {size} bytes, {stored} on disk {disk},", base + at)
    known = crc if crc or not size else None
    return Record(full_name, offset, size, known, bool(flags & HAS_DESCRIPTOR)), end


def _read_zip64(extra: bytes, small: tuple[int, ...], base: int) -> list[int]:
    """The values of ``small``, those that did not fit 32 bits from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<HH", extra, at)
        field = extra[at + 4 : at + 4 + num_bytes]
        at += 4 + num_bytes
        if kind == 1:
            if len(field) != num_bytes or num_bytes != 8 * small.count(MAX32):
                raise _damage(f"a zip64 extra field of {num_bytes} bytes is", base)
            big = iter(struct.unpack(f"<{num_bytes // 8}Q", field))
            return [next(big) if value == MAX32 else value for value in small]
    raise _damage("no zip64 extra field is", base)


def _read_local(zip_bytes: PartialBytes, record: Record) -> int:
    """Where the bytes of ``record`` start, from a local header that agrees with it."""
    at = record.header_offset
    expected = record.full_name.encode()
    header = zip_bytes.take(at, LOCAL.size + len(expected), "a local zip header")
    fields = LOCAL.unpack_from(header)
    magic, _, flags, method, _, _, crc, stored, size, num_name, num_extra = fields
    if magic != LOCAL_MAGIC:
        raise _damage(f"no local header of record {record.name!r} is", at)
    if num_name != len(expected) or header[LOCAL.size :] != expected:
        raise _damage(f"the local header of record {record.name!r} has another name", at)
    _check_flags(record.full_name, flags, method, at)
    told = (crc or None, stored, size)
    size32 = min(record.num_bytes, MAX32)
    wanted = (record.crc32 or None, size32, size32)
    if bool(flags & HAS_DESCRIPTOR) != record.has_descriptor or (
        told not in ((None, 0, 0), wanted) if record.has_descriptor else told != wanted
    ):
        raise _damage(f"the local header contradicts the directory on record {record.name!r}", at)
    return at + len(header) + int(num_extra)


def _check_descriptor(zip_bytes: PartialBytes, record: Record, at: int) -> None:
    """The data descriptor at ``at`` repeats what the directory says."""
    what = f"the data descriptor of record {record.name!r}"
    form = record.descriptor
    magic, crc, stored, size = form.unpack(zip_bytes.take(at, form.size, what))
    if magic != DESCRIPTOR_MAGIC:
        raise _damage(f"no data descriptor of record {record.name!r} is", at)
    if (crc, stored, size) != (record.crc32 or 0, record.num_bytes, record.num_bytes):
        raise _damage(
            f"{what} says {size} bytes and CRC-32 {crc:#010x}, the directory "
            f"{record.num_bytes} and {record.crc32 or 0:#010x},",
            at,
        )


def _check_flags(full_name: str, flags: int, method: int, at: int) -> None:
    if flags & _ENCRYPTED:
        raise UnsupportedError(f"record {full_name!r} is encrypted at byte {at}", offset=at)
    if method != STORED:
        raise UnsupportedError(
            f"record {full_name!r} is compressed (zip method {method}) at byte {at}", offset=at
        )
    if flags & ~(UTF8 | HAS_DESCRIPTOR):
        raise _damage(f"record {full_name!r} has zip flags {flags:#x}", at)


def _damage(what: str, at: int) -> DamagedError:
    return DamagedError(f"{what} at byte {at}", offset=at)
