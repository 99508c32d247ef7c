"""The saver's own ranks: bytes gathered, broadcast and sent over a gloo group of its own.

Never the training's group: a collective of a save must not meet one of a step. Without
torch.distributed there is one rank, and every exchange is with itself. What travels is bytes
(JSON, or raw tensor memory), so nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GatherOptions, ScatterOptions

from ckptool.errors import StorageError
from ckptool.torch.ranks_json import error_from_json, error_to_json

__all__ = ["Group"]

T = TypeVar("T")


class Group:
    """All ranks of the job; making one is collective."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._last: object = None
        self.rank, self.size = 0, 1
        self.timeout_s = timeout_s
        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""
        if self._group is None:
            return [data]
        sizes = self._sizes(len(data))
        mine = self._padded(data, max(sizes))
        rows = [torch.empty_like(mine) for _ in sizes]
        self._run("allgather", rows, mine)
        return [_to_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes on rank 0, None elsewhere."""
        if self._group is None:
            return [data]
        sizes = self._sizes(len(data))
        mine = self._padded(data, max(sizes))
        rows = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else []
        self._run("gather", [rows] if rows else [], [mine], GatherOptions())  # to rank 0
        if self.rank != 0:
            return None
        return [_to_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others pass None."""
        if self._group is None:
            assert data is not None
            return data
        size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device="cpu")
        self._run("broadcast", size, 0)
        row = self._padded(data if self.rank == 0 and data else b"", int(size.item()))
        self._run("broadcast", row, 0)
        return _to_bytes(row[: int(size.item())])

    def scatter(self, rows: list[bytes] | None) -> bytes:
        """This rank's row of what rank 0 passes; the others pass None."""
        if self._group is None:
            assert rows is not None
            return rows[0]
        sizes = json.loads(self.broadcast(json.dumps([len(r) for r in rows or []]).encode()))
        mine = self._padded(b"", max(sizes))
        padded = [[self._padded(row, max(sizes)) for row in rows]] if rows is not None else []
        self._run("scatter", [mine], padded, ScatterOptions())  # from rank 0
        return _to_bytes(mine[: sizes[self.rank]])

    def broadcast_tensor(self, tensor: torch.Tensor, *, source: int) -> None:
        """Fill a contiguous CPU tensor on every rank with that of ``source``."""
        if self._group is not None:
            self._run("broadcast", tensor, source)

    def send(self, tensor: torch.Tensor, *, to: int) -> dist.Work:
        """Start to send a contiguous CPU tensor."""
        with _translated():
            return self._open().send([tensor], to, 0)

    def receive(self, tensor: torch.Tensor, *, source: int) -> None:
        """Fill a contiguous CPU tensor with what ``source`` sends."""
        with _translated():
            self._open().recv([tensor], source, 0).wait()

    def together(self, work: Callable[[], bytes]) -> list[bytes]:
        """Run ``work`` on every rank; its results, or one rank's error on all of them."""
        try:
            mine = b"+" + work()
        except Exception as error:
            mine = b"-" + error_to_json(error).encode()
        rows = self.all_gather(mine)
        for rank, row in enumerate(rows):
            if row[:1] == b"-":
                raise error_from_json(row[1:].decode(), rank=rank if self.size > 1 else None)
        return [row[1:] for row in rows]

    def from_rank_0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 alone; its JSON-able result or its error on every rank."""
        row: bytes | None = None
        if self.rank == 0:
            try:
                row = b"+" + json.dumps(work()).encode()
            except Exception as error:
                row = b"-" + error_to_json(error).encode()
        row = self.broadcast(row)
        if row[:1] == b"-":
            raise error_from_json(row[1:].decode(), rank=None)
        result: T = json.loads(row[1:])
        return result

    def close(self) -> None:
        """Give the group back; call it on every rank, or on none."""
        if self._group is not None and dist.is_initialized():
            try:
                dist.destroy_process_group(self._group)
            except ValueError:
                pass  # it went with a training's groups that were made anew since
        self._group = self._last = None

    def _run(self, collective: str, *arguments: Any) -> None:
        """Run a collective to its end, and keep its work and tensors until the next one.

        gloo's thread lets go of them a moment after it has told us that they are done. Were it
        the last to do so it would need Python's lock, and a thread that asks for that while the
        interpreter ends takes the process with it (SIGABRT, "terminate called without an active
        exception").

        The group itself is asked, not ``torch.distributed``: a save in flight goes on when the
        training calls ``destroy_process_group``.
        """
        with _translated():
            work = getattr(self._open(), collective)(*arguments)
            self._last = work, arguments
            work.wait()

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("their group was closed")
        return self._group

    def _sizes(self, num_bytes: int) -> list[int]:
        mine = torch.tensor([num_bytes], dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._run("allgather", rows, mine)
        return [int(row.item()) for row in rows]

    @staticmethod
    def _padded(data: bytes, num_bytes: int) -> torch.Tensor:
        row = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device="cpu")
        if data:
            row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return row


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StorageError(
            f"the ranks lost each other: {str(error).splitlines()[0]}",
            hint="restart the job; it resumes from the last committed step",
        ) from error


def _to_bytes(row: torch.Tensor) -> bytes:
    return row.numpy().tobytes()
