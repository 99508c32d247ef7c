"""Chunks that are stored more than once -> findings where their bytes differ."""

from __future__ import annotations

from collections.abc import Sequence

from ckptool.engine.item_verdict import DAMAGED, Checked
from ckptool.model import TensorEntry
from ckptool.planning.findings import ERROR, Finding, subject_name
from ckptool.planning.item_ranges import ItemRanges

__all__ = ["Replicas"]


class Replicas:
    """Chunks that are stored more than once: their bytes must be the same."""

    def __init__(self, ranges: ItemRanges) -> None:
        self._ranges = ranges
        self._doubled = _doubled_owners(ranges)
        self._first: dict[tuple[str, str], Checked] = {}

    def has(self, i: int) -> bool:
        return int(self._ranges.owner[i]) in self._doubled

    def compare(self, checked: Checked) -> Sequence[Finding]:
        subject = checked.subject
        if not self.has(subject.id) or checked.crc32 is None or checked.status == DAMAGED:
            return ()
        first = self._first.setdefault((subject.key, str(subject.box)), checked)
        if first.crc32 == checked.crc32:
            return ()
        one, two = first.subject.item, subject.item
        message = (
            f"{subject_name(subject.key, subject.box)} is stored twice with different bytes: in "
            f"{one.file} at byte {one.offset} and in {two.file} at byte {two.offset}"
        )
        return [
            Finding(
                "replicas-differ", ERROR, message, entry=subject.key, box=subject.box,
                file=two.file, offset=two.offset,
            )
        ]  # fmt: skip


def _doubled_owners(ranges: ItemRanges) -> set[int]:
    """Tensors that have a box twice."""
    doubled = set()
    for owner, entry in enumerate(ranges.entries):
        if not isinstance(entry, TensorEntry) or len(entry.chunks) < 2:
            continue
        chunks = entry.chunks
        covered = int(chunks.sizes.prod(axis=1).sum())
        if covered > entry.num_elements:
            doubled.add(owner)
    return doubled
