"""A root -> its steps and their states, from one listing; ``.metadata`` is never parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckptool.errors import NoCheckpointError
from ckptool.layout import (
    INDEX_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    is_checkpoint_listing,
    is_committed,
    is_journal_name,
    step_number,
)
from ckptool.operations.foreign import describe_foreign
from ckptool.storage import open_store
from ckptool.storage.base import ObjectInfo

__all__ = ["LsResult", "Step", "list_steps", "nothing_there", "rfc3339", "same_numbers", "state_of"]

COMMITTED = "committed"
UNCOMMITTED = "uncommitted"
HALF_DELETED = "half-deleted"
RANK_LOCAL = "rank-local"


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint of a run, as a listing shows it.

    ``state`` is ``committed``; ``uncommitted`` (no ``.metadata``, or one of 0 bytes: the save
    or the reshard did not finish); ``half-deleted`` (no ``.metadata``, but the files that are
    written just before it: a delete was cut short, or a save in its last moment); or
    ``rank-local`` (every rank has a metadata file of its own, and none speaks for all).
    """

    name: str
    url: str
    number: int | None
    state: str
    num_bytes: int
    num_files: int
    modified: datetime | None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.url,
            "step": self.number,
            "state": self.state,
            "committed": self.state == COMMITTED,
            "num_bytes": self.num_bytes,
            "num_files": self.num_files,
            "modified": None if self.modified is None else rfc3339(self.modified),
        }


@dataclass(frozen=True, slots=True)
class LsResult:
    """The steps of a root, oldest first; ``problems`` are things that must be put right."""

    url: str
    is_checkpoint: bool
    steps: tuple[Step, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "is_checkpoint": self.is_checkpoint,
            "steps": [s.to_json() for s in self.steps],
            "problems": list(self.problems),
        }


def list_steps(root_url: str, *, options: Mapping[str, Any] | None = None) -> LsResult:
    """The steps below a root, or the root itself where it is a checkpoint.

    Raises NoCheckpointError when there is neither.
    """
    store = open_store(root_url, options=options)
    objects = store.list()
    if is_checkpoint_listing(_sizes(o for o in objects if "/" not in o.key)):
        step = _step(store.url.rsplit("/", 1)[-1], store.url, objects)
        return LsResult(store.url, True, (step,), ())
    children: dict[str, list[ObjectInfo]] = {}
    for info in objects:
        name, slash, rest = info.key.partition("/")
        if slash:
            children.setdefault(name, []).append(_below(info, rest))
    steps = [
        _step(name, store.url_of(name), below)
        for name, below in children.items()
        if is_checkpoint_listing(_sizes(o for o in below if "/" not in o.key))
    ]
    if not steps:
        raise nothing_there(store.url, [o.key for o in objects])
    steps.sort(key=lambda s: (-1 if s.number is None else s.number, s.name))
    return LsResult(store.url, False, tuple(steps), tuple(same_numbers(steps)))


def same_numbers(steps: Sequence[Step]) -> list[str]:
    """A sentence for each number that more than one step has."""
    names: dict[int, list[str]] = {}
    for step in steps:
        if step.number is not None:
            names.setdefault(step.number, []).append(step.name)
    return [
        f"step {number} is there {len(same)} times: {', '.join(sorted(same))}"
        for number, same in names.items()
        if len(same) > 1
    ]


def state_of(sizes: Mapping[str, int]) -> str:
    """The state of a checkpoint whose own files have these sizes."""
    if is_committed(sizes):
        return COMMITTED
    if METADATA_NAME not in sizes and any(n.endswith(".metadata") for n in sizes):
        return RANK_LOCAL
    was_begun = any(is_journal_name(name) for name in sizes)
    if (MANIFEST_NAME in sizes or INDEX_NAME in sizes) and not was_begun:
        return HALF_DELETED
    return UNCOMMITTED


def nothing_there(url: str, keys: Sequence[str]) -> NoCheckpointError:
    """The error for a root that holds neither a checkpoint nor steps."""
    if not keys:
        return NoCheckpointError(
            f"nothing is there: {url}", hint="check the path, and the bucket's region", url=url
        )
    deeper = sorted({k.rsplit("/", 1)[0] for k in keys if k.endswith("/.metadata")})
    if deeper:
        run = deeper[0].rsplit("/", 1)[0]
        return NoCheckpointError(
            f"no checkpoint in {url} and no steps; {len(deeper)} checkpoints lie deeper below it",
            hint=f"name a run, such as {url}/{run}",
            url=url,
        )
    foreign = describe_foreign([k for k in keys if k.count("/") < 2])
    if foreign is not None:
        message = f"no sharded (DCP) checkpoint in {url}: it holds {foreign.what}"
        return NoCheckpointError(message, hint=foreign.hint, url=url, found=foreign.what)
    some = ", ".join(sorted(keys)[:4]) + (", ..." if len(keys) > 4 else "")
    return NoCheckpointError(
        f"no checkpoint in {url}: no .metadata and no .distcp, only {len(keys)} other files",
        hint=f"a checkpoint is a folder with .metadata and .distcp files; here is {some}",
        url=url,
    )


def rfc3339(time: datetime) -> str:
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")


def _step(name: str, url: str, objects: Sequence[ObjectInfo]) -> Step:
    times = [o.modified for o in objects if o.modified is not None]
    return Step(
        name=name,
        url=url,
        number=step_number(name),
        state=state_of(_sizes(o for o in objects if "/" not in o.key)),
        num_bytes=sum(o.num_bytes for o in objects),
        num_files=len(objects),
        modified=max(times, default=None),
    )


def _sizes(objects: Any) -> dict[str, int]:
    return {o.key: o.num_bytes for o in objects}


def _below(info: ObjectInfo, key: str) -> ObjectInfo:
    return ObjectInfo(key, info.num_bytes, info.modified)
