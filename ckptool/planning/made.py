"""Sequences that cost little to keep: their elements are made as they are asked for.

A large checkpoint has millions of chunks, and a plan of as many objects would not fit beside
the bytes that it moves.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["ByteRanges", "InBlocks", "Lazy", "Made", "Recent"]

T = TypeVar("T")
_KEPT = 2


class Lazy(Sequence[T], ABC):
    """A sequence whose elements are made from their position, by ``_element``."""

    @abstractmethod
    def _element(self, index: int) -> T:
        """The element at ``index``, which counts from the start and is inside."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._element(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._element(index % len(self))

    def __iter__(self) -> Iterator[T]:
        return map(self._element, range(len(self)))


class Made(Lazy[T]):
    """``length`` elements, each made by ``make`` from its position whenever it is asked for.

    ``walk`` gives all of them in order, where that costs less than one after another.
    """

    def __init__(
        self,
        length: int,
        make: Callable[[int], T],
        *,
        walk: Callable[[], Iterable[T]] | None = None,
    ) -> None:
        self._length, self._make, self._walk = length, make, walk

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return super().__iter__() if self._walk is None else iter(self._walk())

    def _element(self, index: int) -> T:
        return self._make(index)


class InBlocks(Lazy[T]):
    """Elements made a block at a time, and not kept: ``make`` may remember (``Recent``).

    ``counts`` says how many elements each block has; ``make`` gives block i, each time the same.
    """

    def __init__(self, counts: Iterable[int], make: Callable[[int], Sequence[T]]) -> None:
        self._starts = array("q", itertools.accumulate(counts, initial=0))
        self._make = make

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(map(self._make, range(len(self._starts) - 1)))

    def _element(self, index: int) -> T:
        number = bisect.bisect_right(self._starts, index) - 1
        return self._make(number)[index - self._starts[number]]


class Recent(Generic[T]):
    """A function of numbers that remembers what it made last, for all who share it."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._kept: OrderedDict[tuple[int, ...], T] = OrderedDict()

    def __call__(self, *numbers: int) -> T:
        try:
            made = self._kept.pop(numbers)
        except KeyError:
            made = self._make(*numbers)
        self._kept[numbers] = made
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return made


class ByteRanges(Sequence[tuple[int, int]]):
    """Ranges (start inclusive, end exclusive) in columns: sorted, none empty, none twice."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts, self._ends = array("q"), array("q")
        is_sorted, last = True, (-1, -1)
        for start, end in ranges:
            if start < end:
                is_sorted, last = is_sorted and last < (start, end), (start, end)
                self._starts.append(start)
                self._ends.append(end)
        if not is_sorted:
            rows = sorted(set(self))
            self._starts = array("q", (start for start, _ in rows))
            self._ends = array("q", (end for _, end in rows))

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, int]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, int] | Sequence[tuple[int, int]]:
        if isinstance(index, slice):
            return list(zip(self._starts[index], self._ends[index], strict=True))
        return self._starts[index], self._ends[index]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)
