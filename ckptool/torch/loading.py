"""A committed checkpoint -> the tensors and values of a state dict, on all ranks together."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckptool.errors import DamagedError, UsageError
from ckptool.model import Box, Chunks, Extent, TensorEntry, ValueEntry
from ckptool.planning.boxes import intersect
from ckptool.planning.reads import coalesce
from ckptool.storage.base import Store
from ckptool.torch import values
from ckptool.torch.compressed import decompress_value
from ckptool.torch.group import Group
from ckptool.torch.load_plan import LoadPlan, Transfer, plan_load
from ckptool.torch.local_state import LocalShard, LocalState, local_bytes
from ckptool.torch.opening import Opened
from ckptool.torch.pieces import Need
from ckptool.torch.reading import ReadCount, read_needs
from ckptool.torch.shares import Offer

__all__ = ["Wanted", "choose_entries", "load_entries", "needs_of"]

_BOUNCE_BYTES = 32 << 20


@dataclass(frozen=True)
class Wanted:
    """What one rank asks of a checkpoint, and what the checkpoint does not have."""

    shards: tuple[LocalShard, ...]
    values: tuple[tuple[LocalState, str], ...]
    missing: tuple[str, ...]


def choose_entries(
    opened: Opened, shared: LocalState, own: LocalState, *, strict: bool, allow_cast: bool
) -> Wanted:
    """Match a state with an index.

    Raises UsageError for a key of ``shared`` that is not there (where ``strict``), for another
    shape or kind, and for another dtype unless ``allow_cast``.
    """
    shards: list[LocalShard] = []
    found: list[tuple[LocalState, str]] = []
    missing: list[str] = []
    absent: list[str] = []
    for state in (shared, own):
        lost = absent if state is shared and strict else missing
        for shard in state.shards:
            entry = opened.index.entries.get(shard.key)
            if entry is None:
                lost.append(shard.key)
            else:
                _check_match(shard, entry, allow_cast=allow_cast)
                shards.append(shard)
        for key in state.values:
            entry = opened.index.entries.get(key)
            if entry is None:
                lost.append(key)
            elif isinstance(entry, TensorEntry):
                raise UsageError(
                    f"{key} is a tensor in the checkpoint and a value in this program",
                    hint="give a tensor of its shape to load into",
                    entry=key,
                )
            else:
                found.append((state, key))
    if absent:
        more = f" and {len(set(absent)) - 3} more" if len(set(absent)) > 3 else ""
        names = ", ".join(list(dict.fromkeys(absent))[:3])
        raise UsageError(
            f"the checkpoint has no {names}{more}",
            hint=f"ckptool inspect {opened.url} lists what it has; strict=False loads the rest",
        )
    return Wanted(tuple(shards), tuple(found), tuple(dict.fromkeys(missing)))


def load_entries(store: Store, opened: Opened, group: Group, wanted: Wanted) -> ReadCount:
    """Fill tensors and values; collective. Returns the bytes of all ranks together."""
    filled = [shard for shard in wanted.shards if shard.box.num_elements]
    offers = [Offer(s.key, opened.dtype(s.key), s.shape, s.box) for s in filled]
    plan = plan_load(group, offers)
    count = ReadCount()

    def read() -> bytes:
        needs: list[Need] = []
        for share in plan.shares:
            shard = filled[share.offer]
            needs += needs_of(opened, shard.key, share.box, _part(shard, share.box))
        done = read_needs(store, needs)
        return json.dumps([done.needed, done.fetched, done.unverified]).encode()

    for row in group.together(read):
        count += ReadCount(*json.loads(row))
    _pass_on(group, plan, filled)
    return count + _load_values(store, opened, group, wanted)


def needs_of(opened: Opened, key: str, box: Box, target: torch.Tensor) -> list[Need]:
    """The stored chunks that cover ``box`` of a tensor, and where in ``target`` each goes."""
    entry = opened.index.entries[key]
    assert isinstance(entry, TensorEntry)
    needs: list[Need] = []
    num_found = 0
    for row in _overlapping(entry.chunks, box):
        chunk = entry.chunks[row]
        common = intersect(chunk.box, box)
        if common is None or chunk.item is None:
            continue
        num_found += common.num_elements
        inside = _relative(common, chunk.box)
        part = _narrow(target, _relative(common, box))
        place = opened.place(key, row)
        needs.append(Need(key, entry.dtype, chunk.item, chunk.box.sizes, inside, part, place))
    if num_found != box.num_elements:
        raise DamagedError(
            f"{key}: the stored chunks do not cover {box} exactly once",
            hint=f"ckptool validate {opened.url}",
            entry=key,
        )
    return needs


def _check_match(shard: LocalShard, entry: TensorEntry | ValueEntry, *, allow_cast: bool) -> None:
    if isinstance(entry, ValueEntry):
        raise UsageError(
            f"{shard.key} is a value in the checkpoint and a tensor in this program",
            hint="give a value to load into, such as None",
            entry=shard.key,
        )
    if entry.shape != shard.shape:
        raise UsageError(
            f"{shard.key} has shape {list(entry.shape)} in the checkpoint and "
            f"{list(shard.shape)} in this program",
            hint="build the model that was saved",
            entry=shard.key,
        )
    if entry.dtype != shard.dtype and not allow_cast:
        raise UsageError(
            f"{shard.key} is {entry.dtype} in the checkpoint and {shard.dtype} in this program",
            hint="allow_cast=True rounds to the program's dtype",
            entry=shard.key,
        )


def _overlapping(chunks: Chunks, box: Box) -> list[int]:
    low, sizes = np.array(box.offsets, np.int64), np.array(box.sizes, np.int64)
    touching = (chunks.offsets < low + sizes) & (chunks.offsets + chunks.sizes > low)
    return [int(row) for row in np.flatnonzero(touching.all(axis=1))]


def _relative(box: Box, outer: Box) -> Box:
    return Box(tuple(a - b for a, b in zip(box.offsets, outer.offsets, strict=True)), box.sizes)


def _part(shard: LocalShard, box: Box) -> torch.Tensor:
    return _narrow(shard.tensor.detach(), _relative(box, shard.box))


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _pass_on(group: Group, plan: LoadPlan, shards: Sequence[LocalShard]) -> None:
    for transfer in plan.transfers:
        target = _part(shards[transfer.offer], transfer.box)
        if target.is_contiguous():
            flat = target.reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _BOUNCE_BYTES):
                _exchange(group, transfer, flat[start : start + _BOUNCE_BYTES])
        else:
            whole = local_bytes(target).clone()
            _exchange(group, transfer, whole)
            target.copy_(whole.view(target.dtype).reshape(target.shape))


def _exchange(group: Group, transfer: Transfer, flat: torch.Tensor) -> None:
    """Flat bytes from the owner to all holders; through host memory where they are on a GPU."""
    is_owner = transfer.owner == group.rank
    host = flat if not flat.is_cuda else torch.empty(flat.shape, dtype=flat.dtype, device="cpu")
    if flat.is_cuda and is_owner:
        host.copy_(flat)
    if len(transfer.holders) == group.size:
        group.broadcast_tensor(host, source=transfer.owner)
    elif is_owner:
        works = [group.send(host, to=rank) for rank in transfer.holders if rank != group.rank]
        for work in works:
            if work is not None:
                work.wait()
    else:
        group.receive(host, source=transfer.owner)
    if flat.is_cuda and not is_owner:
        flat.copy_(host)


def _load_values(store: Store, opened: Opened, group: Group, wanted: Wanted) -> ReadCount:
    """Rank 0 reads what any rank wants, once; every rank decodes its own."""
    keys = sorted({key for _, key in wanted.values})
    gathered = group.gather(json.dumps(keys).encode())
    union = sorted({key for row in gathered or [] for key in json.loads(row)})
    count, packed = ReadCount(), bytearray()

    def read() -> list[int]:
        items, fetched = _read_values(store, opened, union)
        packed.extend(_pack(items))
        needed = sum(len(item) for item in items.values())
        return [needed, fetched, 0]

    count += ReadCount(*group.from_rank_0(read))
    items = _unpack(group.broadcast(bytes(packed) if group.rank == 0 else None))

    def decode() -> bytes:
        for state, key in wanted.values:
            state.put(key, values.decode(key, items[key]))
        return b""

    group.together(decode)
    return count


def _read_values(store: Store, opened: Opened, keys: Sequence[str]) -> tuple[dict[str, bytes], int]:
    entries = [opened.index.entries[key] for key in keys]
    items = {e.key: e.item for e in entries if isinstance(e, ValueEntry) and e.item is not None}
    for key in keys:
        if key not in items:
            raise DamagedError(f"{key} is listed but not stored", entry=key)
    names = list(items)
    extents = [Extent(items[n].file, items[n].offset, items[n].end) for n in names]
    groups = coalesce(extents, max_gap=4096, max_bytes=16 << 20)
    blobs = store.read_many([extent for extent, _ in groups])
    found: dict[str, bytes] = {}
    for (extent, members), blob in zip(groups, blobs, strict=True):
        for member in members:
            start = extents[member].start - extent.start
            data = blob[start : start + extents[member].num_bytes]
            found[names[member]] = decompress_value(names[member], items[names[member]], data)
    return found, sum(extent.num_bytes for extent, _ in groups)


def _pack(items: dict[str, bytes]) -> bytes:
    head = json.dumps([[key, len(data)] for key, data in items.items()]).encode()
    return struct.pack("<Q", len(head)) + head + b"".join(items.values())


def _unpack(data: bytes) -> dict[str, bytes]:
    (length,) = struct.unpack_from("<Q", data)
    at = 8 + length
    items: dict[str, bytes] = {}
    for key, num_bytes in json.loads(data[8:at]):
        items[key] = data[at : at + num_bytes]
        at += num_bytes
    return items
