"""Refuses a source whose structure or files are broken, before anything is read or written."""

from __future__ import annotations

from collections.abc import Collection

from ckptool.errors import DamagedError
from ckptool.operations.open import Checkpoint
from ckptool.operations.validate_objects import check_files
from ckptool.planning.findings import ERROR, Finding
from ckptool.planning.item_ranges import item_ranges
from ckptool.planning.structure import check_structure

__all__ = ["require_sound"]

_NUM_SHOWN = 4
_FILE_CODES = {"missing-file", "short-file"}


def require_sound(checkpoint: Checkpoint, *, keys: Collection[str] | None = None) -> None:
    """Raise DamagedError unless chunks tile their tensors and every item is inside its file.

    ``keys`` are the entries that will be used; None is all of them.
    """
    found = [*check_structure(checkpoint.index)]
    found += check_files(checkpoint, item_ranges(checkpoint.index))
    faults = [f for f in found if f.severity == ERROR and _concerns(f, keys)]
    if not faults:
        return
    shown = "; ".join(finding.message for finding in faults[:_NUM_SHOWN])
    rest = len(faults) - _NUM_SHOWN
    raise DamagedError(
        f"{checkpoint.url} is damaged: {shown}" + (f"; and {rest} more" if rest > 0 else ""),
        hint=_hint(checkpoint, faults),
        url=checkpoint.url,
        entry=faults[0].entry or next(iter(faults[0].entries), None),
        files=[finding.file for finding in faults if finding.code in _FILE_CODES],
    )


def _concerns(finding: Finding, keys: Collection[str] | None) -> bool:
    return keys is None or finding.entry in keys or any(key in keys for key in finding.entries)


def _hint(checkpoint: Checkpoint, faults: list[Finding]) -> str:
    lists = f"ckptool validate {checkpoint.url} lists all findings"
    if {finding.code for finding in faults} <= _FILE_CODES:
        return f"bring these files from the host or the copy that still has them; {lists}"
    return f"{lists}; take an older step"
