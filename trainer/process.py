"""Turns the environment that torchrun left into a process that is ready for collectives."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ckptool.errors import UsageError
from trainer.config import RunConfig
from trainer.rng import derive_rng

__all__ = ["Pace", "leave_at_once", "pick_device", "process_group"]


@contextmanager
def process_group(config: RunConfig) -> Iterator[tuple[torch.device, int, int]]:
    """Device, rank and world size; the training's process group is there meanwhile.

    One that the caller made already is used, and left.
    """
    if config.deterministic:
        _make_deterministic()
    device = pick_device(config.device)
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mine = world_size > 1 and not dist.is_initialized()
    if mine:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=config.process_timeout_s)
        store = _restart_store(timeout)
        place: dict[str, Any] = {}
        if store is not None:
            place = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timeout, **place)
    derive_rng(seed=config.seed, rank=rank, step=0)
    yield device, rank, world_size
    # After an exception the peers may be stuck in a collective, and this would wait for them.
    if mine:
        dist.destroy_process_group()


def _restart_store(timeout: timedelta) -> Store | None:
    """Where a restart's ranks meet: torchrun's store, under a prefix of this restart.

    torchrun keeps one store over its restarts, and ranks that find the addresses of the start
    before in it try to reach the dead. None where no torchrun keeps a store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    return PrefixStore(f"training/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def _make_deterministic() -> None:
    """Equal inputs, equal bits on one kind of GPU; of the attention kernels, flash's and the
    plain one can."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def leave_at_once(code: int) -> None:
    """End a rank that has peers here and now; else do nothing.

    After an error an orderly end would wait for the peers' collectives. After success it is a
    risk: a gloo thread that frees the last collective while the interpreter ends aborts the
    process, and the job has failed in its last millisecond.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Pace:
    """Keeps the host at most one step ahead of its device, which a stop together relies on."""

    def __init__(self, device: torch.device) -> None:
        self._enabled = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def step(self) -> None:
        """Call it after each step: waits until the device has done the step before."""
        if not self._enabled:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = event


def pick_device(name: str) -> torch.device:
    """``auto`` is this rank's GPU where there is one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("run.device is cuda, and torch sees no GPU", hint="set run.device to cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}",
            hint="start torchrun with --nproc-per-node of at most that",
        )
    return torch.device("cuda", local_rank)
