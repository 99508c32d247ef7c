"""Calls of the S3 API: one s3fs client per process, tuned, retried and translated.

s3fs brings the client (any endpoint, profile, credentials and option that it takes); the
calls go straight to its client methods, so that one patience governs each request.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import fsspec.asyn
import s3fs

from ckptool.errors import AccessError, CkptoolError
from ckptool.storage.errors import error_code, translate
from ckptool.storage.retry import DEADLINE_S, Patience, retry_async

__all__ = ["S3Client"]

T = TypeVar("T")

_POOL_CONNECTIONS = 64
_SLOWEST_BYTES_PER_S = 2**20
_RENEWABLE = frozenset(
    (
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "InvalidToken",
        "TokenRefreshRequired",
    )
)
_CHECKSUM_SETTINGS = {
    "request_checksum_calculation": "AWS_REQUEST_CHECKSUM_CALCULATION",
    "response_checksum_validation": "AWS_RESPONSE_CHECKSUM_VALIDATION",
}


class S3Client:
    """Calls to one endpoint; safe to share between threads, and across a fork.

    ``keeps_checksums``: whether the endpoint verifies and keeps our CRC-32s; None until the
    first write has shown it.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.keeps_checksums: bool | None = None
        passed = dict(options)
        self.deadline_s = float(passed.pop("ckptool_deadline_s", DEADLINE_S))
        self._passed = {
            **passed,
            "config_kwargs": _tuned_config(passed.get("config_kwargs") or {}, self.deadline_s),
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        # A parent's instance is kept, since closing it here would close its sockets; a lock
        # that one of the parent's threads held at the fork would stay locked here.
        self._by_pid: dict[int, Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._generation = 0
        self._reached = False
        self._known_buckets: set[str] = set()

    def __reduce__(self) -> Any:
        raise TypeError("a store holds secrets: send its recipe() and open_recipe() it there")

    @property
    def endpoint(self) -> str | None:
        """The endpoint that the user gave, None for AWS's own."""
        given = self._passed.get("endpoint_url")
        given = given or (self._passed.get("client_kwargs") or {}).get("endpoint_url")
        given = given or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return str(given) if given else None

    def call(self, method: str, *, verb: str, where: str, num_bytes: int = 0, **kwargs: Any) -> Any:
        """One request whose answer has no body to stream."""
        return self.run(
            lambda: self.request(method, **kwargs), verb=verb, where=where, num_bytes=num_bytes
        )

    def run(
        self, attempt: Callable[[], Awaitable[T]], *, verb: str, where: str, num_bytes: int = 0
    ) -> T:
        """Wait for ``attempt`` (see there) from any thread."""
        return self.wait(lambda: self.attempt(attempt, verb=verb, where=where, num_bytes=num_bytes))

    def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work in the client's event loop and wait for it."""
        return cast(T, fsspec.asyn.sync(self._filesystem().loop, work))

    def submit(self, work: Callable[[], Any]) -> Any:
        """Start work in the client's event loop; returns a concurrent future."""
        return asyncio.run_coroutine_threadsafe(work(), self._filesystem().loop)

    async def attempt(
        self, attempt: Callable[[], Awaitable[T]], *, verb: str, where: str, num_bytes: int = 0
    ) -> T:
        """Try until patience ends, then raise ckptool's error.

        A single try may take the deadline, and the time of its bytes at 1 MiB/s.
        """
        patience = Patience(self.deadline_s, reached=self._reached)
        slack_s = 5.0 + num_bytes / _SLOWEST_BYTES_PER_S
        generation = self._generation

        async def bounded() -> T:
            patience.reached = self._reached
            limit_s = max(0.0, patience.remaining_s) + slack_s
            return await asyncio.wait_for(attempt(), timeout=limit_s)

        async def renew(exc: Exception) -> None:
            nonlocal generation
            if error_code(exc) in _RENEWABLE:
                generation = await self._renew(generation)

        try:
            return await retry_async(
                bounded, patience=patience, what=f"{verb} {where}", on_failure=renew
            )
        except CkptoolError:
            raise
        except Exception as exc:
            raise translate(exc, verb=verb, where=where, endpoint=self.endpoint) from exc

    async def request(self, method: str, **kwargs: Any) -> Any:
        """A single try of one API call, with what the user adds to every request."""
        filesystem = self._filesystem()
        try:
            await filesystem.set_session()
            client = await filesystem.get_s3(kwargs.get("Bucket"))
            function = getattr(client, method)
            given = filesystem._get_s3_method_kwargs(function, filesystem.req_kw, **kwargs)
            answer = await function(**given)
        except Exception as exc:
            self._reached = self._reached or error_code(exc) is not None
            raise
        self._reached = True
        return answer

    def require_bucket(self, bucket: str, *, verb: str, where: str) -> None:
        """AccessError when the bucket is not there; some stores would create it by a write."""
        if bucket in self._known_buckets:
            return
        try:
            self.call("head_bucket", verb=verb, where=where, Bucket=bucket)
        except CkptoolError as exc:
            code = error_code(exc)
            if code in ("404", "NoSuchBucket"):
                raise AccessError(
                    f"cannot {verb} {where}: there is no bucket {bucket!r}"
                    + (f" at {self.endpoint}" if self.endpoint else ""),
                    hint="create the bucket first, or check its name and the endpoint",
                    url=where,
                    bucket=bucket,
                ) from exc
            # Credentials that may use a bucket need not be allowed to ask for it.
            if code in (None, "InvalidAccessKeyId", "SignatureDoesNotMatch"):
                raise
        self._known_buckets.add(bucket)

    def _filesystem(self) -> Any:
        pid = os.getpid()
        filesystem = self._by_pid.get(pid)
        if filesystem is None:
            with self._locks.setdefault(pid, threading.Lock()):
                filesystem = self._by_pid.get(pid)
                if filesystem is None:
                    filesystem = s3fs.S3FileSystem(**self._passed)
                    self._by_pid[pid] = filesystem
        return filesystem

    async def _renew(self, generation: int) -> int:
        """Read the credentials again, once for all the requests that found them expired."""
        if generation == self._generation:
            self._generation += 1
            await self._filesystem().set_session(refresh=True)
        return self._generation


def _tuned_config(given: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """botocore's configuration: what the user set, else what was measured to be fastest."""
    from botocore.config import Config

    config = dict(given)
    config.setdefault("max_pool_connections", _POOL_CONNECTIONS)
    config.setdefault("retries", {"total_max_attempts": 1})
    config.setdefault("read_timeout", min(60.0, max(10.0, deadline_s / 6)))
    config["s3"] = {"payload_signing_enabled": False, **(config.get("s3") or {})}
    for name, variable in _CHECKSUM_SETTINGS.items():
        if variable not in os.environ and name in Config.OPTION_DEFAULTS:
            config.setdefault(name, "when_required")
    return config
