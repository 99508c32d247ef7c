"""A finding: one thing that a check has to say about a checkpoint, with its place.

An *error* means that the checkpoint cannot be read back as it says; a *warning* that something
could not be proven or looks wrong; a *note* that something is worth knowing and harms nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.model import Box

__all__ = ["ERROR", "NOTE", "WARNING", "Finding", "box_json", "subject_name"]

ERROR = "error"
WARNING = "warning"
NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; what is not known is None.

    ``code`` is stable and meant for programs; ``file`` is relative to the checkpoint;
    ``offset`` is a byte of that file; ``entries`` lists the keys that a whole file holds.
    """

    code: str
    severity: str
    message: str
    entry: str | None = None
    box: Box | None = None
    file: str | None = None
    offset: int | None = None
    entries: tuple[str, ...] = ()

    @property
    def is_error(self) -> bool:
        return self.severity == ERROR

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "entry": self.entry,
            "box": None if self.box is None else box_json(self.box),
            "file": self.file,
            "offset": self.offset,
            "entries": list(self.entries),
        }


def box_json(box: Box) -> dict[str, list[int]]:
    """A box as JSON has it."""
    return {"offsets": list(box.offsets), "sizes": list(box.sizes)}


def subject_name(key: str, box: Box | None) -> str:
    """What a message calls a chunk, or (without a box) a value."""
    return f"value {key!r}" if box is None else f"chunk {box} of {key!r}"
