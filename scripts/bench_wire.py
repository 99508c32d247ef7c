"""A forwarder in front of an S3 server that counts what passes: requests, and bytes each way.

Whatever client library speaks through it, everything counts: headers, probes, retries.
Signatures stay valid, since nothing is changed.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

__all__ = ["RequestCounter", "WireMeter"]

_BUFFER_BYTES = 256 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_COPY = re.compile(rb"\r\nx-amz-copy-source:", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


class WireMeter:
    """Forwards connections to ``endpoint_url`` while it is open."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(endpoint_url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.fetched_bytes = 0
        self.sent_bytes = 0
        self.requests: Counter[str] = Counter()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> WireMeter:
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        for each in self._open:
            each.close()

    def _start(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [client, server]
            self._start(self._forward, client, server, RequestCounter())
            self._start(self._forward, server, client, None)

    def _forward(
        self, source: socket.socket, target: socket.socket, requests: RequestCounter | None
    ) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        view = memoryview(buffer)
        with contextlib.suppress(OSError):
            while size := source.recv_into(buffer):
                target.sendall(view[:size])
                seen = requests.feed(view[:size]) if requests else ()
                with self._lock:
                    self.requests.update(seen)
                    if requests:
                        self.sent_bytes += size
                    else:
                        self.fetched_bytes += size
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class RequestCounter:
    """The client's side of one HTTP/1.1 connection -> the methods of its requests.

    A PUT whose body the server copies from elsewhere counts as ``COPY``.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._body_left = 0

    def feed(self, data: memoryview) -> list[str]:
        """The requests whose headers end in ``data``; raises ValueError for a chunked body."""
        methods = []
        while len(data):
            if self._body_left:
                step = min(self._body_left, len(data))
                self._body_left -= step
                data = data[step:]
                continue
            before = len(self._head)
            self._head += data
            end = self._head.find(b"\r\n\r\n", max(0, before - 3))
            if end < 0:
                break
            methods.append(self._begin(bytes(self._head[: end + 2])))
            data = data[end + 4 - before :]
            self._head.clear()
        return methods

    def _begin(self, head: bytes) -> str:
        if _CHUNKED.search(head):
            raise ValueError("a request with a chunked body cannot be counted")
        length = _LENGTH.search(head)
        self._body_left = int(length[1]) if length else 0
        method = head.split(b" ", 1)[0].decode()
        return "COPY" if method == "PUT" and _COPY.search(head) else method
