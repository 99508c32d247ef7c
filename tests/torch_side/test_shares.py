"""Who stores what: every box once, replicas spread evenly, disagreements named."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.errors import UsageError
from ckptool.model import Box
from ckptool.planning.boxes import chunk_rows
from ckptool.torch.shares import Offer, assign_shares

F32 = dtype_named("float32")


def _offer(key: str, shape: tuple[int, ...], start: int, end: int) -> Offer:
    rest = shape[1:]
    return Offer(key, F32, shape, Box((start, *(0 for _ in rest)), (end - start, *rest)))


def _replica(key: str, shape: tuple[int, ...]) -> Offer:
    return Offer(key, F32, shape, Box((0,) * len(shape), shape))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    copies=st.integers(1, 3),
    parts=st.integers(1, 5),
)
def test_every_element_is_stored_once(rows: list[int], copies: int, parts: int) -> None:
    """On any replicate x shard mesh the shares tile each tensor exactly."""
    offers = []
    for rank in range(copies * parts):
        mine = [
            _offer(f"w{n}", (num, 3), *chunk_rows(num, parts)[rank % parts])
            for n, num in enumerate(rows)
        ]
        offers.append(mine)
    seen: dict[str, list[tuple[int, int]]] = {}
    for rank, row in enumerate(assign_shares(offers)):
        for share in row:
            offer = offers[rank][share.offer]
            inside = zip(
                share.box.offsets, share.box.ends, offer.box.offsets, offer.box.ends, strict=True
            )
            assert all(low <= start <= end <= high for start, end, low, high in inside)
            start, end = share.box.offsets[0], share.box.ends[0]
            if end > start:
                seen.setdefault(offer.key, []).append((start, end))
    for number, num in enumerate(rows):
        ranges = sorted(seen.get(f"w{number}", []))
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges)][: len(ranges)]
        assert sum(end - start for start, end in ranges) == num


@given(sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8), ranks=st.integers(2, 6))
@settings(max_examples=40, deadline=None)
def test_replicas_are_spread_evenly(sizes: list[int], ranks: int) -> None:
    """No rank stores much more than its share, even of a single huge replica."""
    offers = [[_replica(f"w{n}", (size, 4)) for n, size in enumerate(sizes)]] * ranks
    loads = [sum(math.prod(share.box.sizes) * 4 for share in row) for row in assign_shares(offers)]
    assert sum(loads) == sum(size * 16 for size in sizes)
    assert max(loads) - min(loads) <= max(1 << 20, sum(loads) // ranks // 8) + 16


def test_an_empty_box_yields_to_a_full_one_at_its_offset() -> None:
    """A rank without rows may stand at the offset where another one begins."""
    offers = [[_offer("w", (2, 3), 0, 2)], [_offer("w", (2, 3), 0, 0)]]
    assert [len(row) for row in assign_shares(offers)] == [1, 0]


def test_different_boxes_at_one_offset_are_refused() -> None:
    """Two full boxes that begin together overlap: the ranks' layouts disagree."""
    with pytest.raises(UsageError, match="w: ranks"):
        assign_shares([[_offer("w", (4, 3), 0, 2)], [_offer("w", (4, 3), 0, 3)]])


def test_an_entry_of_its_own_belongs_to_one_rank() -> None:
    """Two ranks with the same key in rank_state are told to put the rank into it."""
    mine = Offer("rng", F32, (2,), Box((0,), (2,)), own=True)
    with pytest.raises(UsageError, match="rng"):
        assign_shares([[mine], [mine]])
