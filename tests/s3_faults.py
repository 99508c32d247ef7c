"""An HTTP proxy in front of an S3 server that fails as it is told to.

    proxy.fail("PUT", "partNumber=2", times=3)              503 SlowDown, three times
    proxy.fail("GET", answer=cut(0.6))                      the answer breaks off at 60 %

Signatures stay valid, since the Host header passes through. ``proxy.requests`` keeps what came.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["FaultProxy", "Reply", "Request", "cut", "edit", "error", "lost", "reset"]


@dataclass(frozen=True)
class Request:
    """What a client sent; ``path`` with its query, header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False, default=b"")


@dataclass
class Reply:
    """An answer; with ``cut_at`` only so many bytes of the body are sent, then the line drops."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False, default=b"")
    cut_at: int | None = None


Forward = Callable[[Request], Reply]
Answer = Callable[[Request, Forward], "Reply | None"]
"""None: drop the connection without an answer."""


def error(status: int, code: str, message: str = "told to fail") -> Answer:
    """An S3 error document."""
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"

    def answer(request: Request, forward: Forward) -> Reply:
        body = b"" if request.method == "HEAD" else text.encode()
        return Reply(status, {"Content-Type": "application/xml"}, body)

    return answer


def cut(share: float) -> Answer:
    """The server's answer, broken off."""

    def answer(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.cut_at = int(len(reply.body) * share)
        return reply

    return answer


def lost(status: int = 500, code: str = "InternalError") -> Answer:
    """The server does what was asked, but the client is told that it failed."""

    def answer(request: Request, forward: Forward) -> Reply | None:
        forward(request)
        return error(status, code)(request, forward)

    return answer


def reset() -> Answer:
    """The connection is reset."""
    return lambda request, forward: None


def edit(change: Callable[[Reply], None]) -> Answer:
    """The server's answer, changed."""

    def answer(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        change(reply)
        return reply

    return answer


@dataclass
class _Rule:
    method: str
    pattern: re.Pattern[str]
    when: Callable[[Request], bool]
    answer: Answer
    remaining: float


class FaultProxy:
    """Passes everything on to ``upstream_url``, except what a rule answers."""

    def __init__(self, upstream_url: str) -> None:
        self._upstream = urlsplit(upstream_url).netloc
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.requests: list[Request] = []
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(
        self,
        method: str = ".*",
        pattern: str = "",
        *,
        times: float = float("inf"),
        when: Callable[[Request], bool] = lambda request: True,
        answer: Answer | None = None,
    ) -> None:
        """Answer the next ``times`` requests of a method and path (regular expressions)."""
        answer = answer or error(503, "SlowDown", "Please reduce your request rate.")
        rule = _Rule(method, re.compile(pattern), when, answer, times)
        with self._lock:
            self._rules.append(rule)

    def clear(self) -> None:
        """Forget all rules and requests."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def count(self, method: str, pattern: str = "") -> int:
        """How many such requests came."""
        return sum(
            bool(re.fullmatch(method, r.method) and re.search(pattern, r.path))
            for r in self.requests
        )

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reply_to(self, request: Request) -> Reply | None:
        with self._lock:
            self.requests.append(request)
            rule = next((rule for rule in self._rules if _fits(rule, request)), None)
            if rule is not None:
                rule.remaining -= 1
        return self._forward(request) if rule is None else rule.answer(request, self._forward)

    def _forward(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            skipped = ("connection", "expect", "transfer-encoding", "content-length")
            headers = {k: v for k, v in request.headers.items() if k not in skipped}
            headers["content-length"] = str(len(request.body))
            connection.request(request.method, request.path, request.body, headers)
            response = connection.getresponse()
            body = response.read()
            return Reply(response.status, dict(response.getheaders()), body)
        finally:
            connection.close()


def _fits(rule: _Rule, request: Request) -> bool:
    return bool(
        rule.remaining > 0
        and re.fullmatch(rule.method, request.method)
        and rule.pattern.search(request.path)
        and rule.when(request)
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, self.rfile.read(length))
        reply = self.proxy.reply_to(request)
        if reply is None:
            self._drop()
            return
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        given = {name.lower(): value for name, value in reply.headers.items()}
        length_sent = given.get("content-length") if request.method == "HEAD" else None
        self.send_header("Content-Length", length_sent or str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body[: reply.cut_at])
        if reply.cut_at is not None:
            self.wfile.flush()
            self.close_connection = True

    def _drop(self) -> None:
        """Close with a reset instead of an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""
