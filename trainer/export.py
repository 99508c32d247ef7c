"""Hands the model to inference while it trains: when, where to, and with what beside it.

Exports are due every so many steps, at the end, and when a signal (SIGUSR2, on any rank) asks
for one. Each is a folder that ``transformers`` loads: safetensors and a ``config.json``.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from ckptool.errors import CkptoolError, NotEmptyError
from ckptool.layout import step_name
from ckptool.operations.export_target import cast_target
from ckptool.torch import ExportReport, LiveExporter
from trainer.config import CheckpointConfig, Config, ModelConfig
from trainer.metrics import Metrics
from trainer.model import hf_config
from trainer.precision import dtypes_of
from trainer.state import TrainState

__all__ = ["ExportSignal", "Exports"]

log = logging.getLogger("trainer")

_CANCEL_S = 3.0


class ExportSignal:
    """SIGUSR2 on any rank -> one step after which all ranks export.

    As for a preemption, the flagged rank writes into the store a step that no rank can have
    passed yet (``slack_steps`` ahead), and every rank looks there at every boundary.
    """

    def __init__(self, store: Store, *, slack_steps: int) -> None:
        self._store, self._slack_steps = store, slack_steps
        self._number = 0
        self._flagged = False
        self._old: Any = None

    def install(self) -> None:
        """Take the signal; only the main thread may, elsewhere this does nothing."""
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGUSR2, self._flag)

    def uninstall(self) -> None:
        if self._old is not None:
            signal.signal(signal.SIGUSR2, self._old)
            self._old = None

    @property
    def pending(self) -> bool:
        """Whether this rank was asked for an export that has not been made."""
        return self._flagged

    def due(self, step: int) -> bool:
        """Whether to export now, after ``step`` steps; call it at every boundary."""
        key = f"export/{self._number}"
        try:
            if self._flagged:
                at = int(self._store.compare_set(key, "", str(step + self._slack_steps)))
            elif self._store.check([key]):
                at = int(self._store.get(key))
            else:
                return False
        except (dist.DistStoreError, RuntimeError, ValueError):
            return False  # the store is gone, and the job with it
        if step < at:
            return False
        self._number += 1
        self._flagged = False
        return True

    def _flag(self, number: int, frame: FrameType | None) -> None:
        self._flagged = True


class Exports:
    """The exports of a run; ``prepare``, ``start`` and ``finish`` are collective."""

    def __init__(self, config: Config, model: ModelConfig, asked: ExportSignal) -> None:
        self._config: CheckpointConfig = config.checkpoint
        self._root = (config.checkpoint.export_to or f"{config.run.root}/exports").rstrip("/")
        self._timeout_s = config.run.process_timeout_s
        self._asked = asked
        cast_target(config.checkpoint.export_dtype or None)
        master = str(dtypes_of(config.precision).master).removeprefix("torch.")
        dtype = config.checkpoint.export_dtype or master
        facts = {**hf_config(model), "torch_dtype": dtype}
        self._beside = {"config.json": json.dumps(facts, indent=2).encode() + b"\n"}
        self._exporter: LiveExporter | None = None
        self._steps: dict[str, int] = {}

    def prepare(self, model: nn.Module) -> None:
        """Before the first step, where exports are planned: learn of its optimizer, pin memory."""
        if not self._config.export_every and not self._config.export_at_end:
            return
        self._exporter = self._open()
        if self._config.export_mode == "snapshot":
            self._exporter.prepare(model)

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to export after ``step`` steps; call it once at every boundary."""
        asked = self._asked.due(step)
        every = self._config.export_every
        return asked or (last and self._config.export_at_end) or (every > 0 and step % every == 0)

    def start(self, state: TrainState, metrics: Metrics) -> None:
        """Export the model as it is after ``state.step`` steps, or start to."""
        if self._exporter is None:
            self._exporter = self._open()
        url = f"{self._root}/{step_name(state.step)}"
        self._steps[url] = state.step
        try:
            report = self._exporter.export(
                state.model,
                url,
                dtype=self._config.export_dtype or None,
                storage_options=self._config.storage_options,
                mode=self._config.export_mode,
                beside=self._beside,
            )
        except NotEmptyError as error:
            log.warning("step %d is not exported: %s", state.step, error)
            return
        except CkptoolError as error:
            if self._config.on_failure == "raise":
                raise
            log.error("the export of step %d failed: %s", state.step, error)
            return
        metrics.write("stall", step=state.step, seconds=report.blocked_s)
        self._tell(report, state, metrics)

    def note(self, state: TrainState, metrics: Metrics) -> None:
        """Tell of the exports that have ended since the last time."""
        for report in self._exporter.finished() if self._exporter is not None else []:
            self._tell(report, state, metrics)

    def finish(self, state: TrainState, metrics: Metrics) -> None:
        """Wait for what is in flight, and leave."""
        if self._asked.pending:
            log.warning("an export was asked for too late: checkpoint.export_at_end makes one")
        if self._exporter is not None:
            self._exporter.wait()
            self.note(state, metrics)
            self._exporter.close()
            self._exporter = None

    def break_off(self) -> None:
        """The job is told to go: give up what is in flight, and leave nothing of it."""
        if self._exporter is not None:
            self._exporter.cancel(timeout_s=_CANCEL_S)

    def _open(self) -> LiveExporter:
        return LiveExporter(process_timeout_s=self._timeout_s, on_failure=self._config.on_failure)

    def _tell(self, report: ExportReport, state: TrainState, metrics: Metrics) -> None:
        if not report.committed:
            return
        step = self._steps.pop(report.url)
        metrics.write(
            "export",
            step=step,
            url=report.url,
            num_bytes=report.num_bytes,
            stall_s=report.blocked_s,
            seconds=report.seconds,
            mode=report.mode,
        )
        if state.layout.is_main:
            log.info("exported step %d in %.2f s to %s", step, report.seconds, report.url)
