"""Where parts go: assemblies that take them in any order, or streams that want them in order."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ckptool.planning.parts import Step
from ckptool.planning.plan import Output
from ckptool.storage.base import Assembly, ObjectInfo, PartReceipt, Store, StreamWriter

__all__ = ["Writing"]


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

    def open(self, index: int) -> None:
        """Begin output ``index``; called by the coordinator before its first step."""
        output = self._outputs[index]
        if self.in_order:
            self._streams[index] = self._dest.open_stream(output.key)
        else:
            self._assemblies[index] = self._dest.open_assembly(
                output.key, num_bytes=output.num_bytes
            )
        self._receipts[index] = []

    def write_part(self, step: Step, data: memoryview, crc32: int) -> PartReceipt:
        """Write the bytes of a step; streams must get their steps in order."""
        if self.in_order:
            self._streams[step.output].write(data)
            return PartReceipt(step.number, step.num_bytes)
        return self._assemblies[step.output].write_part(step.number, step.start, data, crc32=crc32)

    def keep(self, index: int, receipt: PartReceipt) -> None:
        """Note that a part of an output is written."""
        self._receipts[index].append(receipt)

    def commit(self) -> list[ObjectInfo]:
        """Make every output visible, in order."""
        infos = []
        for index, output in enumerate(self._outputs):
            if self.in_order:
                infos.append(self._streams[index].commit())
            else:
                receipts = sorted(self._receipts[index], key=lambda receipt: receipt.number)
                infos.append(self._assemblies[index].commit(receipts))
            self._committed.append(output.key)
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
