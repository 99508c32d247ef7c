"""What every rank wants of a checkpoint -> who reads which box, and who passes it to whom.

A box that several ranks hold is read by one of them and sent to the others, so that each
byte is read once per replica group; what all ranks hold is read once in the world.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.model import Box
from ckptool.torch.group import Group
from ckptool.torch.shares import Offer, Share, assign_shares

__all__ = ["LoadPlan", "Transfer", "plan_load"]


@dataclass(frozen=True)
class Transfer:
    """Box ``box`` of this rank's offer ``offer`` goes from ``owner`` to all ``holders``."""

    owner: int
    holders: tuple[int, ...]
    offer: int
    box: Box

    def to_json(self) -> list[Any]:
        box = [list(self.box.offsets), list(self.box.sizes)]
        return [self.owner, list(self.holders), self.offer, *box]

    @classmethod
    def from_json(cls, row: list[Any]) -> Transfer:
        return cls(row[0], tuple(row[1]), row[2], Box(tuple(row[3]), tuple(row[4])))


@dataclass(frozen=True)
class LoadPlan:
    """What one rank reads itself, and its transfers in an order that all ranks keep."""

    shares: tuple[Share, ...]
    transfers: tuple[Transfer, ...]


def plan_load(group: Group, offers: Sequence[Offer]) -> LoadPlan:
    """Collective: this rank's plan, from what every rank wants."""
    gathered = group.gather(json.dumps([offer.to_json() for offer in offers]).encode())
    rows: list[bytes] = []

    def plan() -> None:
        every = [[Offer.from_json(row) for row in json.loads(data)] for data in gathered or []]
        rows.extend(_rows(every))

    group.from_rank_0(plan)
    mine = json.loads(group.scatter(rows or None))
    return LoadPlan(
        tuple(map(Share.from_json, mine["shares"])),
        tuple(map(Transfer.from_json, mine["transfers"])),
    )


def _rows(offers: Sequence[Sequence[Offer]]) -> list[bytes]:
    shares = assign_shares(offers)
    transfers = _transfers(offers, shares)
    return [
        json.dumps(
            {
                "shares": [share.to_json() for share in mine],
                "transfers": [transfer.to_json() for transfer in passed],
            }
        ).encode()
        for mine, passed in zip(shares, transfers, strict=True)
    ]


def _transfers(
    offers: Sequence[Sequence[Offer]], shares: Sequence[Sequence[Share]]
) -> list[list[Transfer]]:
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    for rank, row in enumerate(offers):
        for position, offer in enumerate(row):
            holders.setdefault((offer.key, offer.box), []).append((rank, position))
    passed: list[list[Transfer]] = [[] for _ in offers]
    for owner, mine in enumerate(shares):
        for share in mine:
            offer = offers[owner][share.offer]
            held = holders[offer.key, offer.box]
            if len(held) < 2 or not share.box.num_elements:
                continue
            ranks = tuple(rank for rank, _ in held)
            for rank, position in held:
                passed[rank].append(Transfer(owner, ranks, position, share.box))
    return passed
