"""What an executor hands to a worker: frozen, picklable, without options or secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ckptool.model import Extent
from ckptool.planning.parts import Step
from ckptool.planning.plan import Payload
from ckptool.storage.base import PartReceipt

__all__ = ["CopyTask", "ProveTask", "StreamTask", "Target", "Task", "WriteTask"]


@dataclass(frozen=True, slots=True)
class Target:
    """The assembly that a part belongs to; ``token`` opens it in any process."""

    output: int
    key: str
    token: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Make the bytes of a step and write them.

    ``known`` has, per output payload that begins before the step and that a tail in the step
    needs, the CRC-32 of its bytes up to the step: (payload start, CRC-32). ``written`` is the
    receipt of the part where an earlier run wrote it already, with the server's checksum.
    """

    step: Step
    target: Target
    known: tuple[tuple[int, int], ...] = ()
    written: PartReceipt | None = None


@dataclass(frozen=True, slots=True)
class CopyTask:
    """Let the server copy a step that is one range of a source object.

    ``written`` is the receipt of the part where an earlier run had it copied already.
    """

    step: Step
    target: Target
    trust_server: bool
    written: PartReceipt | None = None


@dataclass(frozen=True, slots=True)
class ProveTask:
    """Read a range of a source for its CRC-32 alone."""

    check: int
    extent: Extent


@dataclass(frozen=True, slots=True)
class StreamTask:
    """Read a wrapped item in order for its CRC-32 alone."""

    payload: Payload


Task: TypeAlias = "WriteTask | CopyTask | ProveTask | StreamTask"
