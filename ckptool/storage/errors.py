"""Turns what botocore, s3fs, fsspec and the operating system raise into ckptool's errors.

The one place where foreign exceptions are translated. Classes are told apart by name and by
the server's error code, so that nothing needs to be imported for it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ckptool.errors import (
    AccessError,
    CkptoolError,
    ObjectMissingError,
    ShortReadError,
    StorageError,
)

__all__ = ["Failure", "classify", "error_code", "out_of_space", "rejects_checksums", "translate"]


class Failure(Enum):
    """What a failure asks for.

    ``TRANSIENT``: try again until the deadline. ``BRIEF``: try again a few times, since it may
    heal (a token that is renewed, bytes garbled on the wire). ``UNREACHABLE``: no connection
    was made: a wrong endpoint if there never was one, else transient. ``FINAL``: give up.
    """

    TRANSIENT = "transient"
    BRIEF = "brief"
    UNREACHABLE = "unreachable"
    FINAL = "final"


class _Rule(NamedTuple):
    failure: Failure
    kind: type[StorageError]
    hint: str


_KEYS = "check the credentials: storage options key and secret, AWS_PROFILE, or AWS_ACCESS_KEY_ID"
_RENEW = "the session token has expired: renew the credentials, then run the same command again"
_LATER = "the store stayed busy or broken until the deadline: run the same command again later"
_ENDPOINT = "check the network and the endpoint: storage option endpoint_url or AWS_ENDPOINT_URL_S3"
_RIGHTS = "these credentials may not do this: ask for the permission, or use others"
_REGION = "set the bucket's region: storage option client_kwargs={'region_name': ...} or AWS_REGION"
_BUCKET = "create the bucket first, or check its name and the endpoint"
_CLOCK = "set this machine's clock"
_SPACE = "free some space or raise the quota, then run the same command again"
_OPTIONS = "check the storage options"
_REPORT = "run again with -v to see the whole failure"
_CHECKSUMS = (
    "the store refuses checksum headers: set storage option "
    "config_kwargs={'request_checksum_calculation': 'when_required'} "
    "or AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
)

_CODES: dict[str, _Rule] = {}
_CLASSES: dict[str, _Rule] = {}


def _rule(
    table: dict[str, _Rule], names: str, failure: Failure, kind: type[StorageError], hint: str
) -> None:
    table.update(dict.fromkeys(names.split(), _Rule(failure, kind, hint)))


_rule(
    _CODES,
    "SlowDown ServiceUnavailable InternalError InternalServerError RequestTimeout Throttling"
    " ThrottlingException TooManyRequests TooManyRequestsException RequestLimitExceeded"
    " RequestTimeoutException RequestThrottled BandwidthLimitExceeded PriorRequestNotComplete"
    " OperationAborted ConditionalRequestConflict 408 409 429 500 502 503 504",
    Failure.TRANSIENT,
    StorageError,
    _LATER,
)
_rule(
    _CODES,
    "ExpiredToken ExpiredTokenException RequestExpired InvalidToken TokenRefreshRequired",
    Failure.BRIEF,
    AccessError,
    _RENEW,
)
_rule(
    _CODES,
    "BadDigest InvalidDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch IncompleteBody",
    Failure.BRIEF,
    StorageError,
    "what arrived differs from what was sent: check the network, a proxy, or this machine's memory",
)
_rule(
    _CODES,
    "InvalidAccessKeyId SignatureDoesNotMatch NotSignedUp AccountProblem 401 InvalidSecurity"
    " MissingSecurityHeader CredentialsNotSupported",
    Failure.FINAL,
    AccessError,
    _KEYS,
)
_rule(
    _CODES,
    "AccessDenied AllAccessDisabled MethodNotAllowed 405 InvalidObjectState",
    Failure.FINAL,
    AccessError,
    _RIGHTS,
)
_rule(_CODES, "403 Forbidden", Failure.FINAL, AccessError, f"{_KEYS}, and what they may do")
_rule(
    _CODES,
    "InvalidPayer",
    Failure.FINAL,
    AccessError,
    "set storage option requester_pays=true",
)
_rule(_CODES, "NoSuchBucket InvalidBucketName", Failure.FINAL, AccessError, _BUCKET)
_rule(
    _CODES,
    "PermanentRedirect TemporaryRedirect Redirect 301 307 AuthorizationHeaderMalformed"
    " IllegalLocationConstraintException",
    Failure.FINAL,
    AccessError,
    _REGION,
)
_rule(_CODES, "RequestTimeTooSkewed", Failure.FINAL, AccessError, _CLOCK)
_rule(
    _CODES,
    "NoSuchKey NoSuchVersion 404",
    Failure.FINAL,
    ObjectMissingError,
    "check the name with ckptool ls; it may have been deleted meanwhile",
)
_rule(
    _CODES,
    "InvalidRange 416",
    Failure.FINAL,
    ShortReadError,
    "the object is shorter than expected: run ckptool validate on the checkpoint",
)
_rule(
    _CODES,
    "NoSuchUpload",
    Failure.FINAL,
    StorageError,
    "the upload was aborted or cleaned up meanwhile: start over",
)
_rule(
    _CODES,
    "QuotaExceeded InsufficientCapacity InsufficientStorage XMinioStorageFull 507",
    Failure.FINAL,
    StorageError,
    _SPACE,
)

_rule(
    _CLASSES,
    "EndpointConnectionError ConnectTimeoutError ConnectionRefusedError gaierror"
    " ProxyConnectionError ClientConnectorError",
    Failure.UNREACHABLE,
    AccessError,
    _ENDPOINT,
)
_rule(
    _CLASSES,
    "SSLError ClientConnectorCertificateError SSLCertVerificationError",
    Failure.FINAL,
    AccessError,
    "check the endpoint's https certificate: AWS_CA_BUNDLE, or storage option"
    " client_kwargs={'verify': PATH}",
)
_rule(
    _CLASSES,
    "ReadTimeoutError ConnectionClosedError HTTPClientError IncompleteRead IncompleteReadError"
    " ResponseStreamingError ResponseParserError ClientPayloadError ClientConnectionError"
    " ServerDisconnectedError FSTimeoutError TimeoutError ConnectionError ConnectionResetError"
    " BrokenPipeError ConnectionAbortedError",
    Failure.TRANSIENT,
    StorageError,
    _LATER,
)
_rule(
    _CLASSES,
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError"
    " SSOError UnauthorizedSSOTokenError SSOTokenLoadError NoAuthTokenError ProfileNotFound"
    " ConfigNotFound ConfigParseError MetadataRetrievalError InfiniteLoopConfigError"
    " RefreshWithMFAUnsupportedError LoginError",
    Failure.FINAL,
    AccessError,
    _KEYS,
)
_rule(
    _CLASSES,
    "ParamValidationError NoRegionError InvalidRegionError InvalidConfigError InvalidS3"
    "AddressingStyleError UnknownEndpointError UnknownServiceError UnsupportedS3"
    "ConfigurationError DataNotFoundError EndpointProviderError TypeError ValueError KeyError",
    Failure.FINAL,
    StorageError,
    _OPTIONS,
)
_rule(
    _CLASSES,
    "FileNotFoundError NotADirectoryError",
    Failure.FINAL,
    ObjectMissingError,
    "check the path; it may have been deleted meanwhile",
)
_rule(
    _CLASSES,
    "PermissionError",
    Failure.FINAL,
    AccessError,
    "check the owner and mode of the folder, or choose another place",
)

_ERRNOS: dict[int, _Rule] = {
    errno.EROFS: _Rule(Failure.FINAL, AccessError, "the file system is mounted read-only"),
    errno.EIO: _Rule(Failure.FINAL, StorageError, "the disk or its connection fails: see dmesg"),
    errno.ENAMETOOLONG: _Rule(Failure.FINAL, StorageError, "choose a shorter name"),
    errno.EISDIR: _Rule(Failure.FINAL, StorageError, "a folder stands there: choose another name"),
    errno.EMFILE: _Rule(Failure.FINAL, StorageError, "raise the limit of open files: ulimit -n"),
    errno.EFBIG: _Rule(Failure.FINAL, StorageError, "this file system cannot hold so large a file"),
}

_UNKNOWN = _Rule(Failure.FINAL, StorageError, _REPORT)


def classify(exc: BaseException) -> Failure:
    """Whether trying again may help."""
    if isinstance(exc, CkptoolError):
        return Failure.TRANSIENT if exc.facts.get("transient") else Failure.FINAL
    return _find_rule(exc).failure


def translate(
    exc: BaseException, *, verb: str, where: str, endpoint: str | None = None
) -> Exception:
    """The ckptool error for a foreign one: ``cannot {verb} {where}: {what happened}``."""
    if isinstance(exc, CkptoolError):
        return exc
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return out_of_space(exc.filename or where, where=where)
    rule = _find_rule(exc)
    at = f" at {endpoint}" if endpoint else ""
    facts = {"url": where, "endpoint": endpoint, "code": error_code(exc)}
    known = {name: value for name, value in facts.items() if value}
    return rule.kind(f"cannot {verb} {where}{at}: {_detail(exc)}", hint=rule.hint, **known)


def out_of_space(path: str, *, where: str, num_bytes: int | None = None) -> StorageError:
    """No space left: says how much is free beside ``path`` and how much was wanted."""
    free = _free_bytes(path)
    wanted = "" if num_bytes is None else f" {num_bytes} bytes are wanted,"
    have = "the free space is unknown" if free is None else f"{free} bytes are free"
    return StorageError(
        f"no space left to write {where}:{wanted} {have}",
        hint=_SPACE,
        url=where,
        num_bytes=num_bytes,
        free_bytes=free,
    )


def error_code(exc: BaseException) -> str | None:
    """The server's own error code (``NoSuchKey``, or the HTTP status where it gives no other)."""
    for link in _chain(exc):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(code or status) if code or status else None
    return None


