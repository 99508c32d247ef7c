"""Turns a run's numbers into JSON lines, and into TensorBoard events where that is asked for.

Only rank 0 writes. Each line is one ``event``: ``start``, ``step``, ``save`` or ``end``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckptool.errors import UsageError
from trainer.config import Config

__all__ = ["Metrics", "metrics_dir"]


def metrics_dir(config: Config) -> Path:
    """The run's own folder where it is local: lines cannot be appended to an object."""
    root = config.run.root.removeprefix("file://")
    if config.metrics.dir:
        return Path(config.metrics.dir)
    if "://" in root:
        return Path("metrics") / root.rstrip("/").rpartition("/")[2]
    return Path(root)


class Metrics:
    """Where rank 0's numbers go; on other ranks it takes them and does nothing."""

    def __init__(self, config: Config, *, enabled: bool) -> None:
        self._file = None
        self._board: Any = None
        if not enabled:
            return
        folder = metrics_dir(config)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        if config.metrics.tensorboard:
            self._board = _open_board(folder / "tensorboard")

    def write(self, event: str, *, step: int, **values: Any) -> None:
        """One line; numbers also go to TensorBoard under ``event/name``."""
        if self._file is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = {"event": event, "time": now.replace("+00:00", "Z"), "step": step, **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in _numbers(values).items():
                self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "metrics.tensorboard is on, and TensorBoard is not installed",
            hint="pip install tensorboard",
        ) from error
    return SummaryWriter(str(folder))
