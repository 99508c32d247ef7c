"""An object of more parts than its store takes, as an assembly like any other.

Groups of parts become intermediate objects beside it; at the commit the store copies the object
together from those, and they are removed. The token of such an assembly names the uploads of
all of them, so that any process can attach to it, and whoever discards it finds everything.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

from ckptool.errors import ObjectMissingError, StorageError
from ckptool.formats.crc import crc32_combine
from ckptool.planning.copies import PartGroup, copy_shares
from ckptool.planning.parts import Bounds
from ckptool.storage.base import (
    Assembly,
    Buffer,
    CopyingAssembly,
    ObjectInfo,
    PartReceipt,
    Store,
)

__all__ = ["MEMBER_MARK", "attach", "begin", "bounds_of", "drop", "uploads_of"]

MEMBER_MARK = ".ckptool-part-"
_MARK = '{"groups"'
_COPIES_AT_ONCE = 8


def begin(dest: Store, key: str, *, num_bytes: int, groups: Sequence[PartGroup] = ()) -> Assembly:
    """Open an assembly; with ``groups``, one that is made in intermediate objects."""
    if not groups:
        return dest.open_assembly(key, num_bytes=num_bytes)
    whole = cast("CopyingAssembly", dest.open_assembly(key, num_bytes=num_bytes))
    members: list[_Member] = []
    try:
        for group in groups:
            name = _member_key(key, len(members))
            assembly = dest.open_assembly(name, num_bytes=group.num_bytes)
            members.append(_Member(group, name, cast("CopyingAssembly", assembly)))
    except BaseException:
        _Grouped(dest, key, num_bytes, whole, members).abort()
        raise
    return _Grouped(dest, key, num_bytes, whole, members)


def attach(dest: Store, key: str, token: str, *, num_bytes: int) -> Assembly:
    """Open the assembly that ``token`` names, in any process."""
    if not token.startswith(_MARK):
        return dest.attach_assembly(key, token, num_bytes=num_bytes)
    said = json.loads(token)
    whole = dest.attach_assembly(key, said["whole"], num_bytes=num_bytes)
    members: list[_Member] = []
    for first, start, end, member_token in said["groups"]:
        group, name = PartGroup(first, start, end), _member_key(key, len(members))
        assembly = dest.attach_assembly(name, member_token, num_bytes=group.num_bytes)
        members.append(_Member(group, name, cast("CopyingAssembly", assembly)))
    return _Grouped(dest, key, num_bytes, cast("CopyingAssembly", whole), members)


def uploads_of(key: str, token: str) -> list[tuple[str, str]]:
    """(key, upload) of all that an assembly's token names."""
    if not token.startswith(_MARK):
        return [(key, token)]
    said = json.loads(token)
    members = [(_member_key(key, k), row[3]) for k, row in enumerate(said["groups"])]
    return [(key, said["whole"]), *members]


def drop(dest: Store, key: str, token: str) -> None:
    """Abort what a token names and remove intermediate objects; a published object stays."""
    for name, upload in uploads_of(key, token):
        dest.abort_upload(name, upload)
        if name != key:
            dest.delete(name)


def bounds_of(store: Store) -> Bounds:
    """The bounds of a store's parts, as planning takes them."""
    limits = store.part_limits
    return Bounds(limits.min_bytes, limits.max_bytes, limits.max_parts)


def _member_key(key: str, number: int) -> str:
    return f"{key}{MEMBER_MARK}{number:03d}"


@dataclass(frozen=True, slots=True)
class _Member:
    """One intermediate object; its parts count from 0 again."""

    group: PartGroup
    key: str
    assembly: CopyingAssembly


