"""What the headers of one item say, beside what the index says: ok, damaged or unverifiable.

Every fault becomes a finding that names tensor, box, file and byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptool.dtypes import DType
from ckptool.errors import CkptoolError, UnsupportedError
from ckptool.formats.dcp_item import TensorItem
from ckptool.model import Box, Item
from ckptool.planning.findings import ERROR, WARNING, Finding, subject_name

__all__ = [
    "DAMAGED",
    "OK",
    "UNVERIFIABLE",
    "Checked",
    "Subject",
    "damaged_payload",
    "fault",
    "finding_at",
    "finding_of",
    "settled",
    "worst",
]

OK = "ok"
DAMAGED = "damaged"
UNVERIFIABLE = "unverifiable"


@dataclass(frozen=True, slots=True)
class Subject:
    """One item and what the index says of it; ``dtype`` and ``box`` are None for a value.

    ``known_crc`` is the payload's CRC-32 where the index keeps one. ``wants_crc``: it is asked
    for even where nothing is there to compare.
    """

    id: int
    key: str
    item: Item
    dtype: DType | None = None
    box: Box | None = None
    known_crc: int | None = None
    wants_crc: bool = False

    @property
    def needs_crc(self) -> bool:
        """Whether the payload is read even if its item does not say what it should be."""
        return self.wants_crc or self.known_crc is not None


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one item: ``status`` is ok, damaged or unverifiable.

    ``num_bytes`` were read for it; ``crc32`` is that of the chunk's own bytes, None where
    they do not stand there plainly or were not read.
    """

    subject: Subject
    status: str
    findings: tuple[Finding, ...]
    num_bytes: int
    crc32: int | None = None


def settled(subject: Subject, header: TensorItem, num_bytes: int, crc: int | None) -> Checked:
    """The comparison of sound headers with the index."""
    findings = list(_compare(subject, header))
    known = subject.known_crc
    if known is not None and crc is not None and known != crc:
        what = f"its payload has CRC-32 {crc:#010x}, ckpt.index says {known:#010x}"
        findings.append(finding_at(subject, "other-payload", ERROR, what, header.payload_offset))
    is_proved = known is not None or header.crc32 is not None or not header.payload_num_bytes
    status = worst(findings) if findings else OK if is_proved else UNVERIFIABLE
    own = crc if header.is_plain else None
    return Checked(subject, status, tuple(findings), num_bytes, own)


def _compare(subject: Subject, header: TensorItem) -> Iterator[Finding]:
    assert subject.dtype is not None
    assert subject.box is not None
    if header.dtype != subject.dtype:
        what = f"the index says {subject.dtype}, the item holds {header.dtype}"
        yield finding_at(subject, "wrong-dtype", ERROR, what, header.payload_offset)
    if header.shape != subject.box.sizes:
        sizes, shape = list(subject.box.sizes), list(header.shape)
        what = f"the index says {sizes}, the item holds a tensor of shape {shape}"
        yield finding_at(subject, "wrong-shape", ERROR, what, header.payload_offset)
    if 0 not in header.shape:
        reach = sum((n - 1) * s for n, s in zip(header.shape, header.strides, strict=True))
        need = (header.storage_offset + reach + 1) * header.dtype.itemsize
        if min(header.strides, default=0) < 0 or need > header.payload_num_bytes:
            what = f"its strides reach byte {need} of a payload of {header.payload_num_bytes}"
            yield finding_at(subject, "bad-strides", ERROR, what, header.payload_offset)


def damaged_payload(subject: Subject, header: TensorItem, crc: int | None) -> Finding:
    what = (
        f"its payload of {header.payload_num_bytes} bytes has CRC-32 {crc or 0:#010x}, "
        f"{header.crc32 or 0:#010x} was stored with it"
    )
    return finding_at(subject, "damaged-payload", ERROR, what, header.payload_offset)


def fault(subject: Subject, error: CkptoolError) -> Checked:
    found = finding_of(subject, error)
    return Checked(subject, worst((found,)), (found,), 0)


def finding_of(subject: Subject, error: CkptoolError) -> Finding:
    offset = error.facts.get("offset")
    offset = offset if isinstance(offset, int) else 0
    is_inside = "file" not in error.facts
    if isinstance(error, UnsupportedError):
        return finding_at(subject, "not-checked", WARNING, error.message, offset * is_inside)
    is_payload = str(error.facts.get("record", "")).startswith("data/")
    code = "damaged-payload" if is_payload else "damaged-item"
    return finding_at(subject, code, ERROR, error.message, offset * is_inside)


def finding_at(subject: Subject, code: str, severity: str, what: str, offset: int) -> Finding:
    """``offset`` counts from the start of the item, as the bytes in ``what`` do."""
    item = subject.item
    place = f"item of {item.length} bytes at byte {item.offset} of {item.file}"
    return Finding(
        code,
        severity,
        f"{subject_name(subject.key, subject.box)}, {place}: {what}",
        entry=subject.key,
        box=subject.box,
        file=item.file,
        offset=item.offset + offset,
    )


def worst(findings: Sequence[Finding]) -> str:
    return DAMAGED if any(f.is_error for f in findings) else UNVERIFIABLE
