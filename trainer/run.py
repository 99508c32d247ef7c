"""What a running rank works with, and how it tells of steps, saves and memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ckptool.torch import Checkpointer, SaveReport
from trainer.estimate import Estimate
from trainer.export import Exports
from trainer.flops import peak_flops
from trainer.memory import MemoryProbe
from trainer.meter import Meter, StepResult
from trainer.metrics import Metrics
from trainer.preempt import Preemption
from trainer.state import TrainState
from trainer.watchdog import Watchdog

__all__ = ["Run", "flush_losses", "note_saves", "report_memory"]

log = logging.getLogger("trainer")


@dataclass
class Run:
    """``saved_step`` was handed to the checkpointer, ``committed_step`` is known to be there."""

    state: TrainState
    checkpointer: Checkpointer
    metrics: Metrics
    meter: Meter
    preemption: Preemption
    watchdog: Watchdog
    flops_per_token: float
    expected: Estimate
    exports: Exports
    saved_step: int | None = None
    committed_step: int | None = None


def flush_losses(run: Run) -> None:
    """Exchange the losses of the steps since the last time, and look at them; collective."""
    for result in run.meter.flush():
        _report(run, result)


def _report(run: Run, result: StepResult) -> None:
    state = run.state
    tokens_per_s = state.config.data.global_batch * state.config.data.seq_len / result.seconds
    peak = state.config.metrics.peak_flops or peak_flops(state.layout.device)
    mfu = tokens_per_s * run.flops_per_token / (peak * state.layout.world_size) if peak else None
    run.metrics.write(
        "step",
        step=result.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens_per_s=tokens_per_s,
        mfu=mfu,
    )
    if state.layout.is_main:
        tail = f"  mfu {mfu:.1%}" if mfu else ""
        log.info(
            "step %d  loss %.4f  norm %.3f  lr %.2e  %.0f tokens/s%s",
            result.step,
            result.loss,
            result.grad_norm,
            result.lr,
            tokens_per_s,
            tail,
        )


def note_saves(run: Run, *reports: SaveReport) -> None:
    """Tell of the saves that have ended since the last time."""
    for report in (*reports, *run.checkpointer.finished()):
        if not report.committed:
            continue
        if report.step == run.committed_step:
            continue
        run.committed_step = report.step
        run.metrics.write(
            "save",
            step=report.step,
            num_bytes=report.num_bytes,
            stall_s=report.blocked_s,
            seconds=report.seconds,
            mode=report.mode,
        )
        if run.state.layout.is_main:
            log.info("saved step %d in %.2f s", report.step, report.seconds)


def report_memory(run: Run, probe: MemoryProbe) -> None:
    """What the second step holds, beside what was estimated."""
    run.metrics.write(
        "memory",
        step=run.state.step,
        steady=probe.steady,
        estimated_steady=run.expected.steady,
        peak=probe.peak,
        estimated_peak=run.expected.peak,
    )
    if run.state.layout.is_main:
        mib = 1 << 20
        peak = f"; peak {probe.peak / mib:,.1f} MiB" if probe.peak else ""
        log.info(
            "memory after a step: %s MiB, estimated %s MiB%s",
            f"{probe.steady / mib:,.1f}",
            f"{run.expected.steady / mib:,.1f}",
            peak,
        )
