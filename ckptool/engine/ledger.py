"""Keeps the CRC-32s of ranges as they become known, and joins them into whole payloads'."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable, Iterator, Sequence

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


class Ledger:
    """Which source payloads are proved; pieces come in any order, from any worker.

    ``checks`` stand in the order of their ids. ``proved`` counts payloads; ``unverifiable`` ones
    have no stored CRC, ``trusted`` ones were copied by the store without one.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks
        self._ids, self._starts, self._ends = array("q"), array("q"), array("q")
        self._crc32s, self._nums = array("q"), array("q")
        self._missing = array("q")  # bytes that nobody read yet; below 0 where it is settled
        self._pieces: dict[int, list[Piece]] = {}
        self.proved = 0
        self.unverifiable: list[Check] = []
        self.trusted: list[Check] = []
        for i, check in enumerate(checks):
            extent, crc32 = check.extent, check.crc32
            self._ids.append(check.id)
            self._starts.append(extent.start)
            self._ends.append(extent.end)
            self._crc32s.append(-1 if crc32 is None else crc32)
            self._nums.append(check.num_payloads)
            self._missing.append(extent.num_bytes)
            if check.by_normaliser:
                continue
            if crc32 is None:
                self._missing[i] = -1
                self.unverifiable.append(check)
            elif extent.num_bytes == 0:
                self._missing[i] = -1
                self._settle(i, 0)

    def add(self, check_id: int, piece: Piece) -> None:
        """Note a range of a payload (offsets of its file); raises DamagedError on a bad CRC."""
        i = self._find(check_id)
        if i is None:
            return
        pieces = self._pieces.setdefault(check_id, [])
        pieces.append(piece)
        left = self._missing[i] = max(0, self._missing[i] - (piece[1] - piece[0]))
        if not left:
            self._close(i, pieces)

    def settle(self, check_id: int, *, verified: bool) -> None:
        """Note that somebody read a whole payload in order, and whether it had a CRC."""
        i = self._find(check_id)
        if i is None:
            return
        self._end(i)
        if verified:
            self.proved += self._nums[i]
        else:
            self.unverifiable.append(self._checks[i])

    def trust(self, check_id: int) -> None:
        """Note that the store copied bytes of a payload and nobody was to verify them."""
        i = self._find(check_id)
        if i is not None:
            self._end(i)
            self.trusted.append(self._checks[i])

    def gaps(self) -> Iterator[tuple[Check, list[tuple[int, int]]]]:
        """Payloads not proved yet, with the ranges that nobody has read.

        Of a payload that was read in ranges that overlap, whose CRC-32s cannot be joined, it is
        the whole.
        """
        for i, missing in enumerate(self._missing):
            if missing < 0:
                continue
            check = self._checks[i]
            if check.by_normaliser:
                continue
            have = without_overlap((a, b) for a, b, _ in self._pieces.get(check.id, ()))
            extent = check.extent
            edges = [extent.start, *(x for r in have for x in r), extent.end]
            gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
            if not gaps:
                self._pieces.pop(check.id)
                self._missing[i] = extent.num_bytes
                gaps = [(extent.start, extent.end)]
            yield check, gaps

    def _find(self, check_id: int) -> int | None:
        """The position of a check that is not settled, None of any other."""
        i = bisect.bisect_left(self._ids, check_id)
        there = i < len(self._ids) and self._ids[i] == check_id and self._missing[i] >= 0
        return i if there else None

    def _end(self, i: int) -> None:
        """Nothing more is asked of a check."""
        self._missing[i] = -1
        self._pieces.pop(self._ids[i], None)

    def _close(self, i: int, pieces: list[Piece]) -> None:
        crc = join_crcs(pieces, self._starts[i], self._ends[i])
        if crc is None:  # pieces overlap and leave a gap: it is closed later, from gaps()
            return
        self._end(i)
        self._settle(i, crc)

    def _settle(self, i: int, crc: int) -> None:
        if crc != self._crc32s[i]:
            raise bad_crc(self._checks[i], crc)
        self.proved += self._nums[i]


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
