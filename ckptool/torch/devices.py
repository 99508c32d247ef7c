"""Threads of ours work on the GPU of the thread that started them, and touch no other."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["same_device", "settle"]


def same_device() -> Callable[[], None]:
    """What a new thread calls first, to have this thread's GPU as its own."""
    if not _in_use():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def settle() -> None:
    """Return when the GPU has done all that this process asked for so far."""
    if _in_use():
        torch.cuda.synchronize()


def _in_use() -> bool:
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_available()
