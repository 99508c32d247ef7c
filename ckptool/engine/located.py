"""Adds to an error about bytes where in the checkpoint they stand."""

from __future__ import annotations

from ckptool.errors import DamagedError, UnsupportedError
from ckptool.model import Box, Item

__all__ = ["located"]


class located:
    """A block in which one item is read; its DamagedError and UnsupportedError gain a place.

    Errors that name an entry already pass as they are.
    """

    def __init__(self, entry: str, box: Box | None, item: Item) -> None:
        self._entry, self._box, self._item = entry, box, item

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (DamagedError, UnsupportedError)) or "entry" in error.facts:
            return
        item, where = self._item, f" {self._box}" if self._box is not None else ""
        place = {"entry": self._entry, "file": item.file, "offset": item.offset}
        raise type(error)(
            f"{self._entry}{where}: the item at {item.file}:{item.offset}: {error.message}",
            hint=error.hint or "ckptool validate --read-data lists every damaged entry",
            **{**error.facts, **place},
        ) from error
