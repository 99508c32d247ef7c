"""Refuses a source whose structure is broken, before anything is read or written."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from ckptool.errors import DamagedError
from ckptool.model import Index
from ckptool.planning.structure import check_structure

__all__ = ["require_sound"]


def require_sound(index: Index, *, url: str, keys: Collection[str] | None = None) -> None:
    """Raise DamagedError unless the chunks of the entries tile them and all are stored.

    ``keys`` are the entries that will be used; None is all of them.
    """
    findings = (
        finding
        for finding in check_structure(index)
        if finding.severity == "error" and (keys is None or finding.entry in keys)
    )
    first = list(islice(findings, 3))
    if first:
        raise DamagedError(
            f"{url} is damaged: " + "; ".join(finding.message for finding in first),
            hint=f"ckptool validate {url} lists all findings; take an older step",
            url=url,
            entry=first[0].entry,
        )
