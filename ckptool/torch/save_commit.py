"""What every rank reported -> a committed step, and the steps that retention lets go. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptool.errors import CkptoolError
from ckptool.storage.base import Store
from ckptool.torch.commit import Commit, commit_checkpoint, remove_orphans
from ckptool.torch.retention import Retention, prune
from ckptool.torch.save_index import RankResult, build_index, stored_objects
from ckptool.torch.shares import Offer, Share

__all__ = ["CommitOrder", "commit_rows"]

log = logging.getLogger("ckptool")


@dataclass(frozen=True)
class CommitOrder:
    """One commit: step, the folder's name, attempt, and what the manifest says besides."""

    step: int
    name: str
    attempt: str
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    retention: Retention = field(default_factory=Retention)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> CommitOrder:
        return cls(**{**row, "retention": Retention(**row["retention"])})


def commit_rows(
    run: Store,
    order: CommitOrder,
    agreed: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    owner_pid: int | None = None,
) -> dict[str, Any]:
    """Commit the step; returns the bytes of all shard files and the names of deleted steps.

    ``agreed`` is the layout as JSON (offers, shares and paths of all ranks), ``rows`` has
    every rank's RankResult as JSON.
    """
    results = [RankResult.from_json(row) for row in rows]
    offers = [tuple(map(Offer.from_json, row)) for row in agreed["offers"]]
    shares = [tuple(map(Share.from_json, row)) for row in agreed["shares"]]
    paths = {key: tuple(path) for key, path in agreed["paths"].items()}
    index, payloads = build_index(offers, shares, paths, results)
    objects = stored_objects(results)
    facts = Commit(order.step, order.attempt, order.layout, order.versions, payloads)
    commit_checkpoint(run.child(order.name), index, objects, facts, rank=rank, owner_pid=owner_pid)
    return {
        "num_bytes": sum(row.num_bytes for row in objects),
        "deleted": _tidy(run, order, {row.key for row in objects}),
    }


def _tidy(run: Store, order: CommitOrder, live: set[str]) -> list[str]:
    """The step is committed: what cannot be cleared away is a warning, no failure."""
    try:
        remove_orphans(run.child(order.name), live)
        return prune(run, order.retention)
    except CkptoolError as error:
        log.warning("step %d is committed, but old files are still there: %s", order.step, error)
        return []
