"""Turns a configuration into a trained, saved, resumable run. Read it top to bottom.

``train`` prepares one rank, resumes from the newest committed step, and loops: a step, the
losses when they are due, a save when it is due.
"""

from __future__ import annotations

import logging
from contextlib import closing

import torch
import torch.nn.functional as F

from ckptool.torch import Checkpointer
from trainer.config import Config
from trainer.data import DataStream, load_corpus
from trainer.layout import Layout, build_mesh, resolve_parallel
from trainer.meter import Meter, StepResult
from trainer.metrics import Metrics
from trainer.model import complete_model_config
from trainer.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from trainer.parallel import build_model, gradient_sync, is_sharded
from trainer.precision import autocast, dtypes_of
from trainer.process import process_group
from trainer.scaler import LossScaler
from trainer.state import TrainState

__all__ = ["train"]

log = logging.getLogger("trainer")


def train(config: Config) -> int:
    """Run to ``run.steps`` and return the exit code of this rank."""
    with process_group(config.run) as (device, rank, world_size):
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
        )
        with closing(checkpointer), closing(Metrics(config, enabled=layout.is_main)) as metrics:
            if config.run.resume:
                resume(state, checkpointer)
            return _loop(state, checkpointer, metrics)


def resume(state: TrainState, checkpointer: Checkpointer) -> None:
    """Load the newest committed step, if there is one; collective."""
    shared, own = state.capture(), state.capture_rank()
    if "scaler" in shared:
        own["scaler"] = shared.pop("scaler")  # a run that was not fp16 so far has none
    report = checkpointer.load(shared, rank_state=own)
    if report is None:
        return
    shared["scaler"] = own.get("scaler")
    found = not any(key.startswith("rng.") for key in report.missing)
    state.restore(shared, own, found=found)
    if state.layout.is_main:
        log.info("resumed from step %d of %s", state.step, state.config.run.root)


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
    meter.add(state.step, loss_sum=loss_sum, grad_norm=norm, lr=rate)
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


def _loop(state: TrainState, checkpointer: Checkpointer, metrics: Metrics) -> int:
    config, data = state.config, state.config.data
    meter = Meter(num_tokens=data.global_batch * data.seq_len, num_copies=state.layout.parallel.tp)
    while state.step < config.run.steps:
        train_step(state, meter)
        last = state.step == config.run.steps
        save_due = _save_due(config, state.step, last=last)
        if save_due or last or state.step % config.run.log_every == 0:
            for result in meter.flush():
                _report(result, state, metrics)
        if save_due:
            save(state, checkpointer, metrics)
            meter.restart_clock()
    checkpointer.wait()
    return 0


def save(state: TrainState, checkpointer: Checkpointer, metrics: Metrics) -> None:
    """Store the state after ``state.step`` steps; collective."""
    report = checkpointer.save(state.step, state.capture(), rank_state=state.capture_rank())
    metrics.write(
        "save",
        step=state.step,
        num_bytes=report.num_bytes,
        stall_s=report.blocked_s,
        seconds=report.seconds,
    )
    if state.layout.is_main:
        log.info("saved step %d in %.2f s", state.step, report.seconds)


def _save_due(config: Config, step: int, *, last: bool) -> bool:
    every = config.checkpoint.every
    return (last and config.checkpoint.final) or (every > 0 and step % every == 0)


def _report(result: StepResult, state: TrainState, metrics: Metrics) -> None:
    num_tokens = state.config.data.global_batch * state.config.data.seq_len
    rate = num_tokens / result.seconds
    metrics.write(
        "step",
        step=result.step + 1,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens_per_s=rate,
    )
    if state.layout.is_main:
        log.info(
            "step %d  loss %.4f  norm %.3f  lr %.2e  %.0f tokens/s",
            result.step + 1,
            result.loss,
            result.grad_norm,
            result.lr,
            rate,
        )


def _scaler(config: Config) -> LossScaler | None:
    precision = config.precision
    if precision.mode != "fp16":
        return None
    return LossScaler(
        initial_scale=precision.fp16_initial_scale, growth_steps=precision.fp16_growth_steps
    )
