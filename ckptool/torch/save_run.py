"""One attempt to save, from a plan to a commit, on all ranks together.

The phases, at each of which every rank knows whether all of them can go on: the step is free;
every shard file is stored; rank 0 has committed. A failure anywhere is told to all at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ckptool.layout import shard_file_name, step_name
from ckptool.storage.base import Store
from ckptool.torch.commit import refuse_if_committed
from ckptool.torch.faults import part_fault
from ckptool.torch.group import Group
from ckptool.torch.local_state import LocalShard, local_bytes, memory_of
from ckptool.torch.news import News
from ckptool.torch.retention import Retention
from ckptool.torch.save_commit import CommitOrder, commit_rows
from ckptool.torch.save_index import RankResult
from ckptool.torch.save_plan import RankSave
from ckptool.torch.shard_file import threads_within, write_shard_file
from ckptool.torch.shard_items import Payload, ShardResult, TensorItem, ValueItem
from ckptool.torch.shares import Share

__all__ = ["InProcess", "SaveContext", "Worker", "run_save", "share_tensor", "tensor_payload"]


@dataclass(frozen=True)
class SaveContext:
    """What all saves of a checkpointer share; ``group`` is for saves in flight alone."""

    run: Store
    group: Group
    news: News
    timeout_s: float
    layout: Mapping[str, Any]
    retention: Retention
    num_threads: int = 8
    verify_after_write: bool = False
    compress: str | None = None
    max_staging_bytes: int | None = None


class Worker(Protocol):
    """Who does the work of one rank: this process, or the uploader beside it."""

    def upload(self, context: SaveContext, save: RankSave) -> ShardResult | None:
        """Store this rank's shard file; None where it has nothing to store."""

    def commit(
        self, context: SaveContext, save: RankSave, order: CommitOrder, rows: list[bytes]
    ) -> dict[str, Any]:
        """On rank 0: commit what the ranks stored."""


def run_save(context: SaveContext, save: RankSave, worker: Worker) -> dict[str, Any]:
    """Upload and commit; ``num_bytes`` and ``deleted``, or the same error, on every rank."""
    news, group, attempt = context.news, context.group, save.attempt
    rows: list[bytes] | None = None
    answer: dict[str, Any] = {}

    def meet(point: str) -> None:
        news.meet(attempt, point, timeout_s=context.timeout_s)

    try:
        if group.rank == 0:
            refuse_if_committed(context.run.child(step_name(save.step)))
        meet("free")
        shard = worker.upload(context, save)
        meet("stored")
        result = RankResult(shard, tuple((v.key, v.path) for v in save.values))
        rows = group.gather(json.dumps(result.to_json()).encode())
        if rows is not None:
            answer = worker.commit(context, save, _order(context, save), rows)
        meet("committed")
    except BaseException as error:
        news.fail(attempt, error)
        raise
    return group.from_rank_0(lambda: answer)


class InProcess:
    """Works in this process, straight from the tensors' memory, a few parts at a time."""

    def upload(self, context: SaveContext, save: RankSave) -> ShardResult | None:
        items = [_tensor_item(save.shards, share) for share in save.layout.shares]
        values = [ValueItem(value.data) for value in save.values]
        if not items and not values:
            return None
        rank, folder = context.group.rank, step_name(save.step)
        name = shard_file_name(rank, 0, attempt=save.attempt)

        def on_part(number: int, is_last: bool) -> None:
            part_fault(number, is_last, rank=rank)
            context.news.progress()

        store = context.run.child(folder)
        num_threads = threads_within(
            context.max_staging_bytes,
            num_threads=context.num_threads,
            part_bytes=store.part_limits.preferred_bytes,
        )
        return write_shard_file(
            store,
            name,
            [*items, *values],
            compress=context.compress is not None,
            num_threads=num_threads,
            verify_after_write=context.verify_after_write,
            on_part=on_part,
            should_stop=lambda: context.news.failure(save.attempt),
        )

    def commit(
        self, context: SaveContext, save: RankSave, order: CommitOrder, rows: list[bytes]
    ) -> dict[str, Any]:
        agreed = save.layout.agreed()
        return commit_rows(context.run, order, agreed, [json.loads(row) for row in rows], rank=0)


def share_tensor(shards: tuple[LocalShard, ...], share: Share) -> torch.Tensor:
    """The local memory of a share."""
    shard = shards[share.offer]
    tensor = shard.tensor.detach()
    for dim, size in enumerate(share.box.sizes):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, share.box.offsets[dim] - shard.box.offsets[dim], size)
    return tensor


def tensor_payload(tensor: torch.Tensor) -> Payload:
    """A tensor's row-major bytes by range; made contiguous only when first asked for."""
    flat: torch.Tensor | None = None

    def payload(start: int, end: int) -> memoryview:
        nonlocal flat
        if flat is None:
            flat = local_bytes(tensor)
        part = memory_of(flat[start:end].cpu())
        if end == flat.numel():
            flat = None
        return part

    return payload


def _tensor_item(shards: tuple[LocalShard, ...], share: Share) -> TensorItem:
    tensor = share_tensor(shards, share)
    return TensorItem(shards[share.offer].dtype, share.box.sizes, tensor_payload(tensor))


def _order(context: SaveContext, save: RankSave) -> CommitOrder:
    return CommitOrder(
        step=save.step,
        name=step_name(save.step),
        attempt=save.attempt,
        layout={"world_size": context.group.size, **context.layout},
        versions={"torch": torch.__version__},
        retention=context.retention,
    )
