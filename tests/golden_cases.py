"""The golden checkpoints: real ones that several torch releases wrote, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One checkpoint; ``entries`` is what the release itself loads from it."""

    name: str
    path: Path
    entries: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        return self.name

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        return {key: row for key, row in self.entries.items() if row["kind"] == "tensor"}


def golden_cases() -> Iterator[Golden]:
    """All of them, by release and case."""
    for expected in sorted(ROOT.glob("*/*/expected.json")):
        entries = json.loads(expected.read_text())["entries"]
        folder = expected.parent
        yield Golden(f"{folder.parent.name}/{folder.name}", folder / "ckpt", entries)
