"""Cutting outputs into parts: parts tile the output, and keep every bound of the store."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.errors import OverBudgetError
from ckptool.model import Box, Extent, Item
from ckptool.planning.parts import Bounds, choose_part_bytes, cut_output
from ckptool.planning.plan import Copy, Literal, Output, Payload, Place, Tail

MIB = 1 << 20
S3 = Bounds(min_bytes=5 * MIB, max_bytes=5 << 30, max_parts=10_000)


@dataclass(frozen=True)
class _Zeros:
    num_bytes: int

    def __call__(self, crcs):
        return bytes(self.num_bytes)


def _place(rows, columns):
    f32 = dtype_named("float32")
    box = Box((0, 0), (rows, columns))
    payload = Payload(Item("f", 0, 4 * rows * columns), f32, box, 0, 0, "w")
    return Place("w", f32, (rows, columns), (0, 0), (payload,), 0, rows * columns)


@st.composite
def outputs(draw):
    segments, position = [], 0
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["literal", "copy", "place", "tail"]))
        size = draw(st.integers(1, 300))
        if kind == "literal":
            segment = Literal(bytes(size))
        elif kind == "copy":
            third = size // 3
            segment = Copy(Extent("f", 7, 7 + size), ((7, 7 + third, 1), (7 + third, 7 + size, 2)))
        elif kind == "place":
            segment = _place(draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        else:
            segment = Tail(size, ((0, position),) if position else (), _Zeros(size))
        segments.append(segment)
        position += segment.num_bytes
    return Output.of("out", segments)


@given(outputs(), st.integers(1, 200), st.integers(1, 60))
def test_parts_tile_the_output_and_keep_the_minimum(output, part_bytes, min_bytes):
    """Every byte is in one part, tails are whole, and only the last part may be small."""
    steps = list(
        cut_output(output, index=0, part_bytes=max(part_bytes, min_bytes), min_bytes=min_bytes)
    )
    assert steps[0].start == 0
    assert steps[-1].end == output.num_bytes
    assert all(a.end == b.start for a, b in itertools.pairwise(steps))
    assert [step.number for step in steps] == list(range(len(steps)))
    assert all(step.num_bytes >= min_bytes for step in steps[:-1])
    for step in steps:
        assert sum(segment.num_bytes for segment in step.segments) == step.num_bytes
    whole = [s for s in output.segments if isinstance(s, Tail)]
    assert [t for step in steps for t in step.tails] == whole


@given(outputs(), st.integers(1, 200))
def test_cut_copies_still_cover_their_source_and_its_proofs(output, part_bytes):
    """Cutting loses no source byte, and no byte that must be proved."""
    steps = list(cut_output(output, index=0, part_bytes=part_bytes, min_bytes=1))

    def total(segments):
        copies = [s for s in segments if isinstance(s, Copy)]
        proofs = sum(end - start for copy in copies for start, end, _ in copy.proofs)
        return sum(copy.num_bytes for copy in copies), proofs

    parts = [total(step.segments) for step in steps]
    assert total(output.segments) == (sum(a for a, _ in parts), sum(b for _, b in parts))


def test_part_sizes_hold_s3s_limits_at_two_terabytes():
    """10,000 parts of at least 5 MiB: the part grows with the object (s3cmd#613)."""
    for num_bytes in (1, 600 * 10**9, 2 * 10**12, 40 * 10**12):
        size = choose_part_bytes(num_bytes, bounds=S3, preferred=16 * MIB)
        assert S3.min_bytes <= size <= S3.max_bytes
        assert -(-num_bytes // size) <= S3.max_parts


def test_an_object_beyond_the_store_is_refused():
    """No part size makes 10,000 parts of a petabyte."""
    with pytest.raises(OverBudgetError, match="10000 parts"):
        choose_part_bytes(10**15, bounds=S3, preferred=16 * MIB)
