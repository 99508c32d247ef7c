"""The digest of a byte plan: two runs with one digest write the same bytes in the same parts."""

from __future__ import annotations

import hashlib
from typing import Any

from ckptool.planning.plan import Copy, Literal, Normal, Payload, Place, Plan, Segment

__all__ = ["plan_digest"]


def plan_digest(plan: Plan, *, server_copy: bool) -> str:
    """SHA-256 over outputs, segments and checks; ``server_copy`` cuts parts in another way."""
    digest = hashlib.sha256(f"server_copy={server_copy}\n".encode())
    for output in plan.outputs:
        _add(digest, "output", output.key, output.num_bytes)
        for segment in output.segments:
            _add(digest, *_segment(segment))
    for check in plan.checks:
        extent = check.extent
        _add(digest, "check", extent.key, extent.start, extent.end, check.crc32)
    return digest.hexdigest()


def _add(digest: Any, *words: object) -> None:
    digest.update(repr(words).encode() + b"\n")


def _segment(segment: Segment) -> tuple[object, ...]:
    if isinstance(segment, Literal):
        return "literal", hashlib.sha256(segment.data).hexdigest()
    if isinstance(segment, Copy):
        return "copy", segment.extent.key, segment.extent.start, segment.extent.end, segment.proofs
    if isinstance(segment, Normal):
        return "normal", _payload(segment.payload), segment.start, segment.end
    if isinstance(segment, Place):
        pieces = [_payload(payload) for payload in segment.pieces]
        place = (segment.dtype.name, segment.shape, segment.origin, segment.first, segment.last)
        return "place", segment.entry, place, pieces
    return "tail", segment.num_bytes, segment.payloads


def _payload(payload: Payload) -> tuple[object, ...]:
    item = payload.item
    where = (item.file, item.offset, item.length, item.transforms, payload.start)
    return where, payload.dtype.name, payload.box.offsets, payload.box.sizes
