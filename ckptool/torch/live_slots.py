"""Memory for a few parts, each written by a thread while the next one is filled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from ckptool.torch.devices import same_device
from ckptool.torch.shared_memory import SharedMemory

__all__ = ["Slots", "SlotsMemory"]

R = TypeVar("R")


class SlotsMemory:
    """Host memory that is kept between exports; pinned where a GPU fills it."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._pinned = False

    def take(self, num_bytes: int, *, pin: bool) -> torch.Tensor:
        """Memory of at least that size, as flat uint8."""
        memory = self._memory
        if memory is None or memory.num_bytes < num_bytes or (pin and not self._pinned):
            self.close()
            self._memory = memory = SharedMemory(num_bytes, pin=pin)
            self._pinned = pin
        memory.wait_pinned()
        return memory.tensor

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class Slots(Generic[R]):
    """``num_slots`` parts in memory at most; used by one thread.

    With ``in_order`` parts are written one after the other as they were submitted.
    """

    def __init__(
        self, memory: torch.Tensor, *, num_slots: int, slot_bytes: int, in_order: bool
    ) -> None:
        self._memory, self._slot_bytes = memory, slot_bytes
        self._free = list(range(num_slots))
        self._pending: dict[Future[R], int] = {}
        self._pool = ThreadPoolExecutor(
            1 if in_order else num_slots, "ckptool-export", initializer=same_device()
        )
        self.results: list[R] = []

    def take(self) -> tuple[int, torch.Tensor]:
        """A free slot's number and memory; raises what the write of another part failed with."""
        while not self._free:
            self._collect()
        slot = self._free.pop()
        return slot, self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def give_back(self, slot: int) -> None:
        """A slot that nothing will be written from."""
        self._free.append(slot)

    def submit(self, slot: int, write: Callable[[], R]) -> None:
        """Write from a slot; it is free again afterwards."""
        self._pending[self._pool.submit(write)] = slot

    def finish(self) -> list[R]:
        """Every result, once all is written."""
        while self._pending:
            self._collect()
        return self.results

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        for future in self._pending:
            future.cancel()
        self._pool.shutdown(wait=True)

    def _collect(self) -> None:
        done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
        for future in done:
            self._free.append(self._pending.pop(future))
        self.results += [future.result() for future in done]
