"""Saves through the uploader beside this rank: staged in shared memory, never in the way.

The staging memory and the uploader are kept between saves; a new layout gets new memory, and an
uploader that died gets a successor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ckptool.layout import shard_file_name, step_name
from ckptool.storage.base import Store
from ckptool.torch.image import Image, plan_image
from ckptool.torch.save_commit import CommitOrder
from ckptool.torch.save_plan import Layout, RankSave
from ckptool.torch.save_run import SaveContext, share_tensor
from ckptool.torch.shard_items import ShardResult
from ckptool.torch.shared_memory import SharedMemory
from ckptool.torch.staging import Stager, Staging
from ckptool.torch.uploader_client import UploaderClient

__all__ = ["Beside"]

_COMMIT_PATIENCE = 4


class Beside:
    """This rank's staging memory and uploader; a Worker for ``run_save``."""

    def __init__(self, run: Store, stager: Stager, *, rank: int, num_threads: int) -> None:
        self._run, self._rank, self._num_threads = run, rank, num_threads
        self._uploader: UploaderClient | None = None
        self._memory: SharedMemory | None = None
        self._image = Image((), 0)
        self._known: tuple[UploaderClient, Layout] | None = None
        self._stager = stager

    def staged_bytes(self, save: RankSave) -> int:
        """Host memory that staging this save takes."""
        return plan_image(_tensors(save)).num_bytes

    def prepare(self, save: RankSave) -> None:
        """Make memory and uploader ready for the layout of ``save``; nothing if they are."""
        if self._uploader is None or not self._uploader.is_alive:
            if self._uploader is not None:
                self._uploader.close()
            self._uploader = UploaderClient(
                self._run.recipe(), rank=self._rank, num_threads=self._num_threads
            )
        uploader = self._uploader
        if self._known is not None and self._known[0] is uploader and self._known[1] is save.layout:
            return
        image = plan_image(_tensors(save))
        if self._memory is None or self._memory.num_bytes < image.num_bytes:
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            pin = any(shard.tensor.is_cuda for shard in save.shards)
            self._memory = SharedMemory(image.num_bytes, pin=pin)
        self._image = image
        uploader.share(self._memory.fd, self._memory.num_bytes)
        uploader.set_image(image)
        if save.layout.offers:
            uploader.order("layout", blob=json.dumps(save.layout.agreed()).encode())
        self._known = (uploader, save.layout)

    def stage(self, save: RankSave, *, overlap: bool) -> Staging:
        """Start to copy this instant; after ``prepare``."""
        assert self._memory is not None
        tensors = [
            (save.shards[share.offer].key, share_tensor(save.shards, share))
            for share in save.layout.shares
        ]
        return self._stager.stage(self._memory, self._image, tensors, overlap=overlap)

    def upload(self, context: SaveContext, save: RankSave) -> ShardResult | None:
        if not self._image.regions and not save.values:
            return None
        assert self._uploader is not None
        row = self._uploader.order(
            "upload",
            blob=b"".join(value.data for value in save.values),
            values=[len(value.data) for value in save.values],
            attempt=save.attempt,
            name=step_name(save.step),
            key=shard_file_name(self._rank, 0, attempt=save.attempt),
            compress=context.compress,
            verify_after_write=context.verify_after_write,
            on_alive=context.news.progress,
            why_stop=lambda: context.news.failure(save.attempt),
            quiet_s=context.timeout_s,
        )
        return ShardResult.from_json(row)

    def commit(
        self, context: SaveContext, save: RankSave, order: CommitOrder, rows: list[bytes]
    ) -> dict[str, Any]:
        assert self._uploader is not None

        def working() -> None:
            context.news.progress()  # the other ranks wait for this commit

        answer: dict[str, Any] = self._uploader.order(
            "commit",
            blob=b"[" + b",".join(rows) + b"]",
            order=order.to_json(),
            attempt=save.attempt,
            why_stop=working,
            quiet_s=_COMMIT_PATIENCE * context.timeout_s,
        )
        return answer

    def close(self) -> None:
        """End the uploader and give the memory back."""
        if self._uploader is not None:
            self._uploader.close()
            self._uploader = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _tensors(save: RankSave) -> Sequence[tuple[Any, tuple[int, ...]]]:
    return [(save.shards[share.offer].dtype, share.box.sizes) for share in save.layout.shares]
