"""Memory that a rank and its uploader share: a memfd, mapped in both, pinned for the GPU.

No /dev/shm limit bounds a memfd, but the cgroup's memory does: it is looked at first.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import torch

from ckptool.errors import OverBudgetError

__all__ = ["SharedMemory", "available_bytes"]

log = logging.getLogger("ckptool")
_SPARE_BYTES = 512 << 20


class SharedMemory:
    """``num_bytes`` of shared memory, as flat uint8 ``tensor``; kept until closed.

    With ``pin`` it is registered with CUDA by a background thread; ``wait_pinned`` waits for
    that. Raises OverBudgetError where the memory is not there.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        free = available_bytes()
        if free is not None and num_bytes + _SPARE_BYTES > free:
            raise OverBudgetError(
                f"staging a save needs {num_bytes} bytes of host memory, {free} are free",
                hint='save with mode="sync", which needs a few MiB, or give the job more memory',
            )
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("ckptool-staging")
        os.ftruncate(self.fd, max(num_bytes, 1))
        self._map = mmap.mmap(self.fd, max(num_bytes, 1))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        self._registered = False
        self._thread: threading.Thread | None = None
        if pin and num_bytes:
            device = torch.cuda.current_device()
            self._thread = threading.Thread(target=self._register, args=(device,), daemon=True)
            self._thread.start()

    def wait_pinned(self) -> None:
        """Return once the memory is registered, or cannot be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Unregister and unmap; what was staged is lost."""
        self.wait_pinned()
        if self._registered:
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._registered = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _register(self, device: int) -> None:
        torch.cuda.set_device(device)
        # one call: a copy may not span two registrations
        status = int(_cudart().cudaHostRegister(self.tensor.data_ptr(), self.num_bytes, 0))
        if status != 0:
            log.warning("staging memory stays pageable: cudaHostRegister gave %d", status)
        else:
            self._registered = True


def available_bytes() -> int | None:
    """Memory that this process may still take: of the host and of its cgroup; None if unknown."""
    found = [row for row in (_host_bytes(), _cgroup_bytes()) if row is not None]
    return min(found, default=None)


def _host_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_bytes() -> int | None:
    """What is left below the tightest limit on the way to the root (cgroup v2)."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    name = next((line[3:] for line in own if line.startswith("0::")), None)
    if name is None:
        return None
    folder, left = Path("/sys/fs/cgroup", name.lstrip("/")), []
    while True:
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                left.append(int(limit) - _in_use(folder))
        except (OSError, ValueError):
            pass
        if folder == Path("/sys/fs/cgroup") or folder == folder.parent:
            return min(left, default=None)
        folder = folder.parent


def _in_use(folder: Path) -> int:
    """Bytes in use that cannot be dropped: without the file cache."""
    used = int((folder / "memory.current").read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            used -= int(line.split()[1])
    return used


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
