"""The byte plan of a reshard: shard files as segments, and the index that describes them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ckptool.layout import shard_file_name
from ckptool.model import Entry, Extent, Index, Ints, Item, TensorEntry, ValueEntry
from ckptool.planning.chunk_rows import ChunkRows
from ckptool.planning.made import Made
from ckptool.planning.plan import Check, Output, Payload, Plan, Segment
from ckptool.planning.reshard import ReshardLayout
from ckptool.planning.reshard_index import (
    NewItems,
    PlannedPayloads,
    planned_payloads,
    tensor_entry,
)
from ckptool.planning.shard_block import PlacedItem, Run
from ckptool.planning.shard_files import ShardFiles
from ckptool.planning.sources import Sources

__all__ = ["ReshardBytes", "plan_bytes", "source_chunks"]


@dataclass(frozen=True, slots=True)
class ReshardBytes:
    """The plan, and the index of the checkpoint that it makes.

    ``streams``: wrapped items that are kept; to prove them they must be read as a stream.
    ``payloads`` has per tensor those of its chunks, in the order of the index.
    """

    plan: Plan
    index: Index
    streams: Sequence[Payload]
    payloads: Mapping[str, PlannedPayloads]

    def fresh(self) -> frozenset[Item]:
        """The items that are made anew, those that may be compressed."""
        found = (
            entry.chunks.item(i)
            for entry in self.index.tensors
            for i in np.flatnonzero(self.payloads[entry.key].made_at >= 0).tolist()
        )
        return frozenset(item for item in found if item is not None)


def source_chunks(index: Index, layout: ReshardLayout) -> ChunkRows:
    """The source chunks that a layout uses: per tensor, in the order of their rows."""
    chosen = []
    for tensor in layout.tensors:
        entry = index.entries[tensor.entry]
        assert isinstance(entry, TensorEntry)
        rows = np.unique(tensor.sources)
        chosen.append((entry, rows, np.isin(rows, tensor.kept_sources())))
    return ChunkRows(chosen)


def plan_bytes(
    index: Index,
    layout: ReshardLayout,
    *,
    sources: Sources,
    values: Mapping[str, bytes],
    server_copy: bool = False,
) -> ReshardBytes:
    """Lay out every shard file.

    ``sources`` are those of ``source_chunks``; ``values`` has the bytes of values as stored. With
    ``server_copy`` runs of whole items are proved as one range, by its CRC-32.
    """
    files = ShardFiles(index, layout, sources, values, joins_checks=server_copy)
    noted = _Noted(files, _RunChecks(sources))
    outputs = [
        Output.in_blocks(shard_file_name(r, 0), noted.blocks(r), again=partial(files.segments, r))
        for r in range(layout.num_ranks)
    ]
    new, payloads = _new_index(index, layout, files, noted, sources)
    return ReshardBytes(
        Plan(
            tuple(output for output in outputs if output.num_bytes),
            noted.runs.checks() if server_copy else sources.checks,
        ),
        new,
        sources.wrapped_and_whole(),
        payloads,
    )


class _Noted:
    """What is noted while the files are laid out for the first time.

    Of each new chunk where its item stands, and what takes the place of single checks.
    """

    def __init__(self, files: ShardFiles, runs: _RunChecks) -> None:
        self._files, self.runs = files, runs
        self.start, self.length, self.head = np.zeros((3, files.num_chunks), np.int64)
        self.values: list[PlacedItem] = []

    def blocks(self, rank: int) -> Iterator[Sequence[Segment]]:
        """The blocks of a rank's file, one after another."""
        start = 0
        for number in range(self._files.num_blocks(rank)):
            block = self._files.block(rank, number, start)
            segments, chunks = block.segments, self._files.chunks(rank, number)
            if len(chunks):
                items = np.array(block.items, np.int64)
                self.start[chunks], self.length[chunks], self.head[chunks] = items.T
            else:
                self.values = block.items
            for run in block.runs:
                self.runs.note(run)
            start = block.end
            yield segments


class _RunChecks:
    """The checks of sources, where one of a whole run takes the place of its payloads'."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._start, self._end, self._crc32 = np.zeros((3, len(sources)), np.int64)
        self._length = np.zeros(len(sources), np.int32)  # in payloads: those of a run's first
        self._is_replaced = np.zeros(len(sources), bool)

    def note(self, run: Run) -> None:
        first, *others = run.checks
        self._start[first], self._end[first] = run.extent.start, run.extent.end
        self._crc32[first], self._length[first] = run.crc32, len(run.checks)
        self._is_replaced[others] = True

    def checks(self) -> Sequence[Check]:
        """One per run, and one per source that is in none."""
        ids = np.flatnonzero(~self._is_replaced)
        return Made(len(ids), partial(self._check, ids))

    def _check(self, ids: Ints, index: int) -> Check:
        check_id = int(ids[index])
        own, length = self._sources[check_id].check, int(self._length[check_id])
        if not length:
            return own
        run = Extent(own.extent.key, int(self._start[check_id]), int(self._end[check_id]))
        crc32, one = int(self._crc32[check_id]), length == 1
        entry = own.entry if one else f"{own.entry} (and {length - 1} more)"
        return Check(check_id, run, crc32, entry, own.box if one else None, num_payloads=length)


def _new_index(
    old: Index, layout: ReshardLayout, files: ShardFiles, noted: _Noted, sources: Sources
) -> tuple[Index, dict[str, PlannedPayloads]]:
    """The index of what is planned, chunks in the order of their boxes, and their payloads."""
    found: dict[str, Entry] = {}
    payloads: dict[str, PlannedPayloads] = {}
    names = tuple(shard_file_name(rank, 0) for rank in range(layout.num_ranks))
    for number, tensor in enumerate(layout.tensors):
        here = slice(int(files.firsts[number]), int(files.firsts[number + 1]))
        items = NewItems(
            noted.start[here], noted.length[here], noted.head[here], files.first_source[here]
        )
        entry = old.entries[tensor.entry]
        assert isinstance(entry, TensorEntry)
        found[entry.key], order = tensor_entry(entry, tensor, items, files=names)
        payloads[entry.key] = planned_payloads(tensor, items, sources, order=order)
    for key, placed in zip(layout.values, noted.values, strict=True):
        value = old.entries[key]
        assert isinstance(value, ValueEntry) and value.item is not None
        item = Item(shard_file_name(0, 0), placed.start, placed.length, value.item.transforms)
        found[key] = replace(value, item=item)
    entries = {key: found[key] for key in old.entries}
    return Index(entries, version=old.version), payloads
