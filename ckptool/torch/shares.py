"""What every rank holds -> what each rank stores: every box once, spread evenly. Pure.

A box that several ranks hold (a replica) goes to the one with the least to store; one larger
than its share is cut by rows, so that no rank stores much more than its part of the whole.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.dtypes import DType, dtype_named
from ckptool.errors import UsageError
from ckptool.model import Box

__all__ = ["Offer", "Share", "assign_shares"]

_MIN_CUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """A box of a tensor that a rank holds; ``own`` marks entries that only it may store."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    own: bool = False

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        box = [list(self.box.offsets), list(self.box.sizes)]
        return [self.key, self.dtype.name, list(self.shape), *box, int(self.own)]

    @classmethod
    def from_json(cls, row: list[Any]) -> Offer:
        box = Box(tuple(row[3]), tuple(row[4]))
        return cls(row[0], dtype_named(row[1]), tuple(row[2]), box, bool(row[5]))


@dataclass(frozen=True, slots=True)
class Share:
    """A box that a rank stores, inside the box of its offer number ``offer``."""

    offer: int
    box: Box

    def to_json(self) -> list[Any]:
        return [self.offer, list(self.box.offsets), list(self.box.sizes)]

    @classmethod
    def from_json(cls, row: list[Any]) -> Share:
        return cls(row[0], Box(tuple(row[1]), tuple(row[2])))


def assign_shares(offers: Sequence[Sequence[Offer]]) -> list[list[Share]]:
    """Each rank's shares, in the order of its offers.

    ``offers[rank]`` is what that rank holds. Raises UsageError where ranks disagree about a
    tensor, or two ranks claim the same entry as their own.
    """
    _check_agreement(offers)
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, row in enumerate(offers):
        for position, offer in enumerate(row):
            holders.setdefault((offer.key, offer.box.offsets), []).append((rank, position))
    loads = [0] * len(offers)
    shares: list[list[Share]] = [[] for _ in offers]
    replicas: list[tuple[int, list[tuple[int, int]]]] = []
    for held in holders.values():
        held = _fullest(offers, held)
        rank, position = held[0]
        offer = offers[rank][position]
        if len(held) == 1:
            shares[rank].append(Share(position, offer.box))
            loads[rank] += offer.num_bytes
        else:
            replicas.append((offer.num_bytes, held))
    total = sum(loads) + sum(num_bytes for num_bytes, _ in replicas)
    cut_bytes = max(_MIN_CUT_BYTES, total // len(offers) // 8)
    _spread(offers, replicas, loads, shares, cut_bytes=cut_bytes)
    for mine in shares:
        mine.sort(key=lambda share: (share.offer, share.box.offsets))
    return shares


def _spread(
    offers: Sequence[Sequence[Offer]],
    replicas: list[tuple[int, list[tuple[int, int]]]],
    loads: list[int],
    shares: list[list[Share]],
    *,
    cut_bytes: int,
) -> None:
    """Largest piece first, each to the holder with the least to store."""
    queue: list[tuple[int, int, int, Box]] = []
    for number, (_, held) in enumerate(replicas):
        offer = offers[held[0][0]][held[0][1]]
        for piece, box in enumerate(_cut(offer, cut_bytes)):
            size = box.num_elements * offer.dtype.itemsize
            heapq.heappush(queue, (-size, number, piece, box))
    while queue:
        size, number, _, box = heapq.heappop(queue)
        rank, position = min(replicas[number][1], key=lambda place: (loads[place[0]], place[0]))
        shares[rank].append(Share(position, box))
        loads[rank] -= size


def _cut(offer: Offer, cut_bytes: int) -> list[Box]:
    """The offer's box, by rows where it is larger than ``cut_bytes``."""
    box = offer.box
    if offer.num_bytes <= cut_bytes or not box.sizes or box.sizes[0] < 2:
        return [box]
    num_rows = box.sizes[0]
    num_pieces = min(num_rows, -(-offer.num_bytes // cut_bytes))
    step = math.ceil(num_rows / num_pieces)
    return [
        Box(
            (box.offsets[0] + start, *box.offsets[1:]),
            (min(step, num_rows - start), *box.sizes[1:]),
        )
        for start in range(0, num_rows, step)
    ]


def _fullest(
    offers: Sequence[Sequence[Offer]], held: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The holders of the box itself, where ranks with an empty one share its offset."""
    sizes = {offers[rank][position].box.sizes for rank, position in held}
    if len(sizes) == 1:
        return held
    filled = [size for size in sizes if math.prod(size)]
    if len(filled) > 1:
        rank, position = held[0]
        raise UsageError(
            f"{offers[rank][position].key}: ranks {[rank for rank, _ in held]} hold different "
            f"boxes at one offset: {sorted(sizes)}",
            hint="give every rank the same layout of the tensor",
        )
    wanted = filled[0] if filled else min(sizes)
    return [(rank, at) for rank, at in held if offers[rank][at].box.sizes == wanted]


def _check_agreement(offers: Sequence[Sequence[Offer]]) -> None:
    seen: dict[str, tuple[int, Offer]] = {}
    for rank, row in enumerate(offers):
        for offer in row:
            other_rank, other = seen.setdefault(offer.key, (rank, offer))
            if (offer.dtype, offer.shape) != (other.dtype, other.shape):
                raise UsageError(
                    f"{offer.key} is {other.dtype} {list(other.shape)} on rank {other_rank} and "
                    f"{offer.dtype} {list(offer.shape)} on rank {rank}",
                    hint="one key must be one tensor; give entries of a rank keys of their own",
                )
            if rank != other_rank and (offer.own or other.own):
                raise UsageError(
                    f"ranks {other_rank} and {rank} both have {offer.key} as an entry of their own",
                    hint="put the rank into the key, as in rng.<rank>",
                )
