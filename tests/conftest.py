"""Fixtures that all tests share: an S3 server of the session's own, and fresh places in it."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from s3_faults import FaultProxy
from s3_server import S3Server

# a shell that starts the tests in the background ignores Ctrl-C for them and their children
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server; each pytest-xdist worker starts its own."""
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_bucket(s3_server: S3Server) -> str:
    """A bucket of this session."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    return s3_server.create_bucket(f"test-{worker}-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def s3_options(s3_server: S3Server) -> dict[str, Any]:
    """Storage options for the server."""
    return s3_server.storage_options()


@pytest.fixture
def s3_url(s3_bucket: str) -> str:
    """A prefix that no other test uses."""
    return f"s3://{s3_bucket}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy in front of the server that fails as the test tells it to."""
    with FaultProxy(s3_server.endpoint_url) as proxy:
        yield proxy
