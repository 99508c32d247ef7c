"""Keys joined below a root; always literal."""

from __future__ import annotations

import re

from ckptool.errors import RefusedError, UsageError

__all__ = ["check_key", "join", "split_s3_url"]

_ARN = re.compile(
    r"(arn:[^:/]*:s3[^:/]*:[^:/]*:[^:/]*:(?:outpost[:/][^:/]+[:/])?[a-z]+[:/][^:/]+)/?(.*)"
)


def join(*parts: str) -> str:
    """Parts joined with one slash between them; empty ones are left out."""
    return "/".join(p for p in (part.strip("/") for part in parts) if p)


def check_key(key: str) -> str:
    """The key itself; RefusedError when it names no place below a root."""
    if not key or "\0" in key or any(p in ("", ".", "..") for p in key.split("/")):
        raise RefusedError(
            f"{key!r} is not a key: it must be relative, with no empty, '.' or '..' part",
            hint="check the name",
        )
    return key


def split_s3_url(url: str) -> tuple[str, str]:
    """Bucket (or access point) and key of ``s3://bucket/key``."""
    path = url.split("://", 1)[1].rstrip("/")
    arn = _ARN.fullmatch(path)
    bucket, key = arn.groups() if arn else (path.partition("/")[0], path.partition("/")[2])
    if not bucket:
        raise UsageError(f"{url!r} names no bucket", hint="write s3://BUCKET/FOLDER")
    return bucket, key
