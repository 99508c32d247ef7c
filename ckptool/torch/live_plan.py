"""What every rank holds -> the parts of every output file and who writes each. No I/O.

The plan is the export's own: the same choice of entries and names, the same layout of files,
the same headers and segments. Every rank makes it from the same facts, so that nothing of it
has to be sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptool.dtypes import DType
from ckptool.errors import OverBudgetError, UsageError
from ckptool.model import Chunks, Entry, Index, Path, TensorEntry, ValueEntry
from ckptool.planning.export import ExportLayout, plan_layout
from ckptool.planning.export_bytes import plan_safetensors
from ckptool.planning.keys import Choice, choose
from ckptool.planning.parts import Bounds, Step, choose_part_bytes
from ckptool.planning.plan import Plan
from ckptool.planning.sources import Source
from ckptool.planning.tiling import check_tiling
from ckptool.storage.base import PartLimits
from ckptool.torch.live_cuts import LivePart, assign_parts, cut_live, least_bytes
from ckptool.torch.live_pieces import live_source
from ckptool.torch.local_state import LocalState
from ckptool.torch.shares import Offer, Share, assign_shares

__all__ = [
    "Held",
    "LivePlan",
    "Wishes",
    "choose_shares",
    "holdings_json",
    "plan_live",
    "read_holdings",
]

_LEAST_PART_BYTES = 256 << 10
_PARTS_PER_BUDGET = 4  # one is filled, one travels, and at least two are written


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the caller asks for, as ``ckptool export`` takes it."""

    dtype: DType | None = None
    everything: bool = False
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str | None = None
    rename: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What the ranks hold: a row of offers for each, and the paths of all keys and values."""

    offers: tuple[tuple[Offer, ...], ...]
    paths: Mapping[str, Path]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LivePlan:
    """``chosen`` and ``shares`` have a row per rank: its chosen offers' numbers, and its shares.

    A share's ``offer`` counts the chosen ones. ``part_bytes`` is of the largest part.
    """

    layout: ExportLayout
    plan: Plan
    chosen: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[Share, ...], ...]
    parts: tuple[LivePart, ...]

    @property
    def part_bytes(self) -> int:
        return max(part.step.num_bytes for part in self.parts)

    @property
    def num_bytes_travelling(self) -> int:
        return sum(part.num_bytes_travelling for part in self.parts)

    def of_rank(self, rank: int) -> list[LivePart]:
        """The parts that a rank writes, in order."""
        return [part for part in self.parts if part.owner == rank]


def holdings_json(state: LocalState) -> bytes:
    """What this rank holds, for the others."""
    offers = [Offer(s.key, s.dtype, s.shape, s.box) for s in state.shards]
    row = {
        "offers": [offer.to_json() for offer in offers],
        "paths": {key: list(path) for key, path in state.paths.items()},
        "values": list(state.values),
    }
    return json.dumps(row, separators=(",", ":")).encode()


def read_holdings(rows: Sequence[bytes]) -> Held:
    """What all ranks hold."""
    offers: list[tuple[Offer, ...]] = []
    paths: dict[str, Path] = {}
    values: dict[str, None] = {}
    for data in rows:
        row: dict[str, Any] = json.loads(data)
        offers.append(tuple(map(Offer.from_json, row["offers"])))
        for key, path in row["paths"].items():
            paths.setdefault(key, tuple(path))
        values.update(dict.fromkeys(row["values"]))
    return Held(tuple(offers), paths, tuple(values))


def plan_live(
    held: Held,
    wishes: Wishes,
    *,
    single_file: str | None,
    max_file_num_bytes: int,
    limits: PartLimits,
    max_memory: int,
    writer: int | None,
    require: Callable[[ExportLayout], None],
) -> LivePlan:
    """Plan an export; ``writer`` is the one rank that writes where only one can.

    ``require`` refuses layouts that the format cannot hold. Raises UsageError, RefusedError
    and its children, on every rank alike.
    """
    choice, chosen, shares = choose_shares(held, wishes)
    index = _index(held)
    layout = plan_layout(
        index,
        choice,
        format="safetensors",
        single_file=single_file,
        max_file_num_bytes=max_file_num_bytes,
        dtype=wishes.dtype,
    )
    require(layout)
    offers = [[row[i] for i in numbers] for row, numbers in zip(held.offers, chosen, strict=True)]
    sources = _sources(index, offers, shares)
    plan = plan_safetensors(layout, sources=sources, checks=(), metadata={"format": "pt"})
    steps = _steps(plan, limits, max_memory)
    parts = assign_parts(steps, num_ranks=len(offers), writer=writer)
    return LivePlan(layout, plan, chosen, shares, tuple(parts))


def choose_shares(
    held: Held, wishes: Wishes
) -> tuple[Choice, tuple[tuple[int, ...], ...], tuple[tuple[Share, ...], ...]]:
    """The entries, the numbers of each rank's offers of them, and each rank's shares."""
    choice = choose(
        _index(held),
        everything=wishes.everything,
        only=wishes.only,
        exclude=wishes.exclude,
        strip_prefix=wishes.strip_prefix,
        rename=wishes.rename,
    )
    chosen = tuple(
        tuple(i for i, offer in enumerate(row) if offer.key in choice.names) for row in held.offers
    )
    offers = [[row[i] for i in numbers] for row, numbers in zip(held.offers, chosen, strict=True)]
    return choice, chosen, tuple(map(tuple, assign_shares(offers)))


def _index(held: Held) -> Index:
    """The index that a checkpoint of this state would have, in its order."""
    entries: dict[str, Entry] = {}
    for row in held.offers:
        for offer in row:
            if offer.key not in entries:
                none = Chunks.of([], num_dims=len(offer.shape))
                path = held.paths.get(offer.key)
                entries[offer.key] = TensorEntry(offer.key, offer.dtype, offer.shape, none, path)
    for key in held.values:
        entries.setdefault(key, ValueEntry(key, None, held.paths.get(key)))
    return Index(entries)


def _sources(
    index: Index,
    offers: Sequence[Sequence[Offer]],
    shares: Sequence[Sequence[Share]],
) -> dict[str, list[Source]]:
    """Each tensor's shares as sources; raises UsageError where they do not make it whole."""
    found: dict[str, list[Source]] = {offer.key: [] for row in offers for offer in row}
    for rank, (row, mine) in enumerate(zip(offers, shares, strict=True)):
        for number, share in enumerate(mine):
            entry = index.entries[row[share.offer].key]
            assert isinstance(entry, TensorEntry)
            if share.box.num_elements:
                found[entry.key].append(live_source(entry, share.box, rank=rank, share=number))
    for key, sources in found.items():
        entry = index.entries[key]
        assert isinstance(entry, TensorEntry)
        _require_whole(entry, sources)
        sources.sort(key=lambda source: source.payload.box.offsets)
    return found


