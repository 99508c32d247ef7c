"""Reads runs of the objects that a ``.metadata`` repeats by the million, one match each.

A chunk, and a storage key with its storage info, are some 20 and 40 opcodes, always the same
but for their numbers and strings. Once the machine has seen the memo slots of their classes and
of their attributes' names, a regular expression made of those very bytes reads one whole; where
it does not match (a frame begins inside, another torch orders attributes otherwise) the opcodes
run one by one, with the same result. What a run would have put in the memo is put there only
when something asks for it.
"""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from ckptool.formats.dcp_objects import (
    CHUNK_CLASS,
    INFO_CLASS,
    KEY_CLASS,
    SIZE_FUNCTION,
    ChunkBox,
    MetadataMachine,
    StorageInfo,
    StorageKey,
)

__all__ = ["FastMetadataMachine"]

_TRANSFORMS = "transform_descriptors"
_NAMES = ("fqn", "index", "offset", "offsets", "sizes", "relative_path", "length", _TRANSFORMS)
_CLASSES = (CHUNK_CLASS, KEY_CLASS, INFO_CLASS, SIZE_FUNCTION)
_MAX_CACHED = 100_000

_INT = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
# the arguments and the call of a torch.Size; the group is its tuple of dims
_CALL = rb"(\)|(?:I\x85|II\x86|III\x87|\(I{4,}t)\x94)\x85\x94R\x94".replace(b"I", _INT)
# a list of one name: a new string, or one that the memo has
_ONE_TRANSFORM = rb"\]\x94(?:(\x8c\x0dstream\.zstd/1\x94)|h(.)|j(.{4}))a"
_BEGIN = rb"\)\x81\x94\}\x94\("


class FastMetadataMachine(MetadataMachine):
    """The same machine, with steps over whole objects.

    ``slots`` knows where the memo has each name and class; ``steps`` has what to try when a
    class is fetched from its slot.
    """

    def __init__(self, data: bytes, *, what: str) -> None:
        super().__init__(data, what=what)
        self.slots: dict[str, int] = {}
        self.steps: dict[int, Callable[[], bool]] = {}
        self.dims: dict[bytes, tuple[int, ...]] = {}
        self.named = _Named(self.memo)
        self.numbers = _Numbers()
        self.skipped = _Skipped()

    def put(self, index: int) -> None:
        if index < self.num_put and index not in self.memo:
            self.replay(index)  # a run may have been there: no slot is written twice
        super().put(index)
        value = self.stack[-1]
        name = value if type(value) is str else getattr(value, "name", None)
        known = value in _NAMES if type(value) is str else any(value is c for c in _CLASSES)
        if known and name not in self.slots:
            self.slots[str(name)] = index
            self.steps |= _steps(self)

    def get(self, index: int) -> None:
        step = self.steps.get(index)
        if step is not None and step():
            return
        if index not in self.memo:
            self.replay(index)
        self.push(self.memo[index])

    def replay(self, index: int) -> None:
        """Run the opcodes of the run that would have filled the memo slot."""
        found = self.skipped.find(index)
        if found is not None:
            replay = _Replay(self.data, what=self.what)
            replay.memo = self.memo
            replay.num_put, replay.position, end, kind = found
            replay.push(self.memo[kind])
            replay.run_to(end)

    def string(self, short: bytes | None, long: bytes | None, end: int) -> tuple[str, int] | None:
        """The string whose length stands before ``end``, and where it and its MEMOIZE end."""
        num_bytes = int.from_bytes(short or long or b"", "little")
        after = end + num_bytes + 1
        if self.data[after - 1 : after] != b"\x94":
            return None
        return self.data[end : after - 1].decode("utf-8", "surrogatepass"), after

    def size(self, raw: bytes) -> tuple[int, ...]:
        """The dims whose opcodes are ``raw``."""
        dims = self.dims.get(raw)
        if dims is None:
            if len(self.dims) >= _MAX_CACHED:
                self.dims.clear()
            dims = self.dims[raw] = _dims(raw)
        return dims


class _Replay(MetadataMachine):
    def put(self, index: int) -> None:
        self.memo[index] = self.top()
        self.num_put += 1


