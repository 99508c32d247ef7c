"""Every failure that a client is known to raise has a class, a hint and a verdict."""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
from typing import Any

import botocore.exceptions
import pytest
from s3fs.errors import ERROR_CODE_TO_EXCEPTION, translate_boto_error

from ckptool.errors import (
    AccessError,
    NotEmptyError,
    ObjectMissingError,
    ShortReadError,
    StorageError,
)
from ckptool.storage import retry
from ckptool.storage.errors import Failure, classify, translate
from ckptool.storage.retry import Patience

WHERE = "s3://bucket/key"


def _server_error(code: str, message: str = "as the server says", status: int = 400) -> Exception:
    response: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return botocore.exceptions.ClientError(response, "PutObject")


def _boto_errors() -> list[Exception]:
    """One of each class; made without __init__, whose arguments differ."""
    found: list[Exception] = []
    for _, cls in inspect.getmembers(botocore.exceptions, inspect.isclass):
        if issubclass(cls, botocore.exceptions.BotoCoreError):
            error = cls.__new__(cls)
            error.args = ("what happened",)
            found.append(error)
    return found


@pytest.mark.parametrize("code", [*ERROR_CODE_TO_EXCEPTION, "Unheard"])
@pytest.mark.parametrize("through_s3fs", [False, True])
def test_every_code_is_translated(code: str, through_s3fs: bool) -> None:
    """Each code that s3fs knows names the object, the endpoint, the code and a next step."""
    original = _server_error(code)
    error = translate_boto_error(original) if through_s3fs else original
    told = translate(error, verb="write", where=WHERE, endpoint="http://here")
    assert isinstance(told, StorageError)
    for part in (WHERE, "http://here", code, "as the server says"):
        assert part in told.message
    assert told.hint
    assert told.facts["code"] == code


@pytest.mark.parametrize("error", _boto_errors(), ids=lambda e: type(e).__name__)
def test_every_botocore_exception_is_translated(error: Exception) -> None:
    """Each exception of botocore becomes a StorageError with a next step."""
    told = translate(error, verb="read", where=WHERE)
    assert isinstance(told, StorageError)
    assert WHERE in told.message
    assert told.hint
    assert isinstance(classify(error), Failure)


@pytest.mark.parametrize(
    ("error", "kind", "failure"),
    [
        (_server_error("NoSuchKey"), ObjectMissingError, Failure.FINAL),
        (_server_error("404"), ObjectMissingError, Failure.FINAL),
        (_server_error("NoSuchBucket"), AccessError, Failure.FINAL),
        (_server_error("AccessDenied"), AccessError, Failure.FINAL),
        (_server_error("403"), AccessError, Failure.FINAL),
        (_server_error("InvalidAccessKeyId"), AccessError, Failure.FINAL),
        (_server_error("SignatureDoesNotMatch"), AccessError, Failure.FINAL),
        (_server_error("ExpiredToken"), AccessError, Failure.BRIEF),
        (_server_error("PermanentRedirect"), AccessError, Failure.FINAL),
        (_server_error("InvalidRange"), ShortReadError, Failure.FINAL),
        (_server_error("SlowDown"), StorageError, Failure.TRANSIENT),
        (_server_error("503"), StorageError, Failure.TRANSIENT),
        (_server_error("Odd", status=502), StorageError, Failure.TRANSIENT),
        (_server_error("BadDigest"), StorageError, Failure.BRIEF),
        (botocore.exceptions.NoCredentialsError(), AccessError, Failure.FINAL),
        (botocore.exceptions.ProfileNotFound(profile="p"), AccessError, Failure.FINAL),
        (
            botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
            AccessError,
            Failure.UNREACHABLE,
        ),
        (
            botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"),
            StorageError,
            Failure.TRANSIENT,
        ),
        (ConnectionResetError(errno.ECONNRESET, "reset"), StorageError, Failure.TRANSIENT),
        (asyncio.TimeoutError(), StorageError, Failure.TRANSIENT),
        (FileNotFoundError(errno.ENOENT, "gone"), ObjectMissingError, Failure.FINAL),
        (PermissionError(errno.EACCES, "no"), AccessError, Failure.FINAL),
        (OSError(errno.EROFS, "read-only"), AccessError, Failure.FINAL),
        (OSError(errno.ENOSPC, "full"), StorageError, Failure.FINAL),
        (RuntimeError("anything else"), StorageError, Failure.FINAL),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, Exception) else "",
)
def test_classes_and_verdicts(error: Exception, kind: type, failure: Failure) -> None:
    """What a caller can do about a failure decides its class and whether it is tried again."""
    assert type(translate(error, verb="read", where=WHERE)) is kind
    assert classify(error) is failure


