"""Cutting for a store that copies: the limits hold at any size, and nearly all is copied."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.dtypes import dtype_named
from ckptool.model import Box, Extent, Item
from ckptool.planning.copies import (
    PartGroup,
    copy_shares,
    cut_for_copies,
    part_groups,
    summarise,
)
from ckptool.planning.parts import Bounds, Step
from ckptool.planning.plan import Copy, Literal, Output, Payload, Place, Tail

MIB = 1 << 20
S3 = Bounds(min_bytes=5 * MIB, max_bytes=5 << 30, max_parts=10_000)
PREFERRED = 16 * MIB


class Zeros:
    """Encodes a tail of zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __call__(self, crcs: tuple[int, ...]) -> bytes:
        return bytes(self.num_bytes)


def proved(start: int, num_bytes: int, *, file: str = "f", check: int = 0) -> Copy:
    """A range of a source that is one payload, or part of one."""
    extent = Extent(file, start, start + num_bytes)
    return Copy(extent, ((extent.start, extent.end, check),))


def placed(num_elements: int) -> Place:
    f32 = dtype_named("float32")
    payload = Payload(Item("f", 0, 4 * num_elements), f32, Box((0,), (num_elements,)), 0, 0, "w")
    return Place("w", f32, (num_elements,), (0,), (payload,), 0, num_elements)


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    """Anything between ranges that can be copied and ranges that cannot."""
    segments: list[Literal | Copy | Place | Tail] = []
    position = 0
    for _ in range(draw(st.integers(0, 12))):
        size = draw(st.integers(1, 120))
        kind = draw(st.sampled_from(["literal", "copy", "copy", "items", "bare", "place", "tail"]))
        if kind == "literal":
            segments.append(Literal(bytes(size)))
        elif kind == "copy":
            segments.append(proved(7, size))
        elif kind == "items":  # framing between two payloads
            segments.append(Copy(Extent("f", 0, size), ((0, size // 3, 1), (size // 2, size, 2))))
        elif kind == "bare":
            segments.append(Copy(Extent("f", 0, size)))
        elif kind == "place":
            segments.append(placed(size))
        else:
            needs = ((0, position),) if position else ()
            segments.append(Tail(size, needs, Zeros(size)))
        position += segments[-1].num_bytes
    return Output.of("out", segments)


def cut(output: Output, bounds: Bounds, part_bytes: int) -> list[tuple[Step, bool]]:
    return list(cut_for_copies(output, index=0, bounds=bounds, part_bytes=part_bytes))


SMALL = st.builds(
    Bounds,
    min_bytes=st.integers(1, 20),
    max_bytes=st.integers(45, 200),
    max_parts=st.integers(1, 9),
)


@given(outputs(), SMALL, st.integers(1, 60))
def test_parts_tile_the_output_and_keep_the_minimum(output, bounds, part_bytes):
    """Every byte is in one part, and only the last part may be below the store's minimum."""
    steps = [step for step, _ in cut(output, bounds, part_bytes)]
    assert (steps[0].start, steps[-1].end) == (0, output.num_bytes)
    assert all(a.end == b.start for a, b in itertools.pairwise(steps))
    assert [step.number for step in steps] == list(range(len(steps)))
    assert all(step.num_bytes >= bounds.min_bytes for step in steps[:-1])
    for step in steps:
        assert sum(segment.num_bytes for segment in step.segments) == step.num_bytes


@given(outputs(), SMALL, st.integers(1, 60))
def test_what_is_copied_is_one_proved_range(output, bounds, part_bytes):
    """A copied part is one range of one object, all of it under one check, within the limits."""
    for step, is_copied in cut(output, bounds, part_bytes):
        if not is_copied:
            continue
        (copy,) = step.segments
        assert isinstance(copy, Copy)
        ((start, end, _),) = copy.proofs
        assert (start, end) == (copy.extent.start, copy.extent.end)
        assert 0 < step.num_bytes <= bounds.max_bytes
        assert step.num_bytes >= bounds.min_bytes or step.end == output.num_bytes


@given(outputs(), SMALL, st.integers(1, 60))
def test_groups_tile_the_parts(output, bounds, part_bytes):
    """Where there are too many parts, groups hold all of them, and none holds too many."""
    steps = [step for step, _ in cut(output, bounds, part_bytes)]
    groups = part_groups(output, bounds=bounds, part_bytes=part_bytes)
    if len(steps) <= bounds.max_parts:
        assert groups == ()
        return
    assert_groups(groups, steps, bounds)


def assert_groups(groups: tuple[PartGroup, ...], steps: list[Step], bounds: Bounds) -> None:
    firsts = [*(group.first for group in groups), len(steps)]
    assert firsts[0] == 0
    assert all(0 < b - a <= bounds.max_parts for a, b in itertools.pairwise(firsts))
    edges = [(group.start, group.end) for group in groups]
    ends = [*(steps[first].start for first in firsts[:-1]), steps[-1].end]
    assert edges == list(itertools.pairwise(ends))


@given(st.integers(1, 5000), st.integers(10, 100), st.integers(2, 50))
def test_shares_tile_their_range(num_bytes, min_bytes, factor):
    """A range is copied in shares that hold both limits, whatever its size."""
    bounds = Bounds(min_bytes, factor * min_bytes, 10_000)
    shares = list(copy_shares(num_bytes, total=num_bytes, bounds=bounds))
    assert (shares[0][0], shares[-1][1]) == (0, num_bytes)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
    assert all(b - a <= bounds.max_bytes for a, b in shares)
    assert all(b - a >= min_bytes for a, b in shares) or len(shares) == 1


# what it saves


def share(output: Output, bounds: Bounds = S3) -> float:
    """Bytes that go through us, of all bytes."""
    summary = summarise(cut(output, bounds, PREFERRED))
    assert summary.num_bytes_copied + summary.num_bytes_sent == output.num_bytes
    return summary.num_bytes_sent / output.num_bytes


def test_an_export_is_copied():
    """Chunks of 16 MiB one after another: all but the header's part, 5 MiB a file."""
    chunks = [proved(k * 17 * MIB, 16 * MIB) for k in range(64)]
    output = Output.of("m.safetensors", [Literal(bytes(40_000)), *chunks])
    assert share(output) == 5 * MIB / output.num_bytes


def test_whole_runs_are_copied():
    """What is concatenated from whole files is copied whole, in few large parts."""
    files = [proved(0, 700 * MIB, file=f"__{k}_0.distcp") for k in range(4)]
    steps = cut(Output.of("__0_0.distcp", files), S3, PREFERRED)
    assert [(step.num_bytes // MIB, copied) for step, copied in steps] == [(350, True)] * 8


def test_a_cut_chunk_costs_one_small_part():
    """Halves of 64 MiB, each with new framing: about 5 MiB of 32 are sent."""
    segments: list[Literal | Copy | Tail] = []
    position = 0
    for k in range(16):
        begin = position + 704
        payload = (begin, begin + 32 * MIB)
        segments += [
            Literal(bytes(704)),
            proved(k << 30, 32 * MIB),
            Tail(800, (payload,), Zeros(800)),
        ]
        position = payload[1] + 800
    assert 0.15 < share(Output.of("__0_0.distcp", segments)) < 0.16


def test_small_ranges_are_sent_together():
    """Ranges below the minimum are gathered into parts of about the size that was asked for."""
    output = Output.of("x", [proved(k * 4 * MIB, 3 * MIB) for k in range(100)])
    steps = cut(output, S3, PREFERRED)
    assert not any(copied for _, copied in steps)
    assert len(steps) == -(-300 // 16)


# two terabytes

TWO_TB = 2 * 10**12


@pytest.fixture(scope="module", params=["export", "items"])
def huge(request) -> Output:
    """An output of 2 TB from chunks of 16 MiB: 119,210 ranges."""
    segments: list[Literal | Copy | Tail] = [Literal(bytes(20 * MIB))]
    position = segments[0].num_bytes
    for k in range(-(-TWO_TB // (16 * MIB))):
        file = f"__{k % 64}_0.distcp"
        if request.param == "items":
            segments.append(Literal(bytes(704)))
        segments.append(proved(k * 17 * MIB, 16 * MIB, file=file, check=k))
        position += sum(s.num_bytes for s in segments[-2:])
        if request.param == "items":
            payload = (position - 16 * MIB, position)
            segments.append(Tail(800, (payload,), Zeros(800)))
    return Output.of("out", segments)


def test_two_terabytes_hold_every_limit(huge):
    """10,000 parts, 5 MiB and 5 GiB in every intermediate object and in the object itself."""
    assert huge.num_bytes >= TWO_TB
    steps = cut(huge, S3, PREFERRED)
    assert len(steps) > S3.max_parts
    groups = part_groups(huge, bounds=S3, part_bytes=PREFERRED)
    assert_groups(groups, [step for step, _ in steps], S3)
    for group in groups:
        first, end = group.first, group.first + S3.max_parts
        mine = [s for s, _ in steps[first:end] if s.start < group.end]
        sizes = [s.num_bytes for s in mine]
        assert all(S3.min_bytes <= size <= S3.max_bytes for size in sizes[:-1])
        assert sizes[-1] <= S3.max_bytes
    shares = [
        share
        for group in groups
        for share in copy_shares(group.num_bytes, total=huge.num_bytes, bounds=S3)
    ]
    assert len(shares) <= S3.max_parts
    assert all(S3.min_bytes <= b - a <= S3.max_bytes for a, b in shares)
    summary = summarise(steps, num_groups=len(groups))
    assert summary.num_intermediates == len(groups) >= 12
    assert summary.num_bytes_copied > 0.68 * huge.num_bytes


def test_fifty_gigabytes_need_no_count():
    """An object that cannot have too many parts is not cut to find that out."""
    output = Output.of("x", [proved(0, 50_000 * MIB)])
    assert part_groups(output, bounds=S3, part_bytes=PREFERRED) == ()
