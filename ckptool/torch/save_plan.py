"""What every rank has -> what this one stores, agreed by all ranks and kept between saves.

Tensors are planned once per layout: each rank's offers go to rank 0, its shares come back.
Values are compared at every save: shared ones must be equal on all ranks that have them, and
the lowest of these stores them; a rank's own entries are stored by it alone.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.errors import UsageError
from ckptool.torch import values
from ckptool.torch.group import Group
from ckptool.torch.local_state import LocalShard, LocalState, Path
from ckptool.torch.shares import Offer, Share, assign_shares

__all__ = ["Layout", "RankSave", "SavePlanner", "StoredValue"]


@dataclass(frozen=True)
class Layout:
    """The agreed layout of all tensors; the lists of other ranks are on rank 0 only.

    ``shares`` is this rank's. ``offers`` and ``all_shares`` have a row per rank, and ``paths``
    every key's place in the nested state.
    """

    shares: tuple[Share, ...]
    offers: tuple[tuple[Offer, ...], ...] = ()
    all_shares: tuple[tuple[Share, ...], ...] = ()
    paths: Mapping[str, Path] | None = None

    def agreed(self) -> dict[str, Any]:
        """On rank 0: what all ranks agreed on, as JSON."""
        return {
            "offers": [[offer.to_json() for offer in row] for row in self.offers],
            "shares": [[share.to_json() for share in row] for row in self.all_shares],
            "paths": {key: list(path) for key, path in (self.paths or {}).items()},
        }


@dataclass(frozen=True)
class StoredValue:
    """A value that this rank stores."""

    key: str
    path: Path
    data: bytes


@dataclass(frozen=True)
class RankSave:
    """What this rank stores in one attempt; ``shards`` are its tensors, as offered."""

    step: int
    attempt: str
    layout: Layout
    shards: tuple[LocalShard, ...]
    values: tuple[StoredValue, ...]


class SavePlanner:
    """Plans saves over a group, and remembers the last layout."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layout: Layout | None = None
        self._offered: list[Offer] = []

    def plan(self, step: int, shared: LocalState, own: LocalState) -> RankSave:
        """Collective; raises the same error on every rank."""
        facts: dict[str, Any] = {}

        def offer() -> bytes:
            facts["offers"] = _offers(shared, own)
            facts["digests"] = {key: values.digest(v) for key, v in shared.values.items()}
            facts["stored"] = self._encode(shared, own, self._usual_values(shared))
            known = self._layout is not None and self._offered == facts["offers"]
            row = {
                "step": step,
                "known": known,
                "values": _hash(sorted(facts["digests"].items())),
                "attempt": secrets.token_hex(4),
            }
            return json.dumps(row).encode()

        rows = [json.loads(row) for row in self._group.together(offer)]
        _check_steps([row["step"] for row in rows])
        if not all(row["known"] for row in rows):
            paths = {**shared.paths, **own.paths}
            self._layout = None
            self._layout = self._agree(facts["offers"], paths)
            self._offered = facts["offers"]
        assert self._layout is not None
        same = len({row["values"] for row in rows}) == 1
        stored = facts["stored"]
        if not same:
            mine = self._share_values(facts["digests"])
            self._group.together(lambda: self._encode_into(facts, shared, own, mine))
            stored = facts["stored"]
        shards = (*shared.shards, *own.shards)
        return RankSave(step, rows[0]["attempt"], self._layout, shards, stored)

    def _agree(self, offers: list[Offer], paths: Mapping[str, Path]) -> Layout:
        keys = {offer.key for offer in offers}
        row = {
            "offers": [offer.to_json() for offer in offers],
            "paths": {key: path for key, path in paths.items() if key in keys},
        }
        gathered = self._group.gather(json.dumps(row).encode())
        every: list[Any] = []

        def assign() -> list[list[Any]]:
            for data in gathered or []:
                every.append(json.loads(data))
            offered = [tuple(map(Offer.from_json, row["offers"])) for row in every]
            every[:] = [offered, _merged_paths(every), assign_shares(offered)]
            return []

        self._group.from_rank_0(assign)
        if not every:
            mine = json.loads(self._group.scatter(None))
            return Layout(tuple(map(Share.from_json, mine)))
        offered, merged, shares = every
        mine = json.loads(self._group.scatter([_json(row) for row in shares]))
        all_shares = tuple(map(tuple, shares))
        own = tuple(map(Share.from_json, mine))
        return Layout(own, tuple(offered), all_shares, merged)

    def _usual_values(self, shared: LocalState) -> set[str]:
        """The values that this rank stores where all ranks have the same ones."""
        return set(shared.values) if self._group.rank == 0 else set()

    def _share_values(self, digests: Mapping[str, str]) -> set[str]:
        """Keys of the values that this rank stores where the ranks have different keys."""
        rows = [json.loads(r) for r in self._group.all_gather(json.dumps(digests).encode())]
        holder: dict[str, int] = {}
        for rank, row in enumerate(rows):
            for key, found in row.items():
                first = holder.setdefault(key, rank)
                if rows[first][key] != found:
                    raise UsageError(
                        f"{key} differs between ranks {first} and {rank}",
                        hint="shared values must be equal on all ranks; give an entry that "
                        "belongs to a rank through rank_state",
                        entry=key,
                    )
        return {key for key, rank in holder.items() if rank == self._group.rank}

    def _encode_into(
        self, facts: dict[str, Any], shared: LocalState, own: LocalState, mine: set[str]
    ) -> bytes:
        facts["stored"] = self._encode(shared, own, mine)
        return b""

    @staticmethod
    def _encode(shared: LocalState, own: LocalState, mine: set[str]) -> tuple[StoredValue, ...]:
        return tuple(
            StoredValue(key, state.paths[key], values.encode(key, value))
            for state, keys in ((shared, mine), (own, set(own.values)))
            for key, value in state.values.items()
            if key in keys
        )


def _offers(shared: LocalState, own: LocalState) -> list[Offer]:
    clash = set(shared.paths) & set(own.paths)
    if clash:
        raise UsageError(
            f"{sorted(clash)[0]} is both in the state and in rank_state", hint="rename one of them"
        )
    return [
        Offer(shard.key, shard.dtype, shard.shape, shard.box, is_own)
        for state, is_own in ((shared, False), (own, True))
        for shard in state.shards
    ]


def _check_steps(steps: Sequence[int]) -> None:
    if len(set(steps)) > 1:
        raise UsageError(
            f"the ranks save different steps: {steps}", hint="call save on every rank together"
        )


def _merged_paths(rows: Sequence[Any]) -> dict[str, Path]:
    merged: dict[str, Path] = {}
    for row in rows:
        for key, path in row["paths"].items():
            merged.setdefault(key, tuple(path))
    return merged


def _hash(rows: Any) -> str:
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def _json(rows: Sequence[Share]) -> bytes:
    return json.dumps([row.to_json() for row in rows]).encode()
