"""The forwarder that counts: it changes nothing, and misses nothing."""

from __future__ import annotations

import itertools
import urllib.request
from typing import Any

import pytest
from bench_wire import RequestCounter, WireMeter
from hypothesis import given
from hypothesis import strategies as st
from s3_server import S3Server

from ckptool.storage import open_store

HEAD = b"PUT /b/k HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
REQUESTS = (
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    + HEAD
    + b"GET /"
    + b"PUT /b/k2 HTTP/1.1\r\nX-Amz-Copy-Source: /b/k\r\ncontent-length: 0\r\n\r\n"
    + b"HEAD /b HTTP/1.1\r\n\r\n"
)


@given(st.lists(st.integers(1, len(REQUESTS) - 1)))
def test_requests_are_counted_however_they_are_cut(cuts: list[int]) -> None:
    """A body that looks like a request is none; a copy by the server is told apart."""
    counter = RequestCounter()
    edges = [0, *sorted(set(cuts)), len(REQUESTS)]
    seen = []
    for start, end in itertools.pairwise(edges):
        seen += counter.feed(memoryview(REQUESTS[start:end]))
    assert seen == ["GET", "PUT", "COPY", "HEAD"]


def test_a_body_of_unknown_length_is_refused() -> None:
    """Better no count than a wrong one."""
    head = b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(ValueError, match="chunked"):
        RequestCounter().feed(memoryview(head))


def test_a_client_works_through_it(
    s3_server: S3Server, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """Signatures hold, and every payload byte is in the sums, once each way."""
    data = bytes(range(256)) * 4096
    with WireMeter(s3_server.endpoint_url) as wire:
        store = open_store(s3_url, options={**s3_options, "endpoint_url": wire.endpoint_url})
        store.put("k", data)
        assert store.read("k", start=10, end=len(data)) == data[10:]
    slack = 20_000
    assert len(data) <= wire.sent_bytes < len(data) + slack
    assert len(data) - 10 <= wire.fetched_bytes < len(data) + slack
    assert wire.requests["PUT"] == 1
    assert wire.requests["GET"] == 1


def test_it_is_gone_at_the_end(s3_server: S3Server) -> None:
    """Nothing listens any more, and no thread waits for a client that stayed connected."""
    with WireMeter(s3_server.endpoint_url) as wire:
        url = wire.endpoint_url
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=2)
