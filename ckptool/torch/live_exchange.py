"""Pieces between ranks: over gloo from host memory, or over NCCL from GPU to GPU.

NCCL only while the training stands still: it is the training's own group.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from ckptool.errors import StorageError
from ckptool.torch.group import Group

__all__ = ["Exchange", "GlooExchange", "NcclExchange", "choose_exchange", "common_device"]


class Exchange(Protocol):
    """Sends to one rank while it receives from another; flat uint8 tensors."""

    def swap(
        self,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        *,
        to: int,
        source: int,
    ) -> None:
        """Return when ``receive`` is filled and ``send`` may be used again."""


class GlooExchange:
    """Over the exporter's own gloo group; bytes on a GPU go through host memory."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def swap(
        self,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        *,
        to: int,
        source: int,
    ) -> None:
        work = None if send is None else self._group.send(send.cpu(), to=to)
        if receive is not None:
            arrived = receive if not receive.is_cuda else torch.empty_like(receive, device="cpu")
            self._group.receive(arrived, source=source)
            if arrived is not receive:
                receive.copy_(arrived)
        if work is not None:
            _wait(work)


class NcclExchange:
    """Over the default group, from the devices; the caller's stream waits, not the host."""

    def __init__(self, device: torch.device) -> None:
        # the first use of a communicator is one that all ranks make
        dist.all_reduce(torch.zeros(1, device=device))

    def swap(
        self,
        send: torch.Tensor | None,
        receive: torch.Tensor | None,
        *,
        to: int,
        source: int,
    ) -> None:
        ops = [] if send is None else [dist.P2POp(dist.isend, send, to)]
        if receive is not None:
            ops.append(dist.P2POp(dist.irecv, receive, source))
        if not ops:
            return
        for work in dist.batch_isend_irecv(ops):
            _wait(work)


def choose_exchange(group: Group, device: torch.device) -> Exchange:
    """What suits bytes on ``device``, of one type on all ranks; collective."""
    if group.size == 1 or device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config():
        return GlooExchange(group)
    return NcclExchange(device)


def common_device(group: Group, *, on_gpu: bool) -> torch.device:
    """Where all ranks make pieces: on their GPUs, if any rank's bytes are on one; collective."""
    if b"gpu" in group.all_gather(b"gpu" if on_gpu else b"cpu"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise StorageError(
            f"the ranks lost each other: {str(error).splitlines()[0]}",
            hint="restart the job; nothing was exported",
        ) from error
