"""Turns a configuration into a trained, saved, resumable run. Read it top to bottom.

``train`` prepares one rank, resumes from the newest committed step, and loops: a look at
whether to stop, a step, the losses when they are due, a save or an export when one is due.
"""

from __future__ import annotations

import logging
import os
import time

import torch

from ckptool.torch import Checkpointer
from trainer.config import Config
from trainer.data import DataStream, load_corpus
from trainer.estimate import estimate
from trainer.export import Exports, ExportSignal
from trainer.flops import flops_per_token
from trainer.full_state import export_full, import_full
from trainer.layout import Layout, build_mesh, resolve_parallel
from trainer.memory import MemoryProbe, memory_of
from trainer.meter import Meter, NonFiniteError
from trainer.metrics import Metrics
from trainer.mistakes import check_mesh, check_optimizer, check_same_start, warnings_of
from trainer.model import complete_model_config
from trainer.optim import build_optimizer
from trainer.outcome import (
    DONE,
    FAILED,
    NON_FINITE,
    PREEMPTED,
    PREEMPTED_UNSAVED,
    Outcome,
    OutcomeWriter,
)
from trainer.parallel import build_model
from trainer.preempt import Preemption, open_job_store
from trainer.process import Pace, leave_at_once, process_group
from trainer.run import Run, flush_losses, note_saves, report_memory
from trainer.scaler import LossScaler
from trainer.state import TrainState
from trainer.step import train_step
from trainer.watchdog import Watchdog

__all__ = ["train"]

log = logging.getLogger("trainer")


