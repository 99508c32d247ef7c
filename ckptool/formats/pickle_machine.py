"""A pickle machine that builds nothing by itself: opcodes in, whatever its owner allows out.

Python's own unpickler, restricted or not, crashes the process on a small hostile file: it
hashes tuples nested a million deep, and it makes room for any memo slot a pickle names. This
machine runs the binary opcodes (PEP 307, PEP 3154, PEP 574) in bounded steps: every step costs
no more than the bytes behind it, memo slots are a dict, and keys are looked at before they are
hashed. Globals, calls, instances, states and persistent ids are the owner's, who subclasses it;
nothing that a pickle names is ever imported.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ckptool.errors import CkptoolError, DamagedError, UnsupportedError

__all__ = ["Machine", "check_key", "kind_of"]

_MAX_KEY_NODES = 1000

_PYTHON_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)


def check_key(value: Any) -> Any:
    """The value, if hashing it is safe: Python's hash of a tuple walks it without a bound."""
    if type(value) is not tuple:
        return value
    todo: list[Any] = [value]
    num_nodes = 0
    while todo:
        node = todo.pop()
        num_nodes += 1
        if num_nodes > _MAX_KEY_NODES:
            raise DamagedError("a pickle has a key of more than a thousand parts")
        if type(node) is tuple:
            todo.extend(node)
    return value


def kind_of(value: Any) -> str:
    """What to call a value in a message; never its repr, which may have no end."""
    return str(getattr(value, "name", type(value).__name__))[:200]


