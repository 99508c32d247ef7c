"""Sequences whose elements are made when asked for: the same ones, and few at a time."""

from __future__ import annotations

import itertools
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.planning.made import ByteRanges, InBlocks, Made, Recent
from ckptool.planning.plan import Literal, Output, Segment, Tail


def no_tail(crcs: tuple[int, ...]) -> bytes:
    raise AssertionError("nobody writes here")


@given(st.lists(st.lists(st.integers(), max_size=4), max_size=6), st.data())
def test_blocks_read_as_one_sequence(blocks: list[list[int]], data: st.DataObject) -> None:
    """Whatever the blocks, empty ones too: positions, slices, length and order are those of all."""
    whole = list(itertools.chain.from_iterable(blocks))
    found = InBlocks(map(len, blocks), blocks.__getitem__)
    assert (list(found), len(found)) == (whole, len(whole))
    for i in range(-len(whole), len(whole)):
        assert found[i] == whole[i]
    start, end = data.draw(st.integers(-9, 30)), data.draw(st.integers(-9, 30))
    assert found[start:end] == whole[start:end]
    for outside in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            found[outside]


def test_a_walk_makes_each_block_once() -> None:
    """Looking at one element after another, and back at the one before, makes nothing twice."""
    made = []

    def make(number: int) -> list[int]:
        made.append(number)
        return [10 * number, 10 * number + 1]

    found = InBlocks([2] * 5, Recent(make))
    for i in range(len(found)):
        assert found[i] == 10 * (i // 2) + i % 2
        assert found[max(0, i - 1)] >= 0
    assert made == [0, 1, 2, 3, 4]


def test_little_is_remembered() -> None:
    """Whoever shares what was made last, no more than two of all results are kept."""
    kept: weakref.WeakSet[frozenset[str]] = weakref.WeakSet()

    def make(of: int, number: int) -> frozenset[str]:
        made = frozenset([f"{of}/{number}"])
        kept.add(made)
        return made

    recent = Recent(make)
    for of in range(5):
        for number in range(5):
            recent(of, number)
    assert sorted(name for made in kept for name in made) == ["4/3", "4/4"]


def test_made_elements() -> None:
    """Positions from both ends, slices, and no element outside."""
    squares = Made(4, lambda i: i * i)
    assert list(squares) == [0, 1, 4, 9]
    assert (squares[-1], squares[1:3], len(squares)) == (9, [1, 4], 4)
    for outside in (4, -5):
        with pytest.raises(IndexError):
            squares[outside]
    walked = Made(2, squares.__getitem__, walk=lambda: ["both", "at once"])
    assert (list(walked), walked[1]) == (["both", "at once"], 1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_byte_ranges(ranges: list[tuple[int, int]]) -> None:
    """Sorted, once each, and none that is empty."""
    found = ByteRanges(ranges)
    wanted = sorted({r for r in ranges if r[0] < r[1]})
    assert (list(found), len(found)) == (wanted, len(wanted))
    assert [found[i] for i in range(len(found))] == found[:] == wanted


segments = st.one_of(
    st.binary(max_size=5).map(Literal),
    st.builds(
        Tail,
        st.integers(0, 5),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
        st.just(no_tail),
    ),
)


@given(st.lists(st.lists(segments, max_size=4), max_size=5))
def test_an_output_in_blocks_is_the_output(blocks: list[list[Segment]]) -> None:
    """Made anew a block at a time, an output has the segments, edges and payloads of a kept one.

    Each block is asked for by its number and the byte where it begins.
    """
    sizes = [sum(segment.num_bytes for segment in block) for block in blocks]
    begins = [0, *itertools.accumulate(sizes)]

    def again(number: int, start: int) -> list[Segment]:
        assert start == begins[number]
        return blocks[number]

    kept = Output.of("k", list(itertools.chain.from_iterable(blocks)))
    made = Output.in_blocks("k", iter(blocks), again=again)
    assert tuple(made.segments) == kept.segments
    assert [made.segments[i] for i in range(len(made.segments))] == list(kept.segments)
    assert list(made.starts) == list(kept.starts)
    assert list(made.payloads) == list(kept.payloads)
    assert made.num_bytes == sum(sizes)
