"""Boxes of stored chunks -> tensors: the ranges to read, read at once, checked, put in place.

A box whose bytes are one run of the payload goes straight into a CPU tensor's own memory;
anything else passes through a buffer of a few MiB (pinned, where the tensor is on a GPU). What
covers a CRC-32 is checked against it: whole payloads, or whole blocks where the index has
them. Edges of a block that were not wanted are read too where that costs little.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ckptool.dtypes import DType
from ckptool.errors import DamagedError
from ckptool.formats.crc import crc32, crc32_join
from ckptool.model import Extent, Item
from ckptool.planning.reads import coalesce
from ckptool.storage.base import Store
from ckptool.torch.compressed import decompress
from ckptool.torch.devices import same_device
from ckptool.torch.local_state import memory_of, torch_dtype
from ckptool.torch.pieces import PIECE_BYTES, Need, Piece, cut_pieces
from ckptool.torch.places import Place, parse_item, probe_places

__all__ = ["ReadCount", "read_needs"]

_MAX_GAP = 4096
_SMALL_ITEM = 1 << 20


@dataclass
class ReadCount:
    """Bytes that were wanted, fetched, and handed on without a checksum that covered them."""

    needed: int = 0
    fetched: int = 0
    unverified: int = 0

    def __add__(self, other: ReadCount) -> ReadCount:
        return ReadCount(
            self.needed + other.needed,
            self.fetched + other.fetched,
            self.unverified + other.unverified,
        )


def read_needs(store: Store, needs: Sequence[Need], *, num_threads: int = 8) -> ReadCount:
    """Fill every need's target; raises DamagedError where a checksum does not match."""
    needs = [need for need in needs if need.box.num_elements]
    count = ReadCount(needed=sum(need.num_bytes for need in needs))
    whole = [n for n in needs if n.item.transforms or (n.place is None and _is_small(n))]
    rest = [n for n in needs if not (n.item.transforms or (n.place is None and _is_small(n)))]
    places, fetched = _places(store, rest)
    count.fetched += fetched
    pieces: list[Piece] = []
    for need, place in zip(rest, places, strict=True):
        pieces += cut_pieces(need, place)
    reader = _Reader(store, count)
    with ThreadPoolExecutor(
        num_threads, thread_name_prefix="ckptool-read", initializer=same_device()
    ) as pool:
        jobs = [pool.submit(reader.read_group, group) for group in _groups(pieces)]
        jobs += [pool.submit(reader.read_items, group) for group in _item_groups(whole)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    _check_whole_payloads(store, pieces, count)
    return count


def _is_small(need: Need) -> bool:
    return need.item.length <= _SMALL_ITEM and need.num_bytes * 2 >= need.item.length


def _places(store: Store, needs: Sequence[Need]) -> tuple[list[Place], int]:
    """The place of each need's payload, probed once per item where the index has none."""
    unknown: dict[Item, Need] = {n.item: n for n in needs if n.place is None}
    rows = [(n.key, n.item, n.dtype, n.sizes) for n in unknown.values()]
    found, fetched = probe_places(store, rows) if rows else ([], 0)
    probed = dict(zip(unknown, found, strict=True))
    return [need.place or probed[need.item] for need in needs], fetched


def _groups(pieces: Sequence[Piece]) -> list[tuple[Extent, list[Piece]]]:
    extents = [piece.extent for piece in pieces]
    grouped = coalesce(extents, max_gap=_MAX_GAP, max_bytes=PIECE_BYTES)
    return [(extent, [pieces[i] for i in members]) for extent, members in grouped]


def _item_groups(needs: Sequence[Need]) -> list[tuple[Extent, list[Need]]]:
    extents = [Extent(n.item.file, n.item.offset, n.item.end) for n in needs]
    grouped = coalesce(extents, max_gap=_MAX_GAP, max_bytes=PIECE_BYTES)
    return [(extent, [needs[i] for i in members]) for extent, members in grouped]


class _Reader:
    """Reads groups of pieces from any thread; each thread keeps one buffer."""

    def __init__(self, store: Store, count: ReadCount) -> None:
        self._store, self._count = store, count
        self._lock = threading.Lock()
        self._local = threading.local()

    def read_group(self, group: tuple[Extent, list[Piece]]) -> None:
        extent, pieces = group
        direct = _direct_memory(pieces[0]) if len(pieces) == 1 else None
        if direct is not None:
            self._store.read_into(extent, direct)
            self._note_sums(pieces[0], direct)
        else:
            pinned = any(piece.need.target.is_cuda for piece in pieces)
            buffer = self._buffer(extent.num_bytes, pinned=pinned)
            data = memory_of(buffer)
            self._store.read_into(extent, data)
            for piece in pieces:
                start = piece.extent.start - extent.start
                end = start + piece.end - piece.start
                self._note_sums(piece, data[start:end])
                _land(piece, buffer[start:end])
        with self._lock:
            self._count.fetched += extent.num_bytes

    def read_items(self, group: tuple[Extent, list[Need]]) -> None:
        """Whole items: compressed ones, and small ones that we have no place for."""
        extent, needs = group
        data = self._store.read(extent.key, start=extent.start, end=extent.end)
        unverified = 0
        for need in needs:
            start = need.item.offset - extent.start
            item = decompress(need.key, need.item, data[start : start + need.item.length], need)
            place = parse_item(
                self._store, need.key, need.item, item, dtype=need.dtype, sizes=need.sizes
            )
            payload = bytearray(item[place.start : place.start + place.num_bytes])
            if place.crc32 is None:
                unverified += need.num_bytes
            elif crc32(payload) != place.crc32:
                raise _damaged(self._store, need, need.item.offset)
            _land_strided(need, place, torch.frombuffer(payload, dtype=torch.uint8))
        with self._lock:
            self._count.fetched += extent.num_bytes
            self._count.unverified += unverified

    def _note_sums(self, piece: Piece, data: memoryview) -> None:
        """Check whole blocks, and keep the CRCs of the others for the whole payload's."""
        place, block = piece.place, piece.place.block_num_bytes
        at = piece.start
        while block and at < piece.end:
            end = min((at // block + 1) * block, place.num_bytes)
            whole = at % block == 0 and end <= piece.end
            if whole:
                crc = crc32(data[at - piece.start : end - piece.start])
                if crc != place.block_crc32s[at // block]:
                    raise _damaged(self._store, piece.need, place.start + at)
            elif piece.run is not None or piece.rows is not None:
                with self._lock:
                    self._count.unverified += _wanted(piece, at, min(end, piece.end))
            at = min(end, piece.end)
        if not block:
            piece.sums[piece.start] = (crc32(data), piece.end - piece.start)

    def _buffer(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        name = "pinned" if pinned else "plain"
        buffer: torch.Tensor | None = getattr(self._local, name, None)
        if buffer is None or buffer.numel() < num_bytes:
            size = max(num_bytes, PIECE_BYTES)
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            setattr(self._local, name, buffer)
        return buffer[:num_bytes]


def _wanted(piece: Piece, start: int, end: int) -> int:
    if piece.run is None:
        return end - start
    return max(0, min(end, piece.run[1]) - max(start, piece.run[0]))


def _direct_memory(piece: Piece) -> memoryview | None:
    """The target's own memory, where the range is exactly what lands there."""
    target = piece.need.target
    if piece.run != (piece.start, piece.end) or target.is_cuda:
        return None
    flat = target.detach().reshape(-1).view(torch.uint8)
    start = piece.target_start
    return memory_of(flat)[start : start + piece.end - piece.start]


def _land(piece: Piece, data: torch.Tensor) -> None:
    need = piece.need
    if piece.run is not None:
        flat = need.target.detach().reshape(-1).view(torch.uint8)
        first, last = piece.run
        part = data[first - piece.start : last - piece.start]
        flat[piece.target_start : piece.target_start + len(part)].copy_(part)
    elif piece.rows is None:
        _land_strided(need, piece.place, data)
    else:
        first, last = piece.rows
        rows = _typed(data, need.dtype).reshape(last - first, *need.sizes[1:])
        for dim in range(1, len(need.sizes)):
            rows = rows.narrow(dim, need.box.offsets[dim], need.box.sizes[dim])
        target = need.target.detach().narrow(0, first - need.box.offsets[0], last - first)
        target.copy_(rows)


def _land_strided(need: Need, place: Place, payload: torch.Tensor) -> None:
    """A whole payload, whatever its strides."""
    flat = _typed(payload, need.dtype)
    tensor = torch.as_strided(flat, need.sizes, place.strides, place.storage_offset)
    for dim, (offset, size) in enumerate(zip(need.box.offsets, need.box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    tensor = tensor.conj() if place.conj else tensor
    need.target.detach().copy_(torch._neg_view(tensor) if place.neg else tensor)


def _typed(data: torch.Tensor, dtype: DType) -> torch.Tensor:
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(torch_dtype(dtype))


def _check_whole_payloads(store: Store, pieces: Sequence[Piece], count: ReadCount) -> None:
    """Payloads without block CRCs: whole ones against their own, else not verified."""
    by_need: dict[int, list[Piece]] = {}
    for piece in pieces:
        if not piece.place.block_num_bytes:
            by_need.setdefault(id(piece.need), []).append(piece)
    for group in by_need.values():
        need, place = group[0].need, group[0].place
        sums = dict(sorted(item for piece in group for item in piece.sums.items()))
        covered = sum(num_bytes for _, num_bytes in sums.values()) == place.num_bytes
        if not covered or place.crc32 is None:
            count.unverified += need.num_bytes
        elif crc32_join(list(sums.values())) != place.crc32:
            raise _damaged(store, need, place.start)


def _damaged(store: Store, need: Need, offset: int) -> DamagedError:
    return DamagedError(
        f"{need.key}: the bytes at {offset} of {store.url_of(need.item.file)} do not match "
        "their checksum",
        hint="ckptool validate --read-data says what else is damaged; load an older step",
        entry=need.key,
        file=need.item.file,
        offset=offset,
    )
