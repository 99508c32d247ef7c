"""Whether the parts of an object are all there before it is published."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.errors import StorageError
from ckptool.storage.base import PartReceipt

__all__ = ["check_parts", "wrong_size"]


def check_parts(
    parts: Sequence[PartReceipt], *, num_bytes: int, where: str
) -> Sequence[PartReceipt]:
    """The parts in order; StorageError unless they count from 0 and sum up to the object."""
    ordered = sorted(parts, key=lambda part: part.number)
    for position, part in enumerate(ordered):
        if part.number != position:
            problem = "is missing" if part.number > position else "is given twice"
            number = min(position, part.number)
            raise StorageError(
                f"cannot publish {where}: part {number} of {len(ordered)} {problem}",
                hint="write the parts that are missing, or abort",
                url=where,
            )
    total = sum(part.num_bytes for part in ordered)
    if total != num_bytes:
        raise StorageError(
            f"cannot publish {where}: its {len(ordered)} parts have {total} bytes, "
            f"the object {num_bytes}",
            hint="write the parts that are missing, or abort",
            url=where,
        )
    return ordered


def wrong_size(where: str, sent: int, stored: int) -> StorageError:
    """The store holds another number of bytes than were sent."""
    return StorageError(
        f"{where} has {stored} bytes after {sent} were sent",
        hint="the store altered what it was given: check a proxy, or checksum trailers "
        "(storage option config_kwargs={'request_checksum_calculation': 'when_required'})",
        url=where,
        num_bytes_sent=sent,
        num_bytes_stored=stored,
    )
