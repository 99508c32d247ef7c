"""Turns a configuration into a trained, saved, resumable run. Read it top to bottom.

``train`` prepares one rank, resumes from the newest committed step, and loops: a look at
whether to stop, a step, the losses when they are due, a save when it is due.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ckptool.torch import Checkpointer, SaveReport
from trainer.config import Config
from trainer.data import DataStream, load_corpus
from trainer.flops import flops_per_token, peak_flops
from trainer.layout import Layout, build_mesh, resolve_parallel
from trainer.meter import Meter, NonFiniteError, StepResult
from trainer.metrics import Metrics
from trainer.model import complete_model_config
from trainer.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from trainer.outcome import (
    DONE,
    FAILED,
    NON_FINITE,
    PREEMPTED,
    PREEMPTED_UNSAVED,
    Outcome,
    OutcomeWriter,
)
from trainer.parallel import build_model, gradient_sync, is_sharded
from trainer.precision import autocast, dtypes_of
from trainer.preempt import Preemption, open_job_store
from trainer.process import Pace, process_group
from trainer.scaler import LossScaler
from trainer.state import TrainState
from trainer.watchdog import Watchdog

__all__ = ["train"]

log = logging.getLogger("trainer")


@dataclass
class _Run:
    """What the loop works with."""

    state: TrainState
    checkpointer: Checkpointer
    metrics: Metrics
    meter: Meter
    preemption: Preemption
    watchdog: Watchdog
    flops_per_token: float
    saved_step: int | None = None
    committed_step: int | None = None


def train(config: Config) -> int:
    """Run to ``run.steps`` and return the exit code of this rank."""
    with process_group(config.run) as (device, rank, world_size):
        store = open_job_store(world_size)
        outcomes = OutcomeWriter(config, store, rank=rank)
        slack = 2 if device.type == "cuda" else 1
        preemption = Preemption(store, rank=rank, world_size=world_size, slack_steps=slack)
        run: _Run | None = None

        def report(exit_code: int, reason: str) -> None:
            step, committed = (run.state.step, run.committed_step) if run else (0, None)
            log.error("rank %d: %s", rank, reason)
            outcomes.write(Outcome(exit_code, step, committed, f"rank {rank}: {reason}"))

        watchdog = Watchdog(preemption, step_timeout_s=config.run.step_timeout_s, report=report)
        preemption.install()
        try:
            if _stopped_before(outcomes):
                return NON_FINITE
            run = _prepare(config, device, rank, world_size, preemption, watchdog)
            code, reason = _loop(run)
            outcome = Outcome(code, run.state.step, run.committed_step, reason)
        except NonFiniteError as error:
            assert run is not None
            log.error("stopping: %s; the newest good step is %s", error, run.committed_step)
            outcome = Outcome(NON_FINITE, error.step, run.committed_step, str(error))
        except Exception as error:
            report(FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            preemption.uninstall()
            watchdog.stop()
        if rank == 0:
            outcomes.write(outcome)
        run.metrics.write("end", step=run.state.step, exit_code=outcome.exit_code)
        run.metrics.close()
        return outcome.exit_code


def _prepare(
    config: Config,
    device: torch.device,
    rank: int,
    world_size: int,
    preemption: Preemption,
    watchdog: Watchdog,
) -> _Run:
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
        layout=layout.facts(),
    )
    tokens_per_step = config.data.global_batch * config.data.seq_len
    flops = flops_per_token(
        model_config, num_parameters=model_config.num_parameters, seq_len=config.data.seq_len
    )
    meter = Meter(num_tokens=tokens_per_step, num_copies=parallel.tp)
    metrics = Metrics(config, enabled=layout.is_main)
    run = _Run(state, checkpointer, metrics, meter, preemption, watchdog, flops)
    if config.run.resume:
        _resume(run)
    if layout.is_main:
        log.info("%s; %d parameters", layout.describe(), model_config.num_parameters)
    metrics.write("start", step=state.step, layout=layout.describe())
    return run


def _resume(run: _Run) -> None:
    """Load the newest committed step, if there is one; collective."""
    state = run.state
    shared, own = state.capture(), state.capture_rank()
    if "scaler" in shared:
        own["scaler"] = shared.pop("scaler")  # a run that was not fp16 so far has none
    report = run.checkpointer.load(shared, rank_state=own)
    if report is None:
        return
    found = not any(key.startswith("rng.") for key in report.missing)
    state.restore(shared, own, found=found)
    run.saved_step = run.committed_step = state.step
    if state.layout.is_main:
        log.info("resumed from step %d of %s", state.step, state.config.run.root)


def _loop(run: _Run) -> tuple[int, str | None]:
    """Train to the last step or until told to stop; the exit code and the reason."""
    state, config = run.state, run.state.config
    pace = Pace(state.layout.device)
    run.meter.restart_clock()
    while state.step < config.run.steps:
        if run.preemption.due(state.step):
            return _leave(run)
        run.watchdog.progress(f"in step {state.step + 1}")
        train_step(state, run.meter)
        pace.step()
        last = state.step == config.run.steps
        save_due = _save_due(config, state.step, last=last)
        if save_due or last or state.step % config.run.log_every == 0:
            _flush(run)
        if save_due:
            _save(run)
        _note_saves(run)
    run.watchdog.progress("finishing the last save")
    run.checkpointer.wait()
    _note_saves(run)
    run.checkpointer.close()
    return DONE, None


def train_step(state: TrainState, meter: Meter) -> None:
    """Forward, backward and update over one global batch."""
    config, layout, model = state.config, state.layout, state.model
    rate = learning_rate(state.step, config.optim, num_steps=config.run.steps)
    set_learning_rate(state.optimizer, rate)
    scale = state.scaler.scale if state.scaler else 1.0
    loss_sum = torch.zeros((), dtype=torch.float64, device=layout.device)
    batches = state.data.next_batch()
    tokens_per_rank = sum(targets.numel() for _, targets in batches)
    for index, (tokens_BL, targets_BL) in enumerate(batches):
        with gradient_sync(model, last=index == len(batches) - 1):
            loss = _loss_sum(state, tokens_BL, targets_BL)
            torch.autograd.backward(loss * (scale / tokens_per_rank))
        loss_sum += loss.detach()
    finite = state.scaler is None or state.scaler.unscale(model.parameters(), device=layout.device)
    norm = torch.zeros((), device=layout.device)
    if finite:
        norm = clip_gradients(model, layout, max_norm=config.optim.clip_norm)
        state.optimizer.step()
    if state.scaler is not None:
        state.scaler.update(finite=finite)
    state.optimizer.zero_grad(set_to_none=True)
    meter.add(state.step + 1, loss_sum=loss_sum, grad_norm=norm, lr=rate)
    state.step += 1
    state.tokens += tokens_per_rank * layout.num_data_ranks


def _loss_sum(state: TrainState, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    """The summed cross-entropy of one micro-batch."""
    device, dtypes = state.layout.device, dtypes_of(state.config.precision)
    tokens_BL = tokens_BL.to(device, non_blocking=True)
    targets_BL = targets_BL.to(device, non_blocking=True)
    with autocast(dtypes, device=device, sharded=is_sharded(state.layout)):
        logits_BLV = state.model(tokens_BL)
    logits = logits_BLV.flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BL.flatten(), reduction="sum")


def _leave(run: _Run) -> tuple[int, str | None]:
    """Save once more, if all ranks are there and it can be done in time."""
    state = run.state
    left_s = run.preemption.agree(state.step)
    if left_s is None:
        return PREEMPTED_UNSAVED, "told to go, and a peer is silent: no save was tried"
    _flush(run)
    if run.committed_step == state.step:
        return PREEMPTED, "told to go; this step was saved already"
    report = run.checkpointer.save(
        state.step, state.capture(), rank_state=state.capture_rank(), deadline_s=left_s
    )
    _note_saves(run, report)
    if run.committed_step == state.step:
        return PREEMPTED, "told to go"
    return PREEMPTED_UNSAVED, f"told to go, and the save did not finish in {left_s:.0f} s"


def _save(run: _Run) -> None:
    """Start to store the state after ``state.step`` steps; collective."""
    state = run.state
    run.watchdog.progress(f"saving step {state.step}")
    report = run.checkpointer.save(state.step, state.capture(), rank_state=state.capture_rank())
    run.saved_step = state.step
    run.metrics.write("stall", step=state.step, seconds=report.blocked_s)
    _note_saves(run, report)
    run.meter.restart_clock()


def _note_saves(run: _Run, *reports: SaveReport) -> None:
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


def _save_due(config: Config, step: int, *, last: bool) -> bool:
    every = config.checkpoint.every
    return (last and config.checkpoint.final) or (every > 0 and step % every == 0)


def _flush(run: _Run) -> None:
    """Exchange the losses of the steps since the last time, and look at them; collective."""
    for result in run.meter.flush():
        _report(run, result)


def _report(run: _Run, result: StepResult) -> None:
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
