"""The steps of a run in a store: which are committed, which to keep, how to delete one.

Deleting removes ``.metadata`` first, so that an interruption leaves an uncommitted step,
never a damaged one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckptool.errors import AccessError, DamagedError
from ckptool.layout import (
    INDEX_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    is_committed,
    step_name,
    step_number,
)
from ckptool.storage.base import Store

__all__ = [
    "Retention",
    "abort_stale_uploads",
    "committed_steps",
    "delete_step",
    "is_shard_name",
    "prune",
    "steps_to_delete",
]

log = logging.getLogger("ckptool")
_ATTEMPT = re.compile(r"[^/]+/__\d+_\d+\.[0-9a-f]+\.distcp")
_SHARD = re.compile(r"__\d+_\d+(\.[0-9a-f]+)?\.distcp")


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest ``keep_last`` steps and every step whose number ``keep_every`` divides.

    Without either, everything is kept.
    """

    keep_last: int | None = None
    keep_every: int | None = None


def committed_steps(store: Store) -> dict[int, str]:
    """Number -> name of the committed steps of a run, in the order of their numbers.

    Raises DamagedError where two committed steps have one number.
    """
    found: dict[int, str] = {}
    for name, sizes in _children(store).items():
        number = step_number(name)
        if number is None or not is_committed(sizes):
            continue
        if number in found:
            raise DamagedError(
                f"{store.url} has two committed steps {number}: {found[number]} and {name}",
                hint="move one of them away",
            )
        found[number] = name
    return dict(sorted(found.items()))


def steps_to_delete(steps: Mapping[int, str], rule: Retention) -> list[str]:
    """Names of the steps that the rule lets go, oldest first; never the newest. Pure.

    Only names that we give ourselves are ever chosen.
    """
    if rule.keep_last is None and rule.keep_every is None:
        return []
    numbers = sorted(steps)
    keep = set(numbers[-max(rule.keep_last or 1, 1) :])
    if rule.keep_every:
        keep |= {number for number in numbers if number % rule.keep_every == 0}
    gone = [number for number in numbers if number not in keep]
    return [steps[number] for number in gone if steps[number] == step_name(number)]


def prune(store: Store, rule: Retention) -> list[str]:
    """Delete what the rule lets go, and unfinished steps older than the newest committed one.

    Returns the names of the steps that are gone.
    """
    steps = committed_steps(store)
    if not steps:
        return []
    unfinished = _unfinished(store, before=max(steps))
    names = [*steps_to_delete(steps, rule), *unfinished]
    for name in names:
        delete_step(store, name)
    return names


def delete_step(store: Store, name: str) -> None:
    """Remove a step of a run, ``.metadata`` first, and on a disk its folder."""
    objects = [item.key for item in store.list(name)]
    for key in sorted(objects, key=lambda key: key != f"{name}/{METADATA_NAME}"):
        store.delete(key)


def abort_stale_uploads(run: Store) -> list[str]:
    """Abort what saves that died left half written in a run; returns the keys.

    Only uploads with the names that an attempt gives its shard files are touched. Who may only
    read may still load: a store that does not allow this is a warning.
    """
    try:
        stale = [row for row in run.list_uploads() if _ATTEMPT.fullmatch(row.key)]
        for row in stale:
            run.abort_upload(row.key, row.token)
    except AccessError as error:
        log.warning("uploads that a dead save may have left are still there: %s", error)
        return []
    return [row.key for row in stale]


def is_shard_name(key: str) -> bool:
    """Whether a name in a step's folder is one that a save gives to shard files."""
    return _SHARD.fullmatch(key) is not None


def _unfinished(store: Store, *, before: int) -> list[str]:
    """Steps with our own names and nothing but what saves that never committed left there."""
    names = []
    for name, sizes in _children(store).items():
        number = step_number(name)
        ours = number is not None and name == step_name(number) and number < before
        if ours and sizes and not is_committed(sizes) and all(map(_is_leftover, sizes)):
            names.append(name)
    return sorted(names)


def _is_leftover(name: str) -> bool:
    return is_shard_name(name) or name in (MANIFEST_NAME, INDEX_NAME, METADATA_NAME)


def _children(store: Store) -> dict[str, dict[str, int]]:
    """The run's folders and the objects right inside each."""
    children: dict[str, dict[str, int]] = {}
    for name in store.list_level().folders:
        objects = store.list_level(name).objects
        children[name] = {item.key.rsplit("/", 1)[-1]: item.num_bytes for item in objects}
    return children
