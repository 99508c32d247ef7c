"""Saves and loads of many ranks, one after another in this process: geometry without processes.

``save_as`` writes a checkpoint as N ranks with dim-0 shards would; ``load_as`` reads one as N
ranks would, and counts the bytes. What only processes can show is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptool.dtypes import dtype_named
from ckptool.layout import shard_file_name
from ckptool.model import Box
from ckptool.planning.boxes import chunk_rows
from ckptool.storage.base import Store
from ckptool.torch.loading import needs_of
from ckptool.torch.opening import open_alone
from ckptool.torch.reading import ReadCount, read_needs
from ckptool.torch.save_commit import CommitOrder, commit_rows
from ckptool.torch.save_index import RankResult
from ckptool.torch.save_run import tensor_payload
from ckptool.torch.shard_file import write_shard_file
from ckptool.torch.shard_items import TensorItem
from ckptool.torch.shares import Offer, assign_shares

__all__ = ["load_as", "save_as"]


def save_as(run: Store, name: str, tensors: Mapping[str, torch.Tensor], *, num_ranks: int) -> None:
    """A committed checkpoint, as ``num_ranks`` ranks write it."""
    offers = [
        [
            Offer(key, _dtype(t), tuple(t.shape), _rows(t, rank, num_ranks))
            for key, t in tensors.items()
        ]
        for rank in range(num_ranks)
    ]
    shares = assign_shares(offers)
    rows: list[dict[str, Any]] = []
    for rank, mine in enumerate(shares):
        items = []
        for share in mine:
            part = _part(tensors[offers[rank][share.offer].key], share.box)
            items.append(TensorItem(_dtype(part), tuple(part.shape), tensor_payload(part)))
        key = shard_file_name(rank, 0, attempt="5117")
        shard = write_shard_file(run.child(name), key, items) if items else None
        rows.append(RankResult(shard, ()).to_json())
    agreed = {
        "offers": [[offer.to_json() for offer in row] for row in offers],
        "shares": [[share.to_json() for share in row] for row in shares],
        "paths": {key: [key] for key in tensors},
    }
    order = CommitOrder(0, name, "5117", {"world_size": num_ranks}, {})
    commit_rows(run, order, agreed, rows, rank=0)


def load_as(
    store: Store, tensors: Mapping[str, torch.Tensor], *, num_ranks: int
) -> tuple[ReadCount, dict[str, torch.Tensor]]:
    """Every rank's rows, read as that rank would; the counts of all, and the whole tensors."""
    opened = open_alone(store)
    count = ReadCount()
    found = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    for rank in range(num_ranks):
        needs = []
        for key, tensor in found.items():
            box = _rows(tensor, rank, num_ranks)
            if box.num_elements:
                needs += needs_of(opened, key, box, _part(tensor, box))
        count += read_needs(store, needs)
    return count, found


def _rows(tensor: torch.Tensor, rank: int, num_ranks: int) -> Box:
    start, end = chunk_rows(tensor.shape[0], num_ranks)[rank]
    rest = tuple(tensor.shape[1:])
    return Box((start, *(0 for _ in rest)), (end - start, *rest))


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[box.offsets[0] : box.ends[0]]


def _dtype(tensor: torch.Tensor) -> Any:
    return dtype_named(str(tensor.dtype).removeprefix("torch."))
