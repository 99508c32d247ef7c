"""One attempt to save, from a plan to a commit, on all ranks together.

The phases, at each of which every rank knows whether all of them can go on: the step is free;
every shard file is stored; rank 0 has committed. A failure anywhere is told to all at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptool.errors import CkptoolError
from ckptool.layout import shard_file_name
from ckptool.storage.base import Store
from ckptool.torch.commit import Commit, commit_checkpoint, refuse_if_committed
from ckptool.torch.faults import fault_point
from ckptool.torch.group import Group
from ckptool.torch.local_state import LocalShard, local_bytes, memory_of
from ckptool.torch.news import News
from ckptool.torch.save_index import RankResult, build_index, stored_objects
from ckptool.torch.save_plan import RankSave
from ckptool.torch.shard_file import Payload, ShardResult, TensorItem, ValueItem, write_shard_file
from ckptool.torch.shares import Share

__all__ = ["SaveContext", "run_save", "share_tensor", "tensor_payload", "upload_in_process"]


@dataclass(frozen=True)
class SaveContext:
    """What all saves of a checkpointer share."""

    group: Group
    news: News
    timeout_s: float
    layout: Mapping[str, Any]
    num_threads: int = 8


Upload = Callable[[Store, RankSave], "ShardResult | None"]


def run_save(context: SaveContext, store: Store, save: RankSave, upload: Upload) -> int:
    """Upload, commit, and return the bytes of all shard files; the same error on every rank."""
    news, attempt = context.news, save.attempt

    def meet(point: str) -> None:
        news.meet(attempt, point, timeout_s=context.timeout_s)

    try:
        if context.group.rank == 0:
            refuse_if_committed(store)
        meet("free")
        shard = upload(store, save)
        meet("stored")
    except BaseException as error:
        news.fail(attempt, error)
        raise
    result = RankResult(shard, tuple((v.key, v.path) for v in save.values))
    rows = context.group.gather(json.dumps(result.to_json()).encode())

    def commit() -> int:
        results = [RankResult.from_json(json.loads(row)) for row in rows or []]
        return _commit(context, store, save, results)

    return context.group.from_rank_0(commit)


def upload_in_process(context: SaveContext, store: Store, save: RankSave) -> ShardResult | None:
    """Write this rank's shard file straight from the tensors' memory."""
    items = [_tensor_item(save.shards, share) for share in save.layout.shares]
    values = [ValueItem(value.data) for value in save.values]
    if not items and not values:
        return None
    rank = context.group.rank
    parts = 0

    def on_part() -> None:
        nonlocal parts
        fault_point("in-part" if parts else "before-first-part", rank=rank)
        parts += 1
        context.news.progress()

    def should_stop() -> CkptoolError | None:
        return context.news.failure(save.attempt)

    return write_shard_file(
        store,
        shard_file_name(rank, 0, attempt=save.attempt),
        [*items, *values],
        num_threads=context.num_threads,
        on_part=on_part,
        should_stop=should_stop,
    )


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
    dtype = shards[share.offer].dtype
    return TensorItem(dtype, share.box.sizes, tensor_payload(tensor))


def _commit(context: SaveContext, store: Store, save: RankSave, results: list[RankResult]) -> int:
    layout = save.layout
    index = build_index(layout.offers, layout.all_shares, layout.paths or {}, results)
    objects = stored_objects(results)
    facts = Commit(
        step=save.step,
        attempt=save.attempt,
        layout={"world_size": context.group.size, **context.layout},
        versions={"torch": torch.__version__},
    )
    commit_checkpoint(store, index, objects, facts, rank=context.group.rank)
    return sum(row.num_bytes for row in objects)
