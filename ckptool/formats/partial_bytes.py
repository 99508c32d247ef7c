"""Bytes of which only the start and the end were read so far, and the wish for more of them."""

from __future__ import annotations

from ckptool.errors import DamagedError

__all__ = ["NeedMore", "PartialBytes"]

# framing is never larger; whoever asks for more sends us to read a payload in vain
_MAX_PROBE_NUM_BYTES = 16 << 20


class NeedMore(Exception):
    """The bytes at hand do not suffice: read this much of the start and of the end."""

    def __init__(self, head_num_bytes: int, tail_num_bytes: int) -> None:
        super().__init__(head_num_bytes, tail_num_bytes)
        self.head_num_bytes = head_num_bytes
        self.tail_num_bytes = tail_num_bytes


class PartialBytes:
    """``length`` bytes of which the start and the end are at hand."""

    __slots__ = ("_head", "_tail", "_tail_start", "length")

    def __init__(self, *, length: int, head: bytes, tail: bytes = b"") -> None:
        head, tail = bytes(head[:length]), bytes(tail[max(0, len(tail) - length) :])
        tail_start = length - len(tail)
        if tail_start <= len(head) < length:
            head += tail[len(head) - tail_start :]
        self.length, self._head, self._tail, self._tail_start = length, head, tail, tail_start

    def take(self, start: int, num_bytes: int, what: str) -> bytes:
        """Bytes ``[start, start + num_bytes)``; NeedMore if they are not at hand."""
        end = start + num_bytes
        if start < 0 or num_bytes < 0 or end > self.length:
            raise DamagedError(
                f"{what} ({num_bytes} bytes at byte {start}) reaches outside the "
                f"{self.length} bytes that there are",
                offset=start,
            )
        if end <= len(self._head):
            return self._head[start:end]
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        from_head, from_tail = end, self.length - start
        if min(from_head, from_tail) > _MAX_PROBE_NUM_BYTES:
            raise DamagedError(
                f"{what} at byte {start} is far from both ends of {self.length} bytes",
                offset=start,
            )
        if from_head <= from_tail:
            raise NeedMore(from_head, len(self._tail))
        raise NeedMore(len(self._head), from_tail)
