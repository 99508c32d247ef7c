"""Names in a run and in a checkpoint directory, and what a listing of one tells.

A step is a direct child of a run; its number is the last integer in its name. A checkpoint is
committed when a non-empty ``.metadata`` is listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = [
    "INDEX_NAME",
    "JOURNAL_NAME",
    "MANIFEST_NAME",
    "METADATA_NAME",
    "is_checkpoint_listing",
    "is_committed",
    "is_journal_name",
    "is_safe_relative_path",
    "journal_key_for_file",
    "shard_file_name",
    "step_name",
    "step_number",
]

METADATA_NAME = ".metadata"
MANIFEST_NAME = "ckpt.json"
INDEX_NAME = "ckpt.index"
JOURNAL_NAME = ".ckptool-journal.json"


def step_name(step: int) -> str:
    """The name that we give to a step: ``step-00012000``."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """The last integer in a step's name, None where it has none."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None


def shard_file_name(rank: int, part: int, *, attempt: str | None = None) -> str:
    """``__{rank}_{part}.distcp``, with the save attempt's own token where there is one."""
    token = f".{attempt}" if attempt else ""
    return f"__{rank}_{part}{token}.distcp"


def is_checkpoint_listing(sizes: Mapping[str, int]) -> bool:
    """Whether files with these names make a folder a checkpoint, committed or not."""
    return any(name.endswith((".metadata", ".distcp")) for name in sizes)


def is_committed(sizes: Mapping[str, int]) -> bool:
    """Whether a non-empty ``.metadata`` is listed; it is never parsed for this."""
    return sizes.get(METADATA_NAME, 0) > 0


def journal_key_for_file(name: str) -> str:
    """Where the journal of a single output file stands: beside it."""
    return name + JOURNAL_NAME


def is_journal_name(name: str) -> bool:
    """Whether an object belongs to the journal of an interrupted run."""
    return JOURNAL_NAME in name


def is_safe_relative_path(path: str) -> bool:
    """Whether a path that a metadata names stays inside the checkpoint directory.

    No scheme, no absolute path, no drive, no ``.`` or ``..`` part, no NUL or backslash.
    """
    if not path or "\\" in path or "\0" in path or "://" in path or path.startswith("/"):
        return False
    parts = path.split("/")
    return all(part not in ("", ".", "..") for part in parts) and ":" not in parts[0]
