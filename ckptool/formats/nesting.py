"""Flat entries and the paths they came from -> the nested dicts and lists of a state dict.

Follows torch's own ``unflatten_state_dict``: a text in a path is a mapping's key, a number a
position in a list, and positions that nothing fills hold None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from ckptool.errors import DamagedError

__all__ = ["nest"]

Path: TypeAlias = "tuple[str | int, ...]"

_MAX_NUM_HOLES = 1 << 20


def nest(
    entries: Mapping[str, Any],
    paths: Mapping[str, Path | None],
    *,
    int_keys: bool = False,
) -> dict[Any, Any]:
    """The nested dict that holds each entry at its path; one without a path stays flat.

    ``int_keys`` turns the keys of all-digit mappings directly under a key ``state`` back into
    numbers. Raises DamagedError, naming both keys, where two paths exclude each other.
    """
    nesting = _Nesting()
    for key, leaf in entries.items():
        path = paths.get(key)
        nesting.put(key, (key,) if path is None else tuple(path), leaf)
    if int_keys:
        nesting.number_states()
    return nesting.root


class _Nesting:
    def __init__(self) -> None:
        self.root: dict[Any, Any] = {}
        self.containers: dict[Path, dict[Any, Any] | list[Any]] = {(): self.root}
        self.owners: dict[Path, str] = {}
        self.num_holes = 0

    def put(self, key: str, path: Path, leaf: Any) -> None:
        _check_path(key, path)
        for depth in range(1, len(path)):
            self._open(key, path[:depth], dict if type(path[depth]) is str else list)
        if path in self.owners:
            raise _conflict(key, self.owners[path], path)
        self._set(key, path, leaf)

    def number_states(self) -> None:
        """Give all-digit mappings under ``state`` their numbers back."""
        for path, container in self.containers.items():
            if path[-1:] == ("state",) and container and type(container) is dict:
                numbers = [_number(key) for key in container]
                if None not in numbers:
                    values = list(container.values())
                    container.clear()
                    container.update(zip(numbers, values, strict=True))

    def _open(self, key: str, path: Path, kind: type) -> None:
        """See that a container of that kind stands at ``path``."""
        found = self.containers.get(path)
        if found is None and path not in self.owners:
            self.containers[path] = made = kind()
            self._set(key, path, made)
        elif type(found) is not kind:
            raise _conflict(key, self.owners[path], path)

    def _set(self, key: str, path: Path, value: Any) -> None:
        parent, last = self.containers[path[:-1]], path[-1]
        if isinstance(parent, list):
            assert isinstance(last, int)
            missing = last + 1 - len(parent)
            self.num_holes += max(missing - 1, 0)
            if self.num_holes > _MAX_NUM_HOLES:
                raise DamagedError(
                    f"entry {key!r} has the path {path}, a position too far into a list",
                    entry=key,
                )
            parent.extend([None] * missing)
        parent[last] = value  # type: ignore[index]
        self.owners[path] = key


def _check_path(key: str, path: Path) -> None:
    fine = path and type(path[0]) is str
    for part in path:
        fine = fine and (type(part) is str or (type(part) is int and part >= 0))
    if not fine:
        raise DamagedError(f"entry {key!r} has an impossible path {path!r:.200}", entry=key)


def _number(key: Any) -> int | None:
    """The number that ``key`` spells, None for any other key."""
    if type(key) is str and key.isascii() and key.isdigit() and len(key) < 20:
        return int(key) if str(int(key)) == key else None
    return None


def _conflict(key: str, other: str, path: Path) -> DamagedError:
    place = ".".join(map(str, path))
    return DamagedError(
        f"entries {other!r} and {key!r} cannot both stand at {place!r} of a nested state dict",
        hint=f"leave one out: --exclude {key!r}",
        entry=key,
        other=other,
    )