def _require_whole(entry: TensorEntry, sources: Sequence[Source]) -> None:
    boxes = [source.payload.box for source in sources]
    rows = (len(boxes), len(entry.shape))
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(rows)
    sizes = np.array([box.sizes for box in boxes], np.int64).reshape(rows)
    if not entry.shape:
        exact = len(boxes) == 1
    else:
        exact = check_tiling(offsets, sizes, shape=entry.shape).is_exact
    if not exact:
        raise UsageError(
            f"{entry.key} {list(entry.shape)} is not whole: the ranks hold "
            f"{', '.join(map(str, boxes[:8])) or 'nothing'} of it",
            hint="call this on every rank that holds a part of the model",
            entry=entry.key,
        )


def _steps(plan: Plan, limits: PartLimits, max_memory: int) -> list[Step]:
    steps: list[Step] = []
    bounds = Bounds(limits.min_bytes, limits.max_bytes, limits.max_parts)
    for number, output in enumerate(plan.outputs):
        most = max_memory // _PARTS_PER_BUDGET
        size = choose_part_bytes(
            2 * output.num_bytes, bounds=bounds, preferred=min(limits.preferred_bytes, most)
        )
        size = max(size, 2 * limits.min_bytes, _LEAST_PART_BYTES)
        if size > most:
            raise OverBudgetError(
                f"{output.key} of {output.num_bytes} bytes is written in parts of {size} bytes, "
                f"and max_memory holds {_PARTS_PER_BUDGET} parts: {max_memory} are too few",
                hint=f"set max_memory to {_PARTS_PER_BUDGET * size} or more, or a smaller "
                "max_file_size",
            )
        least = least_bytes(output.num_bytes, bounds=bounds, part_bytes=size // 2)
        steps += cut_live(output, index=number, part_bytes=size, min_bytes=least)
    return steps
