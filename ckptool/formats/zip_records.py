"""The zips that ``torch.save`` writes: what their records look like; nothing is deflated.

Each record is a local header (30 bytes, name, extra field), its bytes, and, unless it is
empty, a data descriptor with CRC-32 and size; the local header has zeros in their place. The
directory at the end repeats all of it, then come the zip64 end, its locator and the end.
Beyond 4 GiB (of a record, or before it) sizes and offsets move to a zip64 extra field and
descriptors have 64-bit sizes. An extra field "FB" pads each record to an aligned start.

Sources: APPNOTE 6.3 (PKWARE) 4.3 and 4.5.3; PyTorch's PyTorchStreamWriter for the padding.
Offsets count from the start of the zip, which for an item is the item's own start.
``zip_reading`` parses these structures and ``zip_writing`` builds them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "CENTRAL",
    "CENTRAL_MAGIC",
    "DESCRIPTOR",
    "DESCRIPTOR64",
    "DESCRIPTOR_MAGIC",
    "END",
    "END64",
    "END64_MAGIC",
    "END_MAGIC",
    "HAS_DESCRIPTOR",
    "LOCAL",
    "LOCAL_MAGIC",
    "LOCATOR",
    "LOCATOR_MAGIC",
    "MAX16",
    "MAX32",
    "STORED",
    "UTF8",
    "Record",
]

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
DESCRIPTOR = struct.Struct("<4sIII")
DESCRIPTOR64 = struct.Struct("<4sIQQ")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")

LOCAL_MAGIC = b"PK\3\4"
CENTRAL_MAGIC = b"PK\1\2"
DESCRIPTOR_MAGIC = b"PK\7\10"
END64_MAGIC = b"PK\6\6"
LOCATOR_MAGIC = b"PK\6\7"
END_MAGIC = b"PK\5\6"

UTF8 = 0x800
HAS_DESCRIPTOR = 0x8
STORED = 0
MAX16 = 0xFFFF
MAX32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    """One record as the directory has it; ``full_name`` begins with the archive's own folder.

    ``crc32`` is None where the writer left it out: 0 for bytes that are there.
    """

    full_name: str
    header_offset: int
    num_bytes: int
    crc32: int | None
    has_descriptor: bool

    @property
    def name(self) -> str:
        return self.full_name.partition("/")[2] or self.full_name

    @property
    def descriptor(self) -> struct.Struct:
        """The form of its data descriptor: sizes are 64-bit from 4 GiB on."""
        big = self.num_bytes >= MAX32 or self.header_offset >= MAX32
        return DESCRIPTOR64 if big else DESCRIPTOR

    @property
    def num_descriptor_bytes(self) -> int:
        return self.descriptor.size if self.has_descriptor else 0
