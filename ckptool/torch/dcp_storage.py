"""A storage writer and a storage reader for torch's own ``dcp.save``, ``dcp.load``, ``async_save``.

    dcp.save(state, storage_writer=CkptoolWriter("s3://bucket/run/step-10"))
    dcp.load(state, storage_reader=CkptoolReader("s3://bucket/run/step-10"))

They bring our commit rule, checksums and ranged reads to loops that keep torch's functions; on
local paths and on any fsspec URL.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptool.dtypes import dtype_named
from ckptool.errors import DamagedError, UnsupportedError
from ckptool.layout import shard_file_name
from ckptool.model import Box, Item, TensorEntry, ValueEntry
from ckptool.storage import open_recipe, open_store
from ckptool.storage.base import Store
from ckptool.torch.commit import (
    Commit,
    StoredObject,
    commit_checkpoint,
    refuse_if_committed,
    remove_orphans,
)
from ckptool.torch.compressed import decompress_value
from ckptool.torch.dcp_views import chunk_numbers, index_of, metadata_of
from ckptool.torch.opening import Opened, open_alone
from ckptool.torch.pieces import Need
from ckptool.torch.reading import ReadCount, read_needs
from ckptool.torch.save_run import tensor_payload
from ckptool.torch.shard_file import write_shard_file
from ckptool.torch.shard_items import ItemResult, TensorItem, ValueItem

__all__ = ["CkptoolReader", "CkptoolWriter"]


class _Place:
    """The URL of one checkpoint; pickles without its open connections."""

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> None:
        self._store: Store | None = open_store(url, options=options)
        self._recipe = self._store.recipe()

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = open_recipe(self._recipe)
        return self._store

    def moved(self, url: str | os.PathLike[str]) -> _Place:
        return _Place(url, self._recipe.options)

    def __getstate__(self) -> dict[str, Any]:
        return {"_store": None, "_recipe": self._recipe}


class CkptoolWriter(StorageWriter):
    """Writes one checkpoint: one shard file a rank, in parts, committed last.

    ``url`` is the checkpoint's own folder. Refuses to write over a committed one.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        num_threads: int = 8,
    ) -> None:
        super().__init__()
        self._place = _Place(url, storage_options)
        self._num_threads = num_threads
        self._save_id = secrets.token_hex(4)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._place = self._place.moved(checkpoint_id)
        self._save_id = secrets.token_hex(4)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise UnsupportedError(
                "use_collectives=False leaves no .metadata that speaks for all ranks",
                hint="leave use_collectives at its default",
            )
        if is_coordinator:
            refuse_if_committed(self._place.store)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [shard_file_name(rank, 0, attempt=self._save_id) for rank in range(len(plans))]
        return [replace(p, storage_data=name) for p, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        items = [_encode(item, planner) for item in plan.items]
        shard = write_shard_file(
            self._place.store, plan.storage_data, items, num_threads=self._num_threads
        )
        facts = (shard.num_bytes, shard.crc32, shard.verified)
        done.set_result(
            [
                WriteResult(item.index, row.length, (shard.key, row.to_json(), *facts))
                for item, row in zip(plan.items, shard.items, strict=True)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        items: dict[MetadataIndex, tuple[Item, ItemResult]] = {}
        objects: dict[str, StoredObject] = {}
        for result in chain.from_iterable(results):
            key, row, num_bytes, crc, verified = result.storage_data
            item = ItemResult.from_json(row)
            items[result.index] = (item.stored_in(key), item)
            objects[key] = StoredObject(key, num_bytes, crc, verified)
        index, payloads = index_of(metadata, items)
        facts = Commit(
            step=None,
            attempt=self._save_id,
            layout={"world_size": len(results)},
            versions={"torch": torch.__version__},
            payloads=payloads,
        )
        commit_checkpoint(self._place.store, index, list(objects.values()), facts)
        remove_orphans(self._place.store, set(objects))

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._place.store.url, save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


class CkptoolReader(StorageReader):
    """Reads one checkpoint, of ours or of stock torch: just the ranges that are needed, checked.

    ``count`` says afterwards what this rank needed, fetched and could not verify.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        num_threads: int = 8,
    ) -> None:
        super().__init__()
        self._place = _Place(url, storage_options)
        self._num_threads = num_threads
        self._opened: Opened | None = None
        self.count = ReadCount()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._place = self._place.moved(checkpoint_id)
        self._opened = None
        self.count = ReadCount()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return metadata_of(self._open().index, checkpoint_id=self._place.store.url)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        opened, store = self._open(), self._place.store
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        rows = {
            key: chunk_numbers(opened.index, key) for key in {t.storage_index.fqn for t in tensors}
        }
        targets = [planner.resolve_tensor(item) for item in tensors]
        needs = []
        for item, target in zip(tensors, targets, strict=True):
            key = item.storage_index.fqn
            entry = opened.index.entries[key]
            assert isinstance(entry, TensorEntry)
            assert item.storage_index.offset is not None
            row = rows[key][tuple(item.storage_index.offset)]
            chunk = entry.chunks[row]
            if chunk.item is None:
                raise DamagedError(f"{key}: chunk {chunk.box} is listed but not stored", entry=key)
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            sizes, place = chunk.box.sizes, opened.place(key, row)
            needs.append(Need(key, entry.dtype, chunk.item, sizes, box, target.detach(), place))
        self.count += read_needs(store, needs, num_threads=self._num_threads)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def _open(self) -> Opened:
        if self._opened is None:
            self._opened = open_alone(self._place.store)
        return self._opened

    def _value(self, key: str) -> io.BytesIO:
        entry = self._open().index.entries[key]
        item = entry.item if isinstance(entry, ValueEntry) else None
        if item is None:
            raise DamagedError(f"{key} is listed as a value but not stored as one", entry=key)
        data = self._place.store.read(item.file, start=item.offset, end=item.end)
        self.count += ReadCount(item.length, item.length, item.length)
        return io.BytesIO(decompress_value(key, item, data))


def _encode(item: WriteItem, planner: SavePlanner) -> TensorItem | ValueItem:
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return ValueItem(data.getvalue())
    assert isinstance(data, torch.Tensor)
    if data.layout != torch.strided or data.is_quantized:
        raise UnsupportedError(f"{item.index.fqn}: only dense tensors are saved")
    dtype = dtype_named(str(data.dtype).removeprefix("torch."))
    return TensorItem(dtype, tuple(data.shape), tensor_payload(data))