@pytest.mark.parametrize(
    "message",
    [
        "x-amz-checksum-crc32 is not supported",
        "Transfer-Encoding: aws-chunked is not implemented",
        "Unsupported trailer x-amz-checksum-crc64nvme",
    ],
)
def test_refused_checksums_name_the_setting(message: str) -> None:
    """A store that refuses checksum headers leads to the setting, by both its names."""
    told = translate(_server_error("InvalidRequest", message), verb="write", where=WHERE)
    assert "request_checksum_calculation" in str(told)
    assert "AWS_REQUEST_CHECKSUM_CALCULATION" in str(told)


def test_our_own_errors_pass() -> None:
    """An error that is ckptool's already stays as it is."""
    error = NotEmptyError("taken")
    assert translate(error, verb="write", where=WHERE) is error


def _delays(patience: Patience, failure: Failure, seconds_per_try: float) -> list[float]:
    """The delays that patience gives while its clock is moved by hand."""
    delays: list[float] = []
    while len(delays) < 1000:
        patience.started -= seconds_per_try
        delay_s = patience.next_delay_s(failure)
        if delay_s is None:
            break
        patience.started -= delay_s
        delays.append(delay_s)
    return delays


@pytest.mark.parametrize("deadline_s", [1.0, 10.0, 300.0, 3600.0])
def test_patience_fits_at_least_six_retries(deadline_s: float) -> None:
    """Quick failures are tried again six times or more, in growing steps, to the deadline."""
    patience = Patience(deadline_s)
    delays = _delays(patience, Failure.TRANSIENT, deadline_s / 1000)
    assert len(delays) >= 6
    assert patience.remaining_s <= 0
    assert max(delays) <= max(0.1, deadline_s / 8)
    assert sum(delays) <= deadline_s


def test_patience_is_jittered() -> None:
    """Two clients that failed together do not come back together."""
    assert len({Patience(300).next_delay_s(Failure.TRANSIENT) for _ in range(20)}) > 10


def test_patience_by_kind_of_failure() -> None:
    """Final failures are not tried again; brief ones a few times; a wrong address for seconds."""
    assert _delays(Patience(300), Failure.FINAL, 0) == []
    assert len(_delays(Patience(300), Failure.BRIEF, 0)) == 6
    assert sum(_delays(Patience(300, reached=False), Failure.UNREACHABLE, 0.01)) < 15
    assert sum(_delays(Patience(300, reached=True), Failure.UNREACHABLE, 0.01)) > 200
    assert sum(_delays(Patience(2, reached=False), Failure.UNREACHABLE, 0.01)) <= 2


def test_retry_says_what_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait is logged with what failed; the last exception is the one that comes out."""
    monkeypatch.setattr(retry, "_FIRST_DELAY_S", 0.001)
    answers: list[Any] = [_server_error("SlowDown"), TimeoutError("slow"), "done"]

    def attempt() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    with caplog.at_level(logging.INFO, "ckptool.storage"):
        assert retry.retry(attempt, patience=Patience(5), what="read s3://b/k") == "done"
    assert len(caplog.records) == 2
    assert "read s3://b/k failed, trying again" in caplog.text
