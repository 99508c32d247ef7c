"""One instant of a rank's tensors, copied to memory that its uploader shares.

What only ``optimizer.step()`` changes (parameters, moments) is copied while the next forward
and backward run: on a side stream of the GPU, or by a thread on the CPU. Every optimizer's
next step waits for that copy. All else (buffers, averages, generators' states) is copied
before the call returns, since it changes in forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckptool.errors import StorageError
from ckptool.torch.image import Image
from ckptool.torch.local_state import local_bytes
from ckptool.torch.shared_memory import SharedMemory

__all__ = ["Stager", "Staging"]


@dataclass(frozen=True)
class _Copy:
    """One tensor to copy to ``[start, end)`` of the memory; ``version`` tells in-place edits."""

    key: str
    tensor: torch.Tensor
    start: int
    end: int
    version: int


class Staging:
    """A copy in progress."""

    def __init__(self, lazy: Sequence[_Copy]) -> None:
        self._lazy = lazy
        self._events: list[torch.cuda.Event] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._fenced = False
        self._error: BaseException | None = None
        self._edited: str | None = None

    def start(self, memory: torch.Tensor, eager: Sequence[_Copy]) -> None:
        """Copy ``eager`` as of now, and start the lazy copies."""
        on_gpu = [copy for copy in self._lazy if copy.tensor.is_cuda]
        on_cpu = [copy for copy in self._lazy if not copy.tensor.is_cuda]
        self._copy_on_side_streams(on_gpu, memory)
        for copy in eager:
            _copy(copy, memory)
        for device in {copy.tensor.device for copy in eager if copy.tensor.is_cuda}:
            # later changes come later on this stream: the host need not wait here
            self._record(torch.cuda.current_stream(device))
        if on_cpu:
            self._thread = threading.Thread(
                target=self._copy_on_cpu, args=(on_cpu, memory), name="ckptool-staging", daemon=True
            )
            self._thread.start()

    def fence(self) -> None:
        """Let what comes next on this thread, an optimizer's step, wait for the copy."""
        with self._lock:
            if self._fenced:
                return
            self._note_edits([copy for copy in self._lazy if copy.tensor.is_cuda])
            self._fenced = True
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Block until the memory holds the instant; raises StorageError if it does not."""
        for event in self._events:
            event.synchronize()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if not self._fenced:
                self._note_edits([copy for copy in self._lazy if copy.tensor.is_cuda])
                self._fenced = True
            self._lazy = []
        if self._error is not None:
            raise StorageError(f"staging failed: {self._error}") from self._error
        if self._edited is not None:
            raise StorageError(
                f"{self._edited} was edited in place while it was being staged",
                hint="call checkpointer.wait_staged() before you edit parameters by hand",
            )

    def _copy_on_side_streams(self, copies: Sequence[_Copy], memory: torch.Tensor) -> None:
        for device in {copy.tensor.device for copy in copies}:
            stream = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy in copies:
                    if copy.tensor.device == device:
                        copy.tensor.record_stream(stream)
                        _copy(copy, memory)
            self._record(stream)

    def _record(self, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        self._events.append(event)

    def _copy_on_cpu(self, copies: Sequence[_Copy], memory: torch.Tensor) -> None:
        try:
            for copy in copies:
                _copy(copy, memory)
            self._note_edits(copies)  # before any step that waits for this thread
        except BaseException as error:
            self._error = error

    def _note_edits(self, copies: Sequence[_Copy]) -> None:
        """An in-place edit that did not wait would tear the copy."""
        if self._edited is None:
            self._edited = next((c.key for c in copies if c.tensor._version != c.version), None)


class Stager:
    """Copies into one kept memory; knows every optimizer that has made a step."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._staging: Staging | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def stage(
        self,
        memory: SharedMemory,
        image: Image,
        tensors: Sequence[tuple[str, torch.Tensor]],
        *,
        overlap: bool,
    ) -> Staging:
        """Start to copy ``tensors``, in the order of the image's regions."""
        memory.wait_pinned()
        still = self._still_storages() if overlap else set()
        lazy: list[_Copy] = []
        eager: list[_Copy] = []
        for (key, tensor), region in zip(tensors, image.regions, strict=True):
            if not region.num_bytes:
                continue
            start, end = region.payload_start, region.payload_start + region.num_bytes
            copy = _Copy(key, tensor, start, end, tensor._version)
            (lazy if tensor.untyped_storage().data_ptr() in still else eager).append(copy)
        staging = Staging(lazy)
        staging.start(memory.tensor, eager)
        self._staging = staging
        return staging

    def fence(self) -> None:
        """Let what follows on this thread wait for the copy in progress."""
        if self._staging is not None:
            self._staging.fence()

    def close(self) -> None:
        self._hook.remove()
        self._staging = None

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers.add(optimizer)
        self.fence()

    def _still_storages(self) -> set[int]:
        """Storages that nothing but an optimizer's step changes."""
        still: set[int] = set()
        with torch.no_grad():
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    still.update(_storage(p) for p in group["params"])
                for state in optimizer.state.values():
                    tensors = state.values() if isinstance(state, dict) else ()
                    still.update(_storage(t) for t in tensors if isinstance(t, torch.Tensor))
        still.discard(0)
        return still


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


def _copy(copy: _Copy, memory: torch.Tensor) -> None:
    memory[copy.start : copy.end].copy_(local_bytes(copy.tensor), non_blocking=True)