def train(config: Config) -> int:
    """Run to ``run.steps`` and return the exit code of this rank."""
    with process_group(config.run) as (device, rank, world_size):
        store = open_job_store(world_size)
        outcomes = OutcomeWriter(config, store, rank=rank)
        slack = 2 if device.type == "cuda" else 1
        preemption = Preemption(store, rank=rank, world_size=world_size, slack_steps=slack)
        asked = ExportSignal(store, slack_steps=slack)
        run: Run | None = None

        def report(exit_code: int, reason: str) -> None:
            step, committed = (run.state.step, run.committed_step) if run else (0, None)
            log.error("rank %d: %s", rank, reason)
            outcomes.write(Outcome(exit_code, step, committed, f"rank {rank}: {reason}"))

        watchdog = Watchdog(preemption, step_timeout_s=config.run.step_timeout_s, report=report)
        preemption.install()
        asked.install()
        try:
            if _stopped_before(outcomes):
                return NON_FINITE
            run = _prepare(config, device, rank, world_size, preemption, watchdog, asked)
            code, reason = _loop(run)
            outcome = Outcome(code, run.state.step, run.committed_step, reason)
        except NonFiniteError as error:
            assert run is not None
            _finish_saves(run)  # one that is in flight is older, and good
            log.error("stopping: %s; the newest good step is %s", error, run.committed_step)
            outcome = Outcome(NON_FINITE, error.step, run.committed_step, str(error))
        except Exception as error:
            report(FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            preemption.uninstall()
            asked.uninstall()
            watchdog.stop()
        if rank == 0:
            outcomes.write(outcome)
        run.metrics.write("end", step=run.state.step, exit_code=outcome.exit_code)
        run.metrics.close()
        if outcome.exit_code == PREEMPTED_UNSAVED:
            leave_at_once(PREEMPTED_UNSAVED)  # an orderly end would wait for the silent peer
        return outcome.exit_code


def _prepare(
    config: Config,
    device: torch.device,
    rank: int,
    world_size: int,
    preemption: Preemption,
    watchdog: Watchdog,
    asked: ExportSignal,
) -> Run:
    """Build everything and resume; collective."""
    corpus = load_corpus(config.data)
    model_config = complete_model_config(
        config.model, config.data, tokenizer_vocab_size=corpus.tokenizer.vocab_size
    )
    parallel = resolve_parallel(config.parallel, world_size=world_size, model=model_config)
    layout = Layout(parallel, device, rank, world_size, build_mesh(parallel, device=device))
    data = DataStream(
        corpus,
        config.data,
        seed=config.run.seed,
        rank=layout.data_rank,
        num_ranks=layout.num_data_ranks,
    )
    model = build_model(config, model_config, layout)
    optimizer = build_optimizer(model, config.optim, device=device)
    state = TrainState(config, layout, model, optimizer, data, _scaler(config))
    checkpointer = Checkpointer(
        config.run.root,
        storage_options=config.checkpoint.storage_options,
        keep_last=config.checkpoint.keep_last or None,
        keep_every=config.checkpoint.keep_every or None,
        process_timeout_s=config.run.process_timeout_s,
        mode=config.checkpoint.mode,
        on_failure=config.checkpoint.on_failure,
        compress=None if config.checkpoint.compress == "none" else config.checkpoint.compress,
        layout=layout.facts(),
    )
    tokens_per_step = config.data.global_batch * config.data.seq_len
    flops = flops_per_token(
        model_config, num_parameters=model_config.num_parameters, seq_len=config.data.seq_len
    )
    meter = Meter(num_tokens=tokens_per_step, num_copies=parallel.tp)
    metrics = Metrics(config, enabled=layout.is_main)
    expected = estimate(config, model_config, parallel)
    exports = Exports(config, model_config, asked)
    run = Run(state, checkpointer, metrics, meter, preemption, watchdog, flops, expected, exports)
    check_mesh(layout.mesh)
    check_optimizer(model, optimizer)
    resumed = config.run.resume and _resume(run)
    if config.checkpoint.import_full and not resumed:
        import_full(model, config.checkpoint.import_full, device=device)
    check_same_start(model, data.samples(), layout)
    exports.prepare(model)
    if layout.is_main:
        log.info("%s; %d parameters", layout.describe(), model_config.num_parameters)
        for warning in warnings_of(config, layout, expected, device_bytes=memory_of(device)):
            log.warning("note: %s", warning)
    metrics.write("start", step=state.step, layout=layout.describe())
    return run


def _resume(run: Run) -> bool:
    """Load the newest committed step; whether there is one. Collective."""
    state = run.state
    shared, own = state.templates()
    report = run.checkpointer.load(shared, rank_state=own)
    if report is None:
        return False
    found = not any(key.startswith("rng.") for key in report.missing)
    state.restore(shared, own, found=found)
    run.saved_step = run.committed_step = state.step
    if state.layout.is_main:
        log.info("resumed from step %d of %s", state.step, state.config.run.root)
    return True


def _loop(run: Run) -> tuple[int, str | None]:
    """Train to the last step or until told to stop; the exit code and the reason."""
    state, config = run.state, run.state.config
    pace, first = Pace(state.layout.device), state.step
    run.meter.restart_clock()
    while state.step < config.run.steps:
        if run.preemption.due(state.step):
            return _leave(run)
        run.watchdog.progress(f"in step {state.step + 1}")
        probe = MemoryProbe(state) if state.step == first + 1 else None
        train_step(state, run.meter, probe=probe)
        if probe is not None:
            report_memory(run, probe)
        pace.step()
        last = state.step == config.run.steps
        save_due = _save_due(config, state.step, last=last)
        export_due = run.exports.due(state.step, last=last)
        if save_due or export_due or last or state.step % config.run.log_every == 0:
            flush_losses(run)
        if save_due:
            _save(run)
        if export_due:
            _export(run)
        note_saves(run)
        run.exports.note(state, run.metrics)
    run.watchdog.progress("finishing the last save")
    _finish_saves(run)
    if config.checkpoint.export_full:
        export_full(state.model, config.checkpoint.export_full)
    if run.saved_step == state.step != run.committed_step:
        return FAILED, "the last save failed; the log says why"
    return DONE, None


def _finish_saves(run: Run) -> None:
    """Wait for what is in flight, exports too, and leave the checkpointer; collective."""
    run.checkpointer.wait()
    note_saves(run)
    run.exports.finish(run.state, run.metrics)
    run.checkpointer.close()


def _leave(run: Run) -> tuple[int, str | None]:
    """Save once more, if all ranks are there and it can be done in time."""
    state = run.state
    left_s = run.preemption.agree(state.step)
    if left_s is None:
        return PREEMPTED_UNSAVED, "told to go, and a peer is silent: no save was tried"
    run.exports.break_off()
    flush_losses(run)
    if run.saved_step == state.step:
        _wait_committed(run, timeout_s=left_s)
    else:
        report = run.checkpointer.save(
            state.step, state.capture(), rank_state=state.capture_rank(), deadline_s=left_s
        )
        note_saves(run, report)
    if run.committed_step == state.step:
        run.checkpointer.close()
        return PREEMPTED, "told to go"
    return PREEMPTED_UNSAVED, f"told to go, and the save did not finish in {left_s:.0f} s"


def _wait_committed(run: Run, *, timeout_s: float) -> None:
    """Wait for the save of this step that is in flight; each rank by itself."""
    deadline = time.monotonic() + timeout_s
    while run.committed_step != run.state.step and time.monotonic() < deadline:
        note_saves(run)
        time.sleep(0.05)


def _save(run: Run) -> None:
    """Start to store the state after ``state.step`` steps; collective."""
    state = run.state
    run.watchdog.progress(f"saving step {state.step}")
    report = run.checkpointer.save(state.step, state.capture(), rank_state=state.capture_rank())
    run.saved_step = state.step
    run.metrics.write("stall", step=state.step, seconds=report.blocked_s)
    note_saves(run, report)
    run.meter.restart_clock()


def _export(run: Run) -> None:
    """Export the model as it is after ``state.step`` steps, or start to; collective."""
    run.watchdog.progress(f"exporting step {run.state.step}")
    run.exports.start(run.state, run.metrics)
    run.meter.restart_clock()


def _save_due(config: Config, step: int, *, last: bool) -> bool:
    every = config.checkpoint.every
    return (last and config.checkpoint.final) or (every > 0 and step % every == 0)


def _stopped_before(outcomes: OutcomeWriter) -> bool:
    """Whether this is torchrun's restart of a run that NaN stopped: it would stop there again."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    return outcomes.read().get("exit_code") == NON_FINITE


def _scaler(config: Config) -> LossScaler | None:
    precision = config.precision
    if precision.mode != "fp16":
        return None
    return LossScaler(
        initial_scale=precision.fp16_initial_scale, growth_steps=precision.fp16_growth_steps
    )