class _Grouped:
    """Routes parts to the member that they belong to."""

    def __init__(
        self,
        dest: Store,
        key: str,
        num_bytes: int,
        whole: CopyingAssembly,
        members: Sequence[_Member],
    ) -> None:
        self._dest, self._key, self._num_bytes = dest, key, num_bytes
        self._whole, self._members = whole, members
        self._firsts = [member.group.first for member in members]
        self._made: set[str] = set()

    @property
    def token(self) -> str:
        rows = [
            (m.group.first, m.group.start, m.group.end, m.assembly.token) for m in self._members
        ]
        return json.dumps({"groups": rows, "whole": self._whole.token}, separators=(",", ":"))

    def write_part(
        self, number: int, offset: int, data: Buffer, *, crc32: int | None = None
    ) -> PartReceipt:
        member = self._member(number)
        first, start = member.group.first, member.group.start
        receipt = member.assembly.write_part(number - first, offset - start, data, crc32=crc32)
        return replace(receipt, number=number)

    def copy_part(self, number: int, source_url: str, *, start: int, end: int) -> PartReceipt:
        member = self._member(number)
        first = member.group.first
        receipt = member.assembly.copy_part(number - first, source_url, start=start, end=end)
        return replace(receipt, number=number)

    def surviving(self, claims: Sequence[tuple[PartReceipt, int, int | None]]) -> set[int]:
        """Of members that were committed already all parts; raises where one is gone."""
        there: set[int] = set()
        self._whole.listed_parts()  # raises where it is gone
        for member in self._members:
            mine = [claim for claim in claims if self._member(claim[0].number) is member]
            first, start = member.group.first, member.group.start
            moved = [(replace(r, number=r.number - first), at - start, c) for r, at, c in mine]
            try:
                there |= {first + number for number in member.assembly.surviving(moved)}
            except ObjectMissingError:
                if self._dest.info(member.key).num_bytes != member.group.num_bytes:
                    raise
                self._made.add(member.key)
                there |= {receipt.number for receipt, _, _ in mine}
        return there

    def listed_parts(self) -> Sequence[PartReceipt]:
        return [
            replace(receipt, number=receipt.number + member.group.first)
            for member in self._members
            if member.key not in self._made
            for receipt in member.assembly.listed_parts()
        ]

    def commit(self, parts: Sequence[PartReceipt]) -> ObjectInfo:
        crcs: dict[str, int | None] = {}
        for member in self._members:
            mine = [part for part in parts if self._member(part.number) is member]
            crcs[member.key] = _crc_of(mine)
            if member.key not in self._made:
                first = member.group.first
                member.assembly.commit([replace(part, number=part.number - first) for part in mine])
                self._made.add(member.key)
        info = self._whole.commit(self._join(crcs))
        for member in self._members:
            self._dest.delete(member.key)
        return info

    def abort(self) -> None:
        for assembly in (self._whole, *(member.assembly for member in self._members)):
            assembly.abort()
        for key in self._made:
            self._dest.delete(key)

    def _member(self, number: int) -> _Member:
        return self._members[bisect.bisect_right(self._firsts, number) - 1]

    def _join(self, crcs: dict[str, int | None]) -> list[PartReceipt]:
        """Copy the object together; the server's CRC-32s must be those of the members' parts."""
        jobs: list[tuple[_Member, Callable[[], PartReceipt]]] = []
        for member in self._members:
            shares = copy_shares(
                member.group.num_bytes, total=self._num_bytes, bounds=bounds_of(self._dest)
            )
            for start, end in shares:
                jobs.append((member, self._copy(len(jobs), member, start, end)))
        with ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="join") as pool:
            receipts = list(pool.map(lambda job: job[1](), jobs))
        for member in self._members:
            copied = [r for r, (m, _) in zip(receipts, jobs, strict=True) if m is member]
            self._compare(member, crcs[member.key], _crc_of(copied))
        return receipts

    def _copy(self, number: int, member: _Member, start: int, end: int) -> Any:
        url = self._dest.url_of(member.key)
        return lambda: self._whole.copy_part(number, url, start=start, end=end)

    def _compare(self, member: _Member, wanted: int | None, found: int | None) -> None:
        if wanted is None or found is None or wanted == found:
            return
        raise StorageError(
            f"{self._dest.url_of(self._key)}: the server copied {member.group.num_bytes} bytes "
            f"from {member.key} with CRC-32 {found:08x}, but they were written with {wanted:08x}",
            hint="the store does not keep what it is given: take another",
            url=self._dest.url_of(self._key),
            offset=member.group.start,
        )


def _crc_of(parts: Sequence[PartReceipt]) -> int | None:
    """The CRC-32 of parts in order, None where the server told none of one."""
    crc: int | None = 0
    for part in sorted(parts, key=lambda part: part.number):
        if part.checksum is None or crc is None:
            return None
        crc = crc32_combine(crc, part.checksum, part.num_bytes)
    return crc