def rejects_checksums(exc: BaseException) -> bool:
    """Whether a server refuses a request because of its checksum headers or trailers."""
    code = error_code(exc)
    if code in (None, "BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"):
        return False
    text = _detail(exc).lower()
    marks = ("checksum", "aws-chunked", "trailer", "content-encoding", "transfer-encoding")
    return any(mark in text for mark in marks)


def _find_rule(exc: BaseException) -> _Rule:
    code = error_code(exc)
    if code is not None:
        if rejects_checksums(exc):
            return _Rule(Failure.FINAL, StorageError, _CHECKSUMS)
        return _CODES.get(code) or _by_status(exc) or _UNKNOWN
    for link in _chain(exc):
        if isinstance(link, OSError) and link.errno in _ERRNOS:
            return _ERRNOS[link.errno]
        for cls in type(link).__mro__:
            if cls.__name__ in _CLASSES:
                return _CLASSES[cls.__name__]
    return _UNKNOWN


def _by_status(exc: BaseException) -> _Rule | None:
    for link in _chain(exc):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return _CODES.get(str(status))
    return None


def _chain(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _detail(exc: BaseException) -> str:
    for link in _chain(exc):
        response = getattr(link, "response", None)
        if isinstance(response, dict) and response.get("Error"):
            error = response["Error"]
            code, text = error.get("Code", "error"), error.get("Message", "")
            return f"the server says {code}: {text}" if text else f"the server says {code}"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    text = " ".join(str(exc).split())
    return text or type(exc).__name__


def _free_bytes(path: str) -> int | None:
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return shutil.disk_usage(path or ".").free
    except OSError:
        return None
