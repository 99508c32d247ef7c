"""Ranges of S3 objects: each byte that was asked for, or an error that names the offset."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ckptool.errors import ShortReadError, StorageError
from ckptool.model import Extent
from ckptool.storage._keys import check_key

if TYPE_CHECKING:
    from ckptool.storage.s3 import S3Store

__all__ = ["read_extent"]

_CHUNK_BYTES = 2**20


async def read_extent(store: S3Store, extent: Extent, *, into: memoryview | None = None) -> bytes:
    """The extent's bytes (``end`` -1: up to the object's end), or ``into`` filled with them.

    A connection that breaks off is tried again from the byte where it broke.
    """
    chunks: list[bytes] = []
    done = 0
    check_key(extent.key)
    if extent.end == extent.start:
        return b""
    where = store.url_of(extent.key)
    what = f"{where}, bytes {extent.start} to {extent.end}" if extent.end >= 0 else where

    def take(data: bytes) -> None:
        nonlocal done
        if into is None:
            chunks.append(data)
        else:
            into[done : done + len(data)] = data
        done += len(data)

    async def attempt() -> None:
        nonlocal done
        if extent.end < 0:
            chunks.clear()
            done = 0
        await _attempt(store, extent, done, take)

    await store.client.attempt(attempt, verb="read", where=what, num_bytes=max(0, extent.num_bytes))
    return b"".join(chunks)


async def _attempt(store: S3Store, extent: Extent, done: int, take: Any) -> None:
    where = store.url_of(extent.key)
    start = extent.start + done
    whole = extent.end < 0
    ranged = {} if whole and start == 0 else {"Range": _range(start, extent.end)}
    answer = await store.client.request(
        "get_object", Bucket=store.bucket, Key=store.key_of(extent.key), **ranged
    )
    body = answer["Body"]
    try:
        size = _object_size(answer)
        if ranged and start and size is None:
            raise StorageError(
                f"cannot read {where} from byte {start}: the server does not serve ranges",
                hint="check the endpoint, or a proxy in front of it",
                url=where,
            )
        wanted = int(answer["ContentLength"]) if whole else extent.end - start
        got = 0
        while got < wanted:
            data = await body.read(min(_CHUNK_BYTES, wanted - got))
            if not data:
                break
            take(data)
            got += len(data)
    finally:
        body.close()
    if got < wanted:
        raise _short(where, offset=start + got, end=start + wanted, size=size)


def _short(where: str, *, offset: int, end: int, size: int | None) -> ShortReadError:
    gone = size is not None and size < end
    have = "" if size is None else f"; the object has {size} bytes"
    return ShortReadError(
        f"{where} broke off at byte {offset}, but bytes up to {end} were asked for{have}",
        hint="the object is shorter than expected: run ckptool validate on the checkpoint"
        if gone
        else "the connection breaks off: check the network, then run the same command again",
        url=where,
        offset=offset,
        transient=not gone,
    )


def _range(start: int, end: int) -> str:
    return f"bytes={start}-" if end < 0 else f"bytes={start}-{end - 1}"


def _object_size(answer: Any) -> int | None:
    match = re.fullmatch(r"bytes \d+-\d+/(\d+)", answer.get("ContentRange") or "")
    return int(match.group(1)) if match else None
