"""The shares of a rank as flat bytes: of one staged instant, or of the tensors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ckptool.torch.image import Image, Region
from ckptool.torch.local_state import LocalShard, local_bytes
from ckptool.torch.save_run import share_tensor
from ckptool.torch.shared_memory import SharedMemory
from ckptool.torch.shares import Share
from ckptool.torch.staging import Stager, Staging

__all__ = ["FromSnapshot", "FromTensors", "LiveSource", "Snapshots"]

_ALIGNMENT = 64


class LiveSource(Protocol):
    """Where a rank's own bytes come from; ``device`` is where pieces are cast and placed."""

    device: torch.device

    def wait(self) -> None:
        """Return when the bytes are there."""

    def share(self, number: int) -> torch.Tensor:
        """The bytes of a share, flat uint8."""


class FromTensors:
    """Straight from the memory of the tensors, which nothing may change meanwhile.

    Pieces are made on ``device``, wherever the tensors are.
    """

    def __init__(
        self, shards: Sequence[LocalShard], shares: Sequence[Share], *, device: torch.device
    ) -> None:
        self._shards, self._shares = tuple(shards), shares
        self.device = device
        self._kept: tuple[int, torch.Tensor] | None = None

    def wait(self) -> None:
        pass

    def share(self, number: int) -> torch.Tensor:
        if self._kept is None or self._kept[0] != number:
            self._kept = None  # what is not contiguous was copied: one such copy at a time
            tensor = share_tensor(self._shards, self._shares[number])
            self._kept = (number, local_bytes(tensor))
        return self._kept[1]


class FromSnapshot:
    """From staged memory, once the copy in progress has ended."""

    def __init__(self, memory: torch.Tensor, image: Image, staging: Staging) -> None:
        self._memory, self._image, self._staging = memory, image, staging
        self.device = torch.device("cpu")

    def wait(self) -> None:
        self._staging.wait()

    def share(self, number: int) -> torch.Tensor:
        region = self._image.regions[number]
        return self._memory[region.payload_start : region.payload_start + region.num_bytes]


class Snapshots:
    """Staging memory that is kept between exports, and grows when it must."""

    def __init__(self) -> None:
        self._stager = Stager()
        self._memory: SharedMemory | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory that is kept for staging."""
        return 0 if self._memory is None else self._memory.num_bytes

    def prepare(self, shards: Sequence[LocalShard], shares: Sequence[Share]) -> Image:
        """Make memory ready for these shares; pinned, where a tensor is on a GPU."""
        image = _packed(shards, shares)
        if self._memory is None or self._memory.num_bytes < image.num_bytes:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            pin = any(shard.tensor.is_cuda for shard in shards)
            self._memory = SharedMemory(image.num_bytes, pin=pin)
        return image

    def take(
        self, shards: Sequence[LocalShard], shares: Sequence[Share], image: Image
    ) -> FromSnapshot:
        """Start to copy the shares as they are now; the next optimizer's step waits for that."""
        assert self._memory is not None
        tensors = [(shards[s.offer].key, share_tensor(tuple(shards), s)) for s in shares]
        staging = self._stager.stage(self._memory, image, tensors, overlap=True)
        return FromSnapshot(self._memory.tensor, image, staging)

    def fence(self) -> None:
        """Let what follows on this thread wait for the copy in progress."""
        self._stager.fence()

    def close(self) -> None:
        self._stager.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _packed(shards: Sequence[LocalShard], shares: Sequence[Share]) -> Image:
    regions: list[Region] = []
    at = 0
    for share in shares:
        dtype = shards[share.offer].dtype
        num_bytes = share.box.num_elements * dtype.itemsize
        regions.append(Region(dtype, share.box.sizes, at, num_bytes))
        at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return Image(tuple(regions), at)
