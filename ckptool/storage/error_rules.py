"""The table of known failures: class, hint and verdict by server code, exception or errno."""

from __future__ import annotations

import errno
from enum import Enum
from typing import NamedTuple

from ckptool.errors import AccessError, ObjectMissingError, ShortReadError, StorageError

__all__ = ["CLASSES", "CODES", "ERRNOS", "REFUSED_CHECKSUMS", "SPACE", "UNKNOWN", "Failure", "Rule"]


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


class Rule(NamedTuple):
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
SPACE = "free some space or raise the quota, then run the same command again"
_OPTIONS = "check the storage options"
_REPORT = "run again with -v to see the whole failure"
_HINT_CHECKSUMS = (
    "the store refuses checksum headers: set storage option "
    "config_kwargs={'request_checksum_calculation': 'when_required'} "
    "or AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
)

CODES: dict[str, Rule] = {}
CLASSES: dict[str, Rule] = {}


def _rule(
    table: dict[str, Rule], names: str, failure: Failure, kind: type[StorageError], hint: str
) -> None:
    table.update(dict.fromkeys(names.split(), Rule(failure, kind, hint)))


_rule(
    CODES,
    "SlowDown ServiceUnavailable InternalError InternalServerError RequestTimeout Throttling"
    " ThrottlingException TooManyRequests TooManyRequestsException RequestLimitExceeded"
    " RequestTimeoutException RequestThrottled BandwidthLimitExceeded PriorRequestNotComplete"
    " OperationAborted ConditionalRequestConflict 408 409 429 500 502 503 504",
    Failure.TRANSIENT,
    StorageError,
    _LATER,
)
_rule(
    CODES,
    "ExpiredToken ExpiredTokenException RequestExpired InvalidToken TokenRefreshRequired",
    Failure.BRIEF,
    AccessError,
    _RENEW,
)
_rule(
    CODES,
    "BadDigest InvalidDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch IncompleteBody",
    Failure.BRIEF,
    StorageError,
    "what arrived differs from what was sent: check the network, a proxy, or this machine's memory",
)
_rule(
    CODES,
    "InvalidAccessKeyId SignatureDoesNotMatch NotSignedUp AccountProblem 401 InvalidSecurity"
    " MissingSecurityHeader CredentialsNotSupported",
    Failure.FINAL,
    AccessError,
    _KEYS,
)
_rule(
    CODES,
    "AccessDenied AllAccessDisabled MethodNotAllowed 405 InvalidObjectState",
    Failure.FINAL,
    AccessError,
    _RIGHTS,
)
_rule(CODES, "403 Forbidden", Failure.FINAL, AccessError, f"{_KEYS}, and what they may do")
_rule(
    CODES,
    "InvalidPayer",
    Failure.FINAL,
    AccessError,
    "set storage option requester_pays=true",
)
_rule(CODES, "NoSuchBucket InvalidBucketName", Failure.FINAL, AccessError, _BUCKET)
_rule(
    CODES,
    "PermanentRedirect TemporaryRedirect Redirect 301 307 AuthorizationHeaderMalformed"
    " IllegalLocationConstraintException",
    Failure.FINAL,
    AccessError,
    _REGION,
)
_rule(CODES, "RequestTimeTooSkewed", Failure.FINAL, AccessError, _CLOCK)
_rule(
    CODES,
    "NoSuchKey NoSuchVersion 404",
    Failure.FINAL,
    ObjectMissingError,
    "check the name with ckptool ls; it may have been deleted meanwhile",
)
_rule(
    CODES,
    "InvalidRange 416",
    Failure.FINAL,
    ShortReadError,
    "the object is shorter than expected: run ckptool validate on the checkpoint",
)
_rule(
    CODES,
    "NoSuchUpload",
    Failure.FINAL,
    StorageError,
    "the upload was aborted or cleaned up meanwhile: start over",
)
_rule(
    CODES,
    "QuotaExceeded InsufficientCapacity InsufficientStorage XMinioStorageFull 507",
    Failure.FINAL,
    StorageError,
    SPACE,
)

_rule(
    CLASSES,
    "EndpointConnectionError ConnectTimeoutError ConnectionRefusedError gaierror"
    " ProxyConnectionError ClientConnectorError",
    Failure.UNREACHABLE,
    AccessError,
    _ENDPOINT,
)
_rule(
    CLASSES,
    "SSLError ClientConnectorCertificateError SSLCertVerificationError",
    Failure.FINAL,
    AccessError,
    "check the endpoint's https certificate: AWS_CA_BUNDLE, or storage option"
    " client_kwargs={'verify': PATH}",
)
_rule(
    CLASSES,
    "ReadTimeoutError ConnectionClosedError HTTPClientError IncompleteRead IncompleteReadError"
    " ResponseStreamingError ResponseParserError ClientPayloadError ClientConnectionError"
    " ServerDisconnectedError FSTimeoutError TimeoutError ConnectionError ConnectionResetError"
    " BrokenPipeError ConnectionAbortedError",
    Failure.TRANSIENT,
    StorageError,
    _LATER,
)
_rule(
    CLASSES,
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError"
    " SSOError UnauthorizedSSOTokenError SSOTokenLoadError NoAuthTokenError ProfileNotFound"
    " ConfigNotFound ConfigParseError MetadataRetrievalError InfiniteLoopConfigError"
    " RefreshWithMFAUnsupportedError LoginError",
    Failure.FINAL,
    AccessError,
    _KEYS,
)
_rule(
    CLASSES,
    "ParamValidationError NoRegionError InvalidRegionError InvalidConfigError InvalidS3"
    "AddressingStyleError UnknownEndpointError UnknownServiceError UnsupportedS3"
    "ConfigurationError DataNotFoundError EndpointProviderError TypeError ValueError KeyError",
    Failure.FINAL,
    StorageError,
    _OPTIONS,
)
_rule(
    CLASSES,
    "FileNotFoundError NotADirectoryError",
    Failure.FINAL,
    ObjectMissingError,
    "check the path; it may have been deleted meanwhile",
)
_rule(
    CLASSES,
    "PermissionError",
    Failure.FINAL,
    AccessError,
    "check the owner and mode of the folder, or choose another place",
)

ERRNOS: dict[int, Rule] = {
    errno.EROFS: Rule(Failure.FINAL, AccessError, "the file system is mounted read-only"),
    errno.EIO: Rule(Failure.FINAL, StorageError, "the disk or its connection fails: see dmesg"),
    errno.ENAMETOOLONG: Rule(Failure.FINAL, StorageError, "choose a shorter name"),
    errno.EISDIR: Rule(Failure.FINAL, StorageError, "a folder stands there: choose another name"),
    errno.EMFILE: Rule(Failure.FINAL, StorageError, "raise the limit of open files: ulimit -n"),
    errno.EFBIG: Rule(Failure.FINAL, StorageError, "this file system cannot hold so large a file"),
}

UNKNOWN = Rule(Failure.FINAL, StorageError, _REPORT)
REFUSED_CHECKSUMS = Rule(Failure.FINAL, StorageError, _HINT_CHECKSUMS)
