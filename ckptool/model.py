"""The vocabulary: frozen values that say what a checkpoint holds.

A checkpoint's index lists entries; a tensor entry has chunks, a chunk is a box of the tensor
and the item (a slice of a shard file) that stores it. Chunks are kept in columns, since a
large run has millions of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ckptool.dtypes import DType

__all__ = [
    "Box",
    "Chunk",
    "Chunks",
    "Entry",
    "Extent",
    "Index",
    "Item",
    "TensorEntry",
    "ValueEntry",
]

Ints: TypeAlias = npt.NDArray[np.int64]
Path: TypeAlias = "tuple[str | int, ...]"

_MADE_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Box:
    """Offsets and sizes inside a tensor, one number per dim; no dims for a 0-dim tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def __str__(self) -> str:
        rows = zip(self.offsets, self.ends, strict=True)
        return "[" + ", ".join(f"{start}:{end}" for start, end in rows) + "]"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of one object: start inclusive, end exclusive."""

    key: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Item:
    """The stored bytes of one chunk or value: ``[offset, offset + length)`` of a shard file.

    ``transforms`` names what wraps the bytes, outermost last (``stream.zstd/1``).
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box of a tensor that one rank saved; ``item`` is None where nothing is stored."""

    box: Box
    item: Item | None


class Chunks(Sequence[Chunk]):
    """The chunks of one tensor, in columns; reads as a sequence of Chunk.

    ``offsets`` and ``sizes`` are int64 ``[n, dims]``; ``file`` (int64 ``[n]``) indexes
    ``files``, -1 where no item is stored; ``starts`` and ``lengths`` place the item in its
    file; ``transform`` indexes ``transforms``. ``files`` and ``transforms`` may be shared by
    all tensors of an index.
    """

    __slots__ = (
        "file",
        "files",
        "lengths",
        "offsets",
        "sizes",
        "starts",
        "transform",
        "transforms",
    )

    def __init__(
        self,
        *,
        offsets: Ints,
        sizes: Ints,
        file: Ints,
        starts: Ints,
        lengths: Ints,
        files: Sequence[str],
        transform: Ints | None = None,
        transforms: Sequence[tuple[str, ...]] = ((),),
    ) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self.file = file
        self.starts = starts
        self.lengths = lengths
        self.files = files
        self.transform = transform
        self.transforms = transforms

    @classmethod
    def of(cls, chunks: Iterable[Chunk], *, num_dims: int) -> Chunks:
        """Columns of a few chunks given one by one."""
        rows = list(chunks)
        files: dict[str, int] = {}
        transforms: dict[tuple[str, ...], int] = {(): 0}
        file, starts, lengths, transform = [], [], [], []
        for row in rows:
            item = row.item
            file.append(-1 if item is None else files.setdefault(item.file, len(files)))
            starts.append(0 if item is None else item.offset)
            lengths.append(0 if item is None else item.length)
            wrapped = () if item is None else item.transforms
            transform.append(transforms.setdefault(wrapped, len(transforms)))
        shape = (len(rows), num_dims)
        return cls(
            offsets=np.array([r.box.offsets for r in rows], np.int64).reshape(shape),
            sizes=np.array([r.box.sizes for r in rows], np.int64).reshape(shape),
            file=np.array(file, np.int64),
            starts=np.array(starts, np.int64),
            lengths=np.array(lengths, np.int64),
            files=tuple(files),
            transform=np.array(transform, np.int64) if any(transform) else None,
            transforms=tuple(transforms),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return self.at(np.arange(*index.indices(len(self))))
        box = Box(tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist()))
        return Chunk(box, self.item(index))

    def __iter__(self) -> Iterator[Chunk]:
        starts = range(0, len(self), _MADE_AT_ONCE)
        return itertools.chain.from_iterable(self[i : i + _MADE_AT_ONCE] for i in starts)

    def item(self, index: int) -> Item | None:
        """The item of chunk ``index``, None where nothing is stored."""
        file = int(self.file[index])
        if file < 0:
            return None
        wrapped = () if self.transform is None else self.transforms[int(self.transform[index])]
        return Item(self.files[file], int(self.starts[index]), int(self.lengths[index]), wrapped)

    def at(self, rows: Ints) -> list[Chunk]:
        """Several chunks: made together they cost a third of what each alone does."""
        columns = (self.offsets, self.sizes, self.file, self.starts, self.lengths)
        numbers = zip(*(column[rows].tolist() for column in columns), strict=True)
        wrapped: list[tuple[str, ...]] = [()] * len(rows)
        if self.transform is not None:
            wrapped = [self.transforms[i] for i in self.transform[rows]]
        found = []
        for (offsets, sizes, file, start, length), names in zip(numbers, wrapped, strict=True):
            item = Item(self.files[file], start, length, names) if file >= 0 else None
            found.append(Chunk(Box(tuple(offsets), tuple(sizes)), item))
        return found

    def are_wrapped(self, how: Callable[[tuple[str, ...]], bool] = bool) -> npt.NDArray[np.bool_]:
        """Of which chunks the bytes are wrapped in something, or ``how`` is true of it."""
        if self.transform is None:
            return np.full(len(self), how(()))
        return np.array([how(names) for names in self.transforms], bool)[self.transform]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chunks) or self.offsets.shape != other.offsets.shape:
            return False
        names: dict[object, int] = {}
        mine, theirs = self._comparable(names), other._comparable(names)
        return all(np.array_equal(*pair) for pair in zip(mine, theirs, strict=True))

    def _comparable(self, names: dict[object, int]) -> Iterator[Ints]:
        """Columns that are equal where chunks are; ``names`` numbers files and transforms."""
        yield from (self.offsets, self.sizes)
        stored = np.flatnonzero(self.file >= 0)
        yield stored
        yield from (self.starts[stored], self.lengths[stored])
        files = [names.setdefault(file, len(names)) for file in self.files]
        yield np.array(files, np.int64)[self.file[stored]]
        plain = names.setdefault((), len(names))
        if self.transform is None:
            yield np.full(len(stored), plain)
            return
        wrapped = [names.setdefault(each, len(names)) for each in self.transforms]
        yield np.array(wrapped, np.int64)[self.transform[stored]]

    def __repr__(self) -> str:
        return f"Chunks({list(self)!r})" if len(self) < 9 else f"Chunks(<{len(self)} chunks>)"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the state dict: its logical shape and who stored which box of it.

    ``path`` is where the key came from in the nested state dict (``planner_data``); None
    where the index does not say.
    """

    key: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks
    path: Path | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor, whatever is stored."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """One entry that is no tensor: a number, a string, anything that ``torch.save`` wrote."""

    key: str
    item: Item | None
    path: Path | None = None


Entry: TypeAlias = "TensorEntry | ValueEntry"


@dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint says it holds, whichever file said it.

    ``form`` names the on-disk form ("dcp", "dcp-rank-local", "dcp-safetensors",
    "hf-distributed", "ckpt-index"); ``version`` is the writer's own format version, None
    where it gives none. ``entries`` keeps the order of the index.
    """

    entries: Mapping[str, Entry]
    form: str = "dcp"
    version: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def tensors(self) -> list[TensorEntry]:
        return [e for e in self.entries.values() if isinstance(e, TensorEntry)]

    @property
    def values(self) -> list[ValueEntry]:
        return [e for e in self.entries.values() if isinstance(e, ValueEntry)]
