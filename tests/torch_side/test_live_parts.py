"""How a live export cuts its files, moves pieces and casts them: each alone, without ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES, dtype_named, numpy_dtype
from ckptool.engine.cast import cast
from ckptool.model import Box, Chunks, TensorEntry
from ckptool.planning.boxes import chunk_rows, whole_box
from ckptool.planning.parts import Bounds
from ckptool.planning.plan import Literal, Output, Segment
from ckptool.planning.sources import Source
from ckptool.planning.tensor_bytes import region_segments
from ckptool.torch.live_casts import cast_into
from ckptool.torch.live_cuts import assign_parts, cut_live, least_bytes
from ckptool.torch.live_fill import Filler
from ckptool.torch.live_pieces import live_source

FLOATS = [d.name for d in DTYPES.values() if d.kind == "float" and d.name != "float8_e8m0fnu"]


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
def test_casts_give_the_bits_of_the_engine(source: str, target: str) -> None:
    """Any bits at all, NaNs, infinities and denormals among them, become the very same bits."""
    a, b = dtype_named(source), dtype_named(target)
    bits = np.random.default_rng(5).integers(0, 256, 64 * 1024, dtype=np.uint8)
    if source in ("float32", "float64"):
        near_one = np.random.default_rng(6).standard_normal(4096).astype(numpy_dtype(a))
        bits = np.concatenate([bits, near_one.view(np.uint8)])
    with np.errstate(all="ignore"):
        wanted, over, under = cast(bits.view(numpy_dtype(a)), a, b)
    out = torch.empty(wanted.nbytes, dtype=torch.uint8)
    assert cast_into(out, torch.from_numpy(bits.copy()), a, b) == (over, under)
    assert out.numpy().tobytes() == wanted.tobytes()


def test_casts_without_odd_values_stay_on_the_device() -> None:
    """What has no NaN is rounded by torch itself, to the engine's bits all the same."""
    data = np.random.default_rng(7).standard_normal(5000).astype(np.float32)
    data[:2] = [3.4e38, 1e-42]
    wanted, over, under = cast(data, dtype_named("float32"), dtype_named("bfloat16"))
    out = torch.empty(10_000, dtype=torch.uint8)
    lost = cast_into(
        out,
        torch.from_numpy(data).view(torch.uint8),
        dtype_named("float32"),
        dtype_named("bfloat16"),
    )
    assert lost == (over, under)
    assert out.numpy().tobytes() == wanted.tobytes()


class _Ranks:
    """Random tensors over a few ranks, and the file that they should become."""

    def __init__(self, layouts: list[tuple[int, int, int, str]], num_ranks: int) -> None:
        segments: list[Segment] = [Literal(b"header..")]
        self.shares: list[list[torch.Tensor]] = [[] for _ in range(num_ranks)]
        self.wanted = b"header.."
        for rows, columns, cut, dtype in layouts:
            values = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
            values = (values % 251).to(getattr(torch, dtype))
            self.wanted += values.to(torch.float32).numpy().tobytes()
            sources = self._share(values, dtype, cut)
            box = whole_box((rows, columns))
            segments += region_segments("t", box, sources, dtype=dtype_named("float32"))
        self.output = Output.of("file", [s for s in segments if s.num_bytes])

    def _share(self, values: torch.Tensor, dtype: str, cut: int) -> list[Source]:
        shape = tuple(values.shape)
        entry = TensorEntry("t", dtype_named(dtype), shape, Chunks.of([], num_dims=2))
        sources = []
        for rank, (start, end) in enumerate(chunk_rows(shape[cut], len(self.shares))):
            if start == end:
                continue
            offsets, sizes = [0, 0], list(shape)
            offsets[cut], sizes[cut] = start, end - start
            box = Box(tuple(offsets), tuple(sizes))
            local = values.narrow(cut, start, end - start).contiguous()
            sources.append(live_source(entry, box, rank=rank, share=len(self.shares[rank])))
            self.shares[rank].append(local.reshape(-1).view(torch.uint8))
        return sources


class _Source:
    device = torch.device("cpu")

    def __init__(self, shares: list[torch.Tensor]) -> None:
        self._shares = shares

    def wait(self) -> None:
        pass

    def share(self, number: int) -> torch.Tensor:
        return self._shares[number]


LAYOUT = st.tuples(
    st.integers(1, 40),
    st.integers(1, 30),
    st.sampled_from([0, 1]),
    st.sampled_from(["float32", "bfloat16"]),
)


@settings(max_examples=60, deadline=None)
@given(
    layouts=st.lists(LAYOUT, min_size=1, max_size=6),
    num_ranks=st.integers(1, 5),
    part_bytes=st.integers(64, 4096),
    alone=st.booleans(),
)
def test_parts_from_all_ranks_make_the_file(
    layouts: list[tuple[int, int, int, str]], num_ranks: int, part_bytes: int, alone: bool
) -> None:
    """Whatever the shards, the parts tile the file within the store's bounds, and own pieces
    together with those that travel are its bytes."""
    ranks = _Ranks(layouts, num_ranks)
    bounds = Bounds(min_bytes=32, max_bytes=1 << 20, max_parts=1000)
    least = least_bytes(ranks.output.num_bytes, bounds=bounds, part_bytes=part_bytes // 2)
    steps = list(cut_live(ranks.output, index=0, part_bytes=part_bytes, min_bytes=least))
    assert [step.start for step in steps[1:]] == [step.end for step in steps[:-1]]
    assert all(step.num_bytes >= bounds.min_bytes for step in steps[:-1])
    assert all(step.num_bytes <= part_bytes + 4 for step in steps)
    fillers = [Filler(_Source(mine), rank=rank) for rank, mine in enumerate(ranks.shares)]
    found = b""
    for part in assign_parts(steps, num_ranks=num_ranks, writer=0 if alone else None):
        data = torch.zeros(part.step.num_bytes, dtype=torch.uint8)
        held = [sum(p.num_bytes for p in part.from_rank(r)) for r in range(num_ranks)]
        assert alone or held[part.owner] == max(held)
        fillers[part.owner].own(data, part)
        for rank in range(num_ranks):
            pieces = part.from_rank(rank)
            if rank != part.owner and pieces:
                fillers[part.owner].place(data, pieces, fillers[rank].outgoing(pieces))
        found += data.numpy().tobytes()
    assert found == ranks.wanted


def test_parts_end_where_shards_do() -> None:
    """Of large shards on dim 0 nothing travels: each part is of one rank, header aside."""
    ranks = _Ranks([(400, 50, 0, "float32")] * 3, 4)
    least = least_bytes(ranks.output.num_bytes, bounds=Bounds(1, 1 << 20, 1000), part_bytes=4096)
    steps = list(cut_live(ranks.output, index=0, part_bytes=8192, min_bytes=least))
    parts = assign_parts(steps, num_ranks=4, writer=None)
    assert sum(part.num_bytes_travelling for part in parts) == 0
    loads = [sum(p.step.num_bytes for p in parts if p.owner == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= 8
    assert math.ceil(len(ranks.wanted) / 8192) <= len(parts) <= 2 * len(ranks.wanted) // 8192 + 12
