"""Keeps the CRC-32s of ranges as they become known, and joins them into whole payloads'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptool.errors import DamagedError
from ckptool.formats.crc import crc32_combine
from ckptool.planning.plan import Check
from ckptool.planning.reads import without_overlap

__all__ = ["Ledger", "Piece", "join_crcs"]

Piece = tuple[int, int, int]  # start inclusive, end exclusive, CRC-32 of those bytes


def join_crcs(pieces: Iterable[Piece], start: int, end: int) -> int | None:
    """The CRC-32 of ``[start, end)`` from the pieces inside it; None unless they tile it."""
    crc, position = 0, start
    for begin, stop, piece in sorted(pieces):
        if stop <= start or begin >= end or stop <= position:
            continue
        if begin != position:
            return None
        crc = piece if position == start else crc32_combine(crc, piece, stop - begin)
        position = stop
    return crc if position == end else None


@dataclass
class Ledger:
    """Which source payloads are proved; pieces come in any order, from any worker.

    ``proved`` counts payloads; ``unverifiable`` ones have no stored CRC, ``trusted`` ones were
    copied by the store without one.
    """

    checks: Sequence[Check]
    proved: int = 0
    unverifiable: list[Check] = field(default_factory=list)
    trusted: list[Check] = field(default_factory=list)
    _checks: dict[int, Check] = field(default_factory=dict)
    _pieces: dict[int, list[Piece]] = field(default_factory=dict)
    _missing: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._checks = {check.id: check for check in self.checks}
        for check in self.checks:
            if check.by_normaliser:
                self._missing[check.id] = check.extent.num_bytes
            elif check.crc32 is None:
                self.unverifiable.append(check)
            elif check.extent.num_bytes == 0:
                self._settle(check, 0)
            else:
                self._missing[check.id] = check.extent.num_bytes

    def add(self, check_id: int, piece: Piece) -> None:
        """Note a range of a payload (offsets of its file); raises DamagedError on a bad CRC."""
        missing = self._missing.get(check_id)
        if missing is None:
            return
        pieces = self._pieces.setdefault(check_id, [])
        pieces.append(piece)
        self._missing[check_id] = missing - (piece[1] - piece[0])
        if self._missing[check_id] <= 0:
            self._close(self._checks[check_id], pieces)

    def settle(self, check_id: int, *, verified: bool) -> None:
        """Note that somebody read a whole payload in order, and whether it had a CRC."""
        if self._missing.pop(check_id, None) is None:
            return
        self._pieces.pop(check_id, None)
        check = self._checks[check_id]
        if verified:
            self.proved += check.num_payloads
        else:
            self.unverifiable.append(check)

    def trust(self, check_id: int) -> None:
        """Note that the store copied bytes of a payload and nobody was to verify them."""
        if self._missing.pop(check_id, None) is not None:
            self._pieces.pop(check_id, None)
            self.trusted.append(self._checks[check_id])

    def gaps(self) -> Iterator[tuple[Check, list[tuple[int, int]]]]:
        """Payloads not proved yet, with the ranges that nobody has read.

        Of a payload that was read in ranges that overlap, whose CRC-32s cannot be joined, it is
        the whole.
        """
        for check_id in list(self._missing):
            check = self._checks[check_id]
            if check.by_normaliser:
                continue
            have = without_overlap((a, b) for a, b, _ in self._pieces.get(check_id, ()))
            extent = check.extent
            edges = [extent.start, *(x for r in have for x in r), extent.end]
            gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
            if not gaps:
                self._pieces.pop(check_id)
                self._missing[check_id] = extent.num_bytes
                gaps = [(extent.start, extent.end)]
            yield check, gaps

    def _close(self, check: Check, pieces: list[Piece]) -> None:
        crc = join_crcs(pieces, check.extent.start, check.extent.end)
        if crc is None:  # pieces overlap and leave a gap: it is closed later, from gaps()
            return
        del self._missing[check.id], self._pieces[check.id]
        self._settle(check, crc)

    def _settle(self, check: Check, crc: int) -> None:
        if crc != check.crc32:
            raise bad_crc(check, crc)
        self.proved += check.num_payloads


def bad_crc(check: Check, crc: int) -> DamagedError:
    """The error of a payload whose bytes are not what its item says."""
    where = f" {check.box}" if check.box is not None else ""
    extent = check.extent
    return DamagedError(
        f"{check.entry}{where}: bytes {extent.start}..{extent.end} of {extent.key} have CRC-32 "
        f"{crc:08x}, but the item says {check.crc32 or 0:08x}: the stored bytes are damaged",
        hint="ckptool validate --read-data lists every damaged entry; take an older step",
        entry=check.entry,
        file=extent.key,
        offset=extent.start,
    )
