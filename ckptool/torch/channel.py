"""Messages between a rank and its uploader over a socket: JSON, a blob of bytes, descriptors."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Channel", "Message", "close_in_forks"]

_HEAD = struct.Struct("<IQB")
_MAX_FDS = 4


@dataclass(frozen=True)
class Message:
    """One message; ``fds`` are descriptors that the receiver now owns."""

    facts: Mapping[str, Any]
    blob: bytes = b""
    fds: tuple[int, ...] = ()


class Channel:
    """One end of a stream socket; sending is safe from any thread, receiving from one."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lock = threading.Lock()
        close_in_forks(connection)

    def send(self, facts: Mapping[str, Any], blob: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Raises OSError when the other end is gone."""
        text = json.dumps(facts).encode()
        with self._lock:
            head = _HEAD.pack(len(text), len(blob), len(fds))
            if fds:
                socket.send_fds(self.socket, [head], list(fds))
            else:
                self.socket.sendall(head)
            self.socket.sendall(text)
            if blob:
                self.socket.sendall(blob)

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            head, fds, _, _ = socket.recv_fds(self.socket, _HEAD.size, _MAX_FDS)
            head += self._take(_HEAD.size - len(head)) if head else b""
            if len(head) < _HEAD.size:
                return None
            text_bytes, blob_bytes, _ = _HEAD.unpack(head)
            text, blob = self._take(text_bytes), self._take(blob_bytes)
        except OSError:
            return None
        if len(text) < text_bytes or len(blob) < blob_bytes:
            return None
        return Message(json.loads(text), blob, tuple(fds))

    def close(self) -> None:
        """Give the descriptor back; only when nobody receives any more."""
        self.socket.close()

    def close_both(self) -> None:
        """End the conversation: both ends read their end of file."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _take(self, num_bytes: int) -> bytes:
        parts = []
        while num_bytes:
            data = self.socket.recv(min(num_bytes, 1 << 20))
            if not data:
                break
            parts.append(data)
            num_bytes -= len(data)
        return b"".join(parts)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forks(connection: socket.socket) -> None:
    """Forked children (of a DataLoader, say) must not keep a dead rank's connections open."""
    _sockets.add(connection)


def _after_fork() -> None:
    for connection in list(_sockets):
        try:
            connection.close()
        except OSError:
            pass


os.register_at_fork(after_in_child=_after_fork)