class Machine:
    """The stack, the memo, and one method for each opcode that does more than push.

    ``what`` names the pickle in messages. The five methods that follow ``run`` are the
    owner's; each gets values that it must not trust.
    """

    def __init__(self, data: bytes, *, what: str) -> None:
        self.data = data
        self.what = what
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.num_put = 0

    def run(self) -> Any:
        """The value on top when the pickle stops.

        Raises DamagedError for bytes that are no such pickle, UnsupportedError for an opcode
        or protocol that we do not know, and whatever the owner's methods raise.
        """
        try:
            self.run_to(len(self.data))
            if len(self.stack) != 1 or self.marks:
                raise self.damaged("it stops with a stack that is not one value")
            return self.stack[0]
        except CkptoolError:
            raise
        except _PYTHON_ERRORS as error:
            raise self.damaged(f"{type(error).__name__}: {error}"[:200]) from error

    def find(self, module: str, name: str) -> Any:
        raise self.damaged(f"it names {module}.{name}"[:200])

    def call(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        raise self.damaged(f"it calls {kind_of(target)}")

    def instance(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        raise self.damaged(f"it makes an instance of {kind_of(target)}")

    def set_state(self, target: Any, state: Any) -> None:
        raise self.damaged(f"it sets the state of {kind_of(target)}")

    def persistent(self, pid: Any) -> Any:
        raise self.damaged("it has a persistent id")

    def damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{self.what} is damaged at byte {self.position}: {why}")

    def run_to(self, end: int) -> None:
        """Run until STOP or until ``end``, which must be a boundary of opcodes."""
        data, opcodes = self.data, _OPCODES
        while self.position < end:
            code = data[self.position]
            self.position += 1
            if code == 0x2E:
                return
            try:
                opcode = opcodes[code]
            except KeyError:
                raise UnsupportedError(
                    f"{self.what} has the pickle opcode {code:#04x} at byte "
                    f"{self.position - 1}, which torch does not write"
                ) from None
            opcode(self)
        if end == len(data):
            raise self.damaged("it ends before the pickle does")

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self.damaged(f"it ends {end - len(self.data)} bytes too early")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self, num_bytes: int) -> str:
        return self.take(num_bytes).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise self.damaged("it ends inside a name")
        taken = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return taken

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise self.damaged("an opcode finds nothing on the stack")
        return self.stack[-1]

    def pop(self) -> Any:
        value = self.top()
        self.stack.pop()
        return value

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise self.damaged("an opcode lacks its mark")
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def make_tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def put(self, index: int) -> None:
        """Python's picklers number the memo from 0 and never write a slot twice."""
        if index in self.memo:
            raise self.damaged(f"it writes memo slot {index} twice")
        self.memo[index] = self.top()
        self.num_put += 1

    def get(self, index: int) -> None:
        self.push(self.memo[index])

    def append_all(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise self.damaged(f"it appends to {kind_of(target)}")
        target.extend(items)

    def set_all(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise self.damaged(f"it sets items of {kind_of(target)}")
        for i in range(0, len(items), 2):
            target[check_key(items[i])] = items[i + 1]

    def add_all(self, items: list[Any]) -> None:
        target = self.top()
        if type(target) is not set:
            raise self.damaged(f"it adds to {kind_of(target)}")
        target.update(check_key(item) for item in items)

    def freeze(self) -> None:
        self.push(frozenset(check_key(item) for item in self.pop_to_mark()))

    def set_one(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_all([key, value])

    def find_line(self) -> None:
        module = self.line()
        self.push(self.find(module, self.line()))

    def find_stacked(self) -> None:
        name, module = self.pop(), self.pop()
        if type(module) is not str or type(name) is not str:
            raise self.damaged("a global has no name")
        self.push(self.find(module, name))

    def reduce(self) -> None:
        arguments, target = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise self.damaged("a call has no arguments")
        self.push(self.call(target, arguments))

    def make_instance(self) -> None:
        arguments, target = self.pop(), self.pop()
        if type(arguments) is not tuple:
            raise self.damaged("an instance has no arguments")
        self.push(self.instance(target, arguments))

    def build(self) -> None:
        state = self.pop()
        self.set_state(self.top(), state)

    def long_int(self, size_bytes: int) -> None:
        size = self.number(size_bytes)
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def protocol(self) -> None:
        version = self.number(1)
        if version > 5:
            raise UnsupportedError(
                f"{self.what} is pickled with protocol {version}; we know up to 5"
            )


# https://docs.python.org/3/library/pickletools.html names and explains each
_OPCODES: dict[int, Callable[[Machine], object]] = {
    0x80: Machine.protocol,
    0x95: lambda m: m.number(8),  # FRAME: its length says nothing that we need
    ord("("): Machine.mark,
    ord("0"): Machine.pop,
    ord("1"): Machine.pop_to_mark,
    ord("2"): lambda m: m.push(m.top()),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    0x8A: lambda m: m.long_int(1),
    0x8B: lambda m: m.long_int(4),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): lambda m: m.push(m.text(m.number(4))),
    0x8C: lambda m: m.push(m.text(m.number(1))),
    0x8D: lambda m: m.push(m.text(m.number(8))),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    0x8E: lambda m: m.push(m.take(m.number(8))),
    0x96: lambda m: m.push(bytearray(m.take(m.number(8)))),
    ord(")"): lambda m: m.push(()),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: lambda m: m.make_tuple(1),
    0x86: lambda m: m.make_tuple(2),
    0x87: lambda m: m.make_tuple(3),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append_all([m.pop()]),
    ord("e"): lambda m: m.append_all(m.pop_to_mark()),
    ord("}"): lambda m: m.push({}),
    ord("s"): Machine.set_one,
    ord("u"): lambda m: m.set_all(m.pop_to_mark()),
    0x8F: lambda m: m.push(set()),
    0x90: lambda m: m.add_all(m.pop_to_mark()),
    0x91: Machine.freeze,
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(m.num_put),
    ord("h"): lambda m: m.get(m.number(1)),
    ord("j"): lambda m: m.get(m.number(4)),
    ord("c"): Machine.find_line,
    0x93: Machine.find_stacked,
    ord("R"): Machine.reduce,
    0x81: Machine.make_instance,
    ord("b"): Machine.build,
    ord("Q"): lambda m: m.push(m.persistent(m.pop())),
}