class _Named(dict[bytes, Any]):
    """What the memo has in a slot, by the slot's bytes; slots are never written twice."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def __missing__(self, raw: bytes) -> Any:
        value = self._memo.get(_little(raw))
        if value is not None:
            self[raw] = value
        return value


class _Numbers(dict[bytes, int]):
    """Integers by their opcodes: of positions and lengths there are few, used again and again."""

    def __missing__(self, raw: bytes) -> int:
        if len(self) >= _MAX_CACHED:
            self.clear()
        number = self[raw] = _int(raw)
        return number


class _Skipped:
    """Per run: its first memo slot, where it starts and ends, its first object's class's slot."""

    def __init__(self) -> None:
        self.columns = [array("q") for _ in range(4)]

    def add(self, *numbers: int) -> bool:
        for column, number in zip(self.columns, numbers, strict=True):
            column.append(number)
        return True

    def find(self, index: int) -> tuple[int, int, int, int] | None:
        row = bisect_right(self.columns[0], index) - 1
        if row < 0:
            return None
        first, start, end, kind = (column[row] for column in self.columns)
        return first, start, end, kind


def _steps(machine: FastMetadataMachine) -> dict[int, Callable[[], bool]]:
    """A step for each class of which all slots are known."""
    made: dict[int, Callable[[], bool]] = {}
    for kind, make, names in (
        (CHUNK_CLASS.name, _chunks_step, _CHUNK_NAMES),
        (KEY_CLASS.name, _stored_step, _STORED_NAMES),
    ):
        slots = machine.slots
        if all(name in slots for name in (kind, *names)):
            gets = [_get(slots[name]) for name in (kind, *names)]
            made[slots[kind]] = make(machine, slots[kind], *gets)
    return made


_CHUNK_NAMES = ("offsets", "sizes", SIZE_FUNCTION.name)
_STORED_NAMES = (
    *("fqn", "index", "offset", SIZE_FUNCTION.name),
    *(INFO_CLASS.name, "relative_path", "length"),
)


def _chunks_step(
    machine: FastMetadataMachine, slot: int, kind: bytes, offsets: bytes, sizes: bytes, size: bytes
) -> Callable[[], bool]:
    """Chunks of one tensor: ``[kind] BEGIN offsets Size(...) sizes Size(...) BUILD``."""
    first = (_BEGIN, offsets, size, _CALL, sizes, size, _CALL, b"ub")
    match_first, match_next = _compile(*first).match, _compile(kind, *first).match

    def step() -> bool:
        start, first_slot = machine.position, machine.num_put
        data, push, end, num_put = machine.data, machine.stack.append, start, first_slot
        dims_of = machine.dims.get
        found = match_first(data, start)
        while found is not None:
            raw_offsets, raw_sizes = found.groups()
            box = ChunkBox()
            box.offsets = dims_of(raw_offsets) or machine.size(raw_offsets)
            box.sizes = dims_of(raw_sizes) or machine.size(raw_sizes)
            push(box)
            num_put += 2 + _num_put(raw_offsets) + _num_put(raw_sizes)
            end = found.end()
            found = match_next(data, end)
        machine.position, machine.num_put = end, num_put
        return end > start and machine.skipped.add(first_slot, start, end, slot)

    return step


def _stored_step(
    machine: FastMetadataMachine,
    slot: int,
    kind: bytes,
    fqn: bytes,
    index: bytes,
    offset: bytes,
    size: bytes,
    info_kind: bytes,
    path: bytes,
    length: bytes,
) -> Callable[[], bool]:
    """Keys with their infos: ``[kind] BEGIN fqn <str> index <int> ... BUILD info BEGIN ...``."""
    string = rb"(?:h(.)|j(.{4})|\x8c(.)|X(.{4}))"
    match_first = _compile(_BEGIN, fqn, string).match
    match_next = _compile(kind, _BEGIN, fqn, string).match
    transforms = b""
    if _TRANSFORMS in machine.slots:
        transforms = b"(?:" + _get(machine.slots[_TRANSFORMS]) + _ONE_TRANSFORM + b")?"
    match_rest = _compile(
        *(index, b"(N|", _INT, b")(?:", offset, size, _CALL, b")?ub"),
        *(info_kind, _BEGIN, path, rb"(?:h(.)|j(.{4}))"),
        *(offset, b"(", _INT, b")", length, b"(", _INT, b")", transforms, b"ub"),
    ).match

    def step() -> bool:
        start, first_slot = machine.position, machine.num_put
        data, push, memo = machine.data, machine.stack.append, machine.memo
        end, num_put = start, first_slot
        named, numbers, dims_of = machine.named, machine.numbers, machine.dims.get
        found = match_first(data, start)
        while found is not None:
            short, long, short_length, long_length = found.groups()
            rest_at, text = found.end(), None
            if short or long:
                text = named[short or long]
            elif (new := machine.string(short_length, long_length, rest_at)) is not None:
                text, rest_at = new
            rest = None if text is None else match_rest(data, rest_at)
            if rest is None:
                break
            hint, dims, short_path, long_path, at, length, *words = rest.groups()
            file = named[short_path or long_path]
            wrapped, num_more = _wrapped(named, words) if any(words) else (None, 0)
            if file is None or num_more is None:
                break
            key, info = StorageKey(), StorageInfo()
            key.fqn = text
            key.index = None if hint == b"N" else numbers[hint]
            key.offset = None if dims is None else dims_of(dims) or machine.size(dims)
            info.relative_path = file
            info.offset, info.length = _int(at), numbers[length]
            info.transform_descriptors = wrapped
            push(key)
            push(info)
            if rest_at != found.end():
                memo[num_put + 2] = text
                num_put += 1
            num_put += num_more + (4 if dims is None else 4 + _num_put(dims))
            end = rest.end()
            found = match_next(data, end)
        machine.position, machine.num_put = end, num_put
        return end > start and machine.skipped.add(first_slot, start, end, slot)

    return step


def _wrapped(named: _Named, words: list[Any]) -> tuple[list[Any] | None, int | None]:
    """The transforms that the groups of _ONE_TRANSFORM name, and how many memo slots they take."""
    literal, short, long = words
    if literal:
        return ["stream.zstd/1"], 2
    name = named[short or long]
    return ([name], 1) if name is not None else (None, None)


def _little(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _compile(*parts: bytes) -> re.Pattern[bytes]:
    return re.compile(b"".join(parts), re.DOTALL)


def _get(slot: int) -> bytes:
    """A pattern of the opcode that fetches a memo slot."""
    return re.escape(b"h" + bytes([slot]) if slot < 256 else b"j" + struct.pack("<I", slot))


def _num_put(call: bytes) -> int:
    """Memo slots of a torch.Size: itself, its arguments, and the tuple of dims if not empty."""
    return 2 if call == b")" else 3


def _int(raw: bytes) -> int:
    code = raw[0]
    if code == 0x4B:
        return raw[1]
    if code == 0x8A:
        return int.from_bytes(raw[2:], "little", signed=True)
    return int.from_bytes(raw[1:], "little", signed=code == 0x4A)


def _dims(raw: bytes) -> tuple[int, ...]:
    return tuple(_int(one) for one in _ONE_INT.findall(raw, raw.startswith(b"(")))


_ONE_INT = _compile(_INT)
