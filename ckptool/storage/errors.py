"""Turns what botocore, s3fs, fsspec and the operating system raise into ckptool's errors.

The one place where foreign exceptions are translated. Classes are told apart by name and by
the server's error code, so that nothing needs to be imported for it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator

from ckptool.errors import CkptoolError, StorageError
from ckptool.storage.error_rules import (
    CLASSES,
    CODES,
    ERRNOS,
    REFUSED_CHECKSUMS,
    SPACE,
    UNKNOWN,
    Failure,
    Rule,
)

__all__ = ["Failure", "classify", "error_code", "out_of_space", "rejects_checksums", "translate"]


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
        hint=SPACE,
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


def _find_rule(exc: BaseException) -> Rule:
    code = error_code(exc)
    if code is not None:
        if rejects_checksums(exc):
            return REFUSED_CHECKSUMS
        return CODES.get(code) or _by_status(exc) or UNKNOWN
    for link in _chain(exc):
        if isinstance(link, OSError) and link.errno in ERRNOS:
            return ERRNOS[link.errno]
        for cls in type(link).__mro__:
            if cls.__name__ in CLASSES:
                return CLASSES[cls.__name__]
    return UNKNOWN


def _by_status(exc: BaseException) -> Rule | None:
    for link in _chain(exc):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return CODES.get(str(status))
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
