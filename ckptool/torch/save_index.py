"""The agreed layout and what every rank stored -> the index of the checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.errors import UsageError
from ckptool.formats.ckpt_index import Payload, Payloads
from ckptool.model import Chunk, Chunks, Entry, Index, TensorEntry, ValueEntry
from ckptool.torch.commit import StoredObject
from ckptool.torch.shard_items import ShardResult
from ckptool.torch.shares import Offer, Share

__all__ = ["RankResult", "build_index", "stored_objects"]


@dataclass(frozen=True)
class RankResult:
    """What one rank stored: its file's items are its shares and then its values, in order.

    ``values`` has a key and a path for each; ``shard`` is None where it had nothing to store.
    """

    shard: ShardResult | None
    values: tuple[tuple[str, tuple[str | int, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "shard": self.shard.to_json() if self.shard else None,
            "values": [[key, list(path)] for key, path in self.values],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RankResult:
        shard = ShardResult.from_json(row["shard"]) if row["shard"] else None
        return cls(shard, tuple((key, tuple(path)) for key, path in row["values"]))


def build_index(
    offers: Sequence[Sequence[Offer]],
    shares: Sequence[Sequence[Share]],
    paths: Mapping[str, tuple[str | int, ...]],
    results: Sequence[RankResult],
) -> tuple[Index, dict[str, Payloads]]:
    """The index, and every payload's place and CRC-32s.

    Raises UsageError where two ranks stored a value under one key.
    """
    chunks: dict[str, list[tuple[Chunk, Payload]]] = {}
    first: dict[str, Offer] = {}
    values: dict[str, ValueEntry] = {}
    for rank_offers, rank_shares, result in zip(offers, shares, results, strict=True):
        for offer in rank_offers:
            first.setdefault(offer.key, offer)
        if result.shard is None:
            continue
        file, items = result.shard.key, result.shard.items
        for share, row in zip(rank_shares, items, strict=False):
            offer = rank_offers[share.offer]
            payload = row.described(share.box.num_elements * offer.dtype.itemsize)
            chunk = Chunk(share.box, row.stored_in(file))
            chunks.setdefault(offer.key, []).append((chunk, payload))
        for (key, path), row in zip(result.values, items[len(rank_shares) :], strict=True):
            if key in values or key in first:
                raise UsageError(f"{key} was stored by two ranks", hint="put the rank into the key")
            values[key] = ValueEntry(key, row.stored_in(file), path)
    entries: dict[str, Entry] = {}
    payloads: dict[str, Payloads] = {}
    for key, offer in first.items():
        rows = sorted(chunks.get(key, []), key=lambda row: row[0].box.offsets)
        columns = Chunks.of([chunk for chunk, _ in rows], num_dims=len(offer.shape))
        payloads[key] = Payloads.of([payload for _, payload in rows])
        entries[key] = TensorEntry(key, offer.dtype, offer.shape, columns, paths.get(key))
    entries.update(values)
    return Index(entries), payloads


def stored_objects(results: Sequence[RankResult]) -> list[StoredObject]:
    """The shard files of all ranks."""
    shards = [result.shard for result in results if result.shard is not None]
    return [StoredObject(s.key, s.num_bytes, s.crc32, s.verified) for s in shards]
