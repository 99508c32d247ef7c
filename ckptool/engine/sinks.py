"""Where parts go: assemblies that take them in any order, or streams that want them in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import cast

from ckptool.engine import grouped
from ckptool.engine.tasks import Target
from ckptool.errors import StorageError
from ckptool.planning.copies import PartGroup
from ckptool.planning.parts import Step
from ckptool.planning.plan import Copy, Output
from ckptool.storage.base import (
    Assembly,
    CopyingAssembly,
    ObjectInfo,
    PartReceipt,
    Store,
    StreamWriter,
)

__all__ = ["AttachedSink", "InTurn", "Writing"]


class Writing:
    """The outputs of one plan while they are written; nothing is visible before ``commit``.

    Leaving the block without a commit aborts every output, also those that a failing commit
    made visible.
    """

    def __init__(self, dest: Store, outputs: Sequence[Output]) -> None:
        self._dest = dest
        self._outputs = outputs
        self._assemblies: dict[int, Assembly] = {}
        self._streams: dict[int, StreamWriter] = {}
        self._receipts: dict[int, list[PartReceipt]] = {}
        self._published: set[int] = set()
        self._committed: list[str] = []
        self._done = False

    def __enter__(self) -> Writing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._done:
            self.abort()

    @property
    def in_order(self) -> bool:
        """Whether the destination takes an object's bytes only in order."""
        return not self._dest.capabilities.assembly

    def open(self, index: int, *, groups: Sequence[PartGroup] = ()) -> None:
        """Begin output ``index``; called by the coordinator before its first step."""
        output = self._outputs[index]
        if self.in_order:
            self._streams[index] = self._dest.open_stream(output.key)
        else:
            self._assemblies[index] = grouped.begin(
                self._dest, output.key, num_bytes=output.num_bytes, groups=groups
            )
        self._receipts[index] = []

    def attach(self, index: int, token: str) -> Assembly:
        """Take up an output that an earlier run began."""
        output = self._outputs[index]
        assembly = grouped.attach(self._dest, output.key, token, num_bytes=output.num_bytes)
        self._assemblies[index] = assembly
        self._receipts[index] = []
        return assembly

    def detach(self, index: int) -> None:
        """Forget an assembly that is gone."""
        del self._assemblies[index]

    def mark_published(self, index: int) -> None:
        """Note that an earlier run made an output visible; its parts are only counted."""
        self._published.add(index)
        self._receipts[index] = []

    def leave(self) -> None:
        """Keep everything as it is, for a later run to take up."""
        self._done = True

    def target(self, index: int) -> Target:
        """What a task needs to know of output ``index``."""
        output = self._outputs[index]
        token = "" if self.in_order else self._assemblies[index].token
        return Target(index, output.key, token, output.num_bytes)

    def write_part(self, target: Target, step: Step, data: memoryview, crc32: int) -> PartReceipt:
        """Write the bytes of a step; streams must get their steps in order."""
        if self.in_order:
            self._streams[target.output].write(data)
            return PartReceipt(step.number, step.num_bytes)
        assembly = self._assemblies[target.output]
        return assembly.write_part(step.number, step.start, data, crc32=crc32)

    def copy_part(self, target: Target, step: Step, source_url: str) -> PartReceipt:
        """Let the server copy the one range that a step is."""
        return copy_part(self._assemblies[target.output], step, source_url)

    def keep(self, index: int, receipt: PartReceipt) -> None:
        """Note that a part of an output is written."""
        self._receipts[index].append(receipt)

    def commit(self, *, published: Callable[[int], None] | None = None) -> list[ObjectInfo]:
        """Make every output visible, in order; ``published`` hears of each."""
        infos = []
        for index, output in enumerate(self._outputs):
            if index in self._published:
                infos.append(self._dest.info(output.key))
            elif self.in_order:
                infos.append(self._streams[index].commit())
            else:
                receipts = sorted(self._receipts[index], key=lambda receipt: receipt.number)
                infos.append(self._assemblies[index].commit(receipts))
            self._committed.append(output.key)
            if published is not None:
                published(index)
        self._done = True
        return infos

    def abort(self) -> None:
        """Leave nothing behind."""
        for assembly in self._assemblies.values():
            assembly.abort()
        for stream in self._streams.values():
            stream.abort()
        for key in self._committed:
            self._dest.delete(key)
        self._done = True


class InTurn:
    """Steps that are made side by side, written one after the other: for ``Writing.in_order``.

    A step waits for the one before it, so each must have been handed out before the next one.
    """

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._changed = threading.Condition()
        self._next = (0, 0)  # output, number of the step in it
        self._stopped = False

    def write_part(self, target: Target, step: Step, data: memoryview, crc32: int) -> PartReceipt:
        turn = (step.output, step.number)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next == turn)
            if self._stopped:
                raise StorageError(f"{step.key} was given up before byte {step.start}")
        receipt = self._writing.write_part(target, step, data, crc32)
        with self._changed:
            is_last = step.end == target.num_bytes
            self._next = (step.output + 1, 0) if is_last else (step.output, step.number + 1)
            self._changed.notify_all()
        return receipt

    def copy_part(self, target: Target, step: Step, source_url: str) -> PartReceipt:
        return self._writing.copy_part(target, step, source_url)

    def stop(self) -> None:
        """Let nobody wait for a step that will not come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class AttachedSink:
    """The same parts, written by another process that attaches to the assemblies."""

    def __init__(self, dest: Store) -> None:
        self._dest = dest
        self._attached: dict[str, Assembly] = {}
        self._lock = threading.Lock()

    def write_part(self, target: Target, step: Step, data: memoryview, crc32: int) -> PartReceipt:
        return self._assembly(target).write_part(step.number, step.start, data, crc32=crc32)

    def copy_part(self, target: Target, step: Step, source_url: str) -> PartReceipt:
        return copy_part(self._assembly(target), step, source_url)

    def _assembly(self, target: Target) -> Assembly:
        with self._lock:
            if target.token not in self._attached:
                self._attached[target.token] = grouped.attach(
                    self._dest, target.key, target.token, num_bytes=target.num_bytes
                )
            return self._attached[target.token]


def copy_part(assembly: Assembly, step: Step, source_url: str) -> PartReceipt:
    """A part that the store copies itself from a range of another object."""
    (copy,) = step.segments
    assert isinstance(copy, Copy)
    return cast("CopyingAssembly", assembly).copy_part(
        step.number, source_url, start=copy.extent.start, end=copy.extent.end
    )
