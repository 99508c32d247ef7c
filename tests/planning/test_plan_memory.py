"""What a byte plan holds of a large checkpoint: columns, and not an object for each chunk."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from ckptool.dtypes import dtype_named
from ckptool.formats.dcp_item import encode_item
from ckptool.model import Chunks, Index, TensorEntry
from ckptool.planning.digest import plan_digest
from ckptool.planning.reshard import plan_layout
from ckptool.planning.reshard_bytes import ReshardBytes, plan_bytes, source_chunks
from ckptool.planning.sources import Sources

F32 = dtype_named("float32")
NUM_TENSORS, NUM_RANKS, ROWS = 48, 512, 2


@pytest.fixture(scope="module")
def index() -> Index:
    """48 tensors on 512 ranks, two rows of four elements each: 24,576 chunks."""
    files = tuple(f"__{rank}_0.distcp" for rank in range(NUM_RANKS))
    length = encode_item(dtype=F32, shape=(ROWS, 4)).length
    ranks = np.arange(NUM_RANKS)
    entries = {}
    for number in range(NUM_TENSORS):
        chunks = Chunks(
            offsets=np.stack((ranks * ROWS, ranks * 0), axis=1),
            sizes=np.full((NUM_RANKS, 2), (ROWS, 4)),
            file=ranks,
            starts=np.full(NUM_RANKS, number * length),
            lengths=np.full(NUM_RANKS, length),
            files=files,
        )
        key = f"layer{number}.weight"
        entries[key] = TensorEntry(key, F32, (ROWS * NUM_RANKS, 4), chunks)
    return Index(entries)


def planner(index: Index, *, to: int, server_copy: bool) -> Callable[[], ReshardBytes]:
    """Plans a reshard of items whose headers were read."""
    layout = plan_layout(index, num_ranks=to, merge=False)
    sources = Sources(source_chunks(index, layout))
    framing = encode_item(dtype=F32, shape=(ROWS, 4))
    sources.start[:] = sources.stored_start[:] = sources.chunks.start + len(framing.head)
    sources.stored_end[:] = sources.stored_start + framing.payload_num_bytes
    sources.crc32[:] = sources.item_crc32[:] = 7
    return lambda: plan_bytes(index, layout, sources=sources, values={}, server_copy=server_copy)


@pytest.mark.parametrize("to", [1, 16, 1024], ids=["one file", "kept", "cut"])
@pytest.mark.parametrize("server_copy", [False, True])
def test_a_plan_keeps_columns(index: Index, to: int, server_copy: bool) -> None:
    """A plan keeps under 400 bytes for each new chunk, whether that is kept or made anew.

    Also when all of its outputs were looked at. An object for each would take 1.8 KB.
    """
    plan = planner(index, to=to, server_copy=server_copy)
    plan()  # what is cached is made
    gc.collect()
    tracemalloc.start()
    try:
        planned = plan()
        for output in planned.plan.outputs:
            assert output.segments[0] and output.segments[-1]
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_chunks = sum(len(entry.chunks) for entry in planned.index.tensors)
    assert num_chunks == NUM_TENSORS * max(to, NUM_RANKS)
    assert held < 400 * num_chunks
    assert peak < held + (24 << 20)  # a block or two while they are made


@pytest.mark.parametrize("server_copy", [False, True])
def test_a_plan_is_the_same_each_time(index: Index, server_copy: bool) -> None:
    """What is made again is what was made before: one digest, and checks in order, once each."""
    planned = planner(index, to=48, server_copy=server_copy)().plan
    digest = plan_digest(planned, server_copy=server_copy)
    assert digest == plan_digest(planned, server_copy=server_copy)
    assert digest == plan_digest(
        planner(index, to=48, server_copy=server_copy)().plan, server_copy=server_copy
    )
    ids = [check.id for check in planned.checks]
    assert ids == sorted(set(ids))
    used = {
        check
        for output in planned.outputs
        for segment in output.segments
        for _, _, check in getattr(segment, "proofs", ())
    }
    assert used <= set(ids)
    assert sum(check.num_payloads for check in planned.checks) == NUM_TENSORS * NUM_RANKS
