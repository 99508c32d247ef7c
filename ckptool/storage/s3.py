"""S3, or anything that speaks it, as a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptool.errors import (
    NotEmptyError,
    ObjectMissingError,
    RefusedError,
)
from ckptool.model import Extent
from ckptool.storage._keys import check_key, join, split_s3_url
from ckptool.storage.base import (
    Buffer,
    Capabilities,
    Listing,
    ObjectInfo,
    PartLimits,
    PendingUpload,
    Store,
    StoreRecipe,
)
from ckptool.storage.errors import error_code, rejects_checksums
from ckptool.storage.parts import wrong_size
from ckptool.storage.s3_client import S3Client
from ckptool.storage.s3_read import read_extent
from ckptool.storage.s3_writers import S3Assembly, S3Stream, checksum_fields, crc32_of

__all__ = ["S3Store"]

_LIMITS = PartLimits(
    min_bytes=5 * 2**20, max_bytes=5 * 2**30, max_parts=10_000, preferred_bytes=16 * 2**20
)
_READS_AT_ONCE = 16


class S3Store:
    """Objects below a prefix of one bucket."""

    def __init__(self, client: S3Client, *, bucket: str, prefix: str, url: str) -> None:
        self.client = client
        self.bucket = bucket
        self._prefix = prefix
        self._url = url

    @classmethod
    def open(cls, url: str, *, options: Mapping[str, Any] | None = None) -> S3Store:
        bucket, prefix = split_s3_url(url)
        return cls(S3Client(options or {}), bucket=bucket, prefix=prefix, url=url.rstrip("/"))

    def __repr__(self) -> str:
        return f"S3Store({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """``checksums`` is True until a write has shown that the endpoint keeps none."""
        return Capabilities(
            shared=True,
            assembly=True,
            server_copy=True,
            conditional_put=True,
            checksums=self.client.keeps_checksums is not False,
        )

    @property
    def part_limits(self) -> PartLimits:
        return _LIMITS

    def url_of(self, key: str) -> str:
        return f"{self._url}/{key}" if key else self._url

    def child(self, key: str) -> S3Store:
        return S3Store(
            self.client,
            bucket=self.bucket,
            prefix=self.key_of(check_key(key)),
            url=self.url_of(key),
        )

    def key_of(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self._prefix}/{key}" if self._prefix else key

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        return [self._listed(row) for page in self._pages(prefix) for row in _objects_of(page)]

    def list_level(self, prefix: str = "") -> Listing:
        objects: list[ObjectInfo] = []
        folders: list[str] = []
        for page in self._pages(prefix, Delimiter="/"):
            objects += [self._listed(row) for row in _objects_of(page)]
            rows = page.get("CommonPrefixes") or ()
            folders += [row["Prefix"].rstrip("/").rsplit("/", 1)[-1] for row in rows]
        return Listing(tuple(objects), tuple(sorted(folders)))

    def info(self, key: str) -> ObjectInfo:
        where = self.url_of(key)
        try:
            head = self.client.call("head_object", verb="read", where=where, **self._at(key))
        except ObjectMissingError:
            self.client.require_bucket(self.bucket, verb="read", where=where)
            raise
        return ObjectInfo(key, int(head["ContentLength"]), head.get("LastModified"))

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> bytes:
        return self._read([Extent(key, start, -1 if end is None else end)])[0]

    def read_many(self, extents: Sequence[Extent]) -> Sequence[bytes]:
        return self._read(extents)

    def read_into(self, extent: Extent, buffer: memoryview) -> None:
        self.client.wait(lambda: read_extent(self, extent, into=buffer.cast("B")))

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> ObjectInfo:
        where = self.url_of(key)
        self.client.require_bucket(self.bucket, verb="write", where=where)
        # A store may ignore If-None-Match without a word, so look first as well.
        if if_absent and self._exists(key):
            raise self._taken(key)
        body = data if isinstance(data, bytes) else bytes(data)
        if len(body) > _LIMITS.max_bytes:
            raise RefusedError(
                f"{where} has {len(body)} bytes, more than one request can put",
                hint="write it in parts",
            )
        try:
            verified = self._put(key, body, condition={"IfNoneMatch": "*"} if if_absent else {})
        except NotEmptyError:
            # An earlier try may have been stored though its answer was lost.
            if self.info(key).num_bytes != len(body) or self.read(key) != body:
                raise
            verified = True
        return ObjectInfo(key, len(body)) if verified else self.check_size(key, len(body))

    def append(self, key: str, data: Buffer) -> None:
        raise RefusedError(f"{self.url_of(key)} cannot be appended to: S3 has no such request")

    def open_stream(
        self, key: str, *, num_bytes: int | None = None, max_memory: int | None = None
    ) -> S3Stream:
        check_key(key)
        self.client.require_bucket(self.bucket, verb="write", where=self.url_of(key))
        return S3Stream(self, key, num_bytes=num_bytes, max_memory=max_memory)

    def open_assembly(self, key: str, *, num_bytes: int) -> S3Assembly:
        check_key(key)
        self.part_limits.part_bytes(num_bytes)
        self.client.require_bucket(self.bucket, verb="write", where=self.url_of(key))
        return S3Assembly.begin(self, key, num_bytes=num_bytes)

    def attach_assembly(self, key: str, token: str, *, num_bytes: int) -> S3Assembly:
        return S3Assembly(self, check_key(key), token=token, num_bytes=num_bytes)

    def copies_from(self, other: Store) -> bool:
        """Between places with one endpoint and one set of credentials."""
        return isinstance(other, S3Store) and other.client.options == self.client.options

    def delete(self, key: str) -> None:
        where = self.url_of(key)
        self.client.require_bucket(self.bucket, verb="delete", where=where)
        try:
            self.client.call("delete_object", verb="delete", where=where, **self._at(key))
        except ObjectMissingError:
            return

    def recipe(self) -> StoreRecipe:
        return StoreRecipe(self._url, self.client.options)

    def list_uploads(self, prefix: str = "") -> Sequence[PendingUpload]:
        found: list[PendingUpload] = []
        marker: dict[str, Any] = {}
        while True:
            page = self.client.call(
                "list_multipart_uploads",
                verb="list",
                where=self.url_of(prefix),
                Bucket=self.bucket,
                Prefix=self._folder(prefix),
                **marker,
            )
            for row in page.get("Uploads") or ():
                key = row["Key"][len(self._folder("")) :]
                found.append(PendingUpload(key, row["UploadId"], row.get("Initiated")))
            if not page.get("IsTruncated"):
                return found
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort_upload(self, key: str, token: str) -> None:
        self.attach_assembly(key, token, num_bytes=0).abort()

    def check_size(self, key: str, num_bytes: int) -> ObjectInfo:
        """StorageError when the stored size is not what was sent."""
        info = self.info(key)
        if info.num_bytes != num_bytes:
            raise wrong_size(self.url_of(key), num_bytes, info.num_bytes)
        return info

    def _put(self, key: str, body: bytes, *, condition: Mapping[str, Any]) -> bool:
        """Whether the server verified the body's CRC-32."""
        where = self.url_of(key)
        fields = checksum_fields(self.client, crc32_of(body))
        try:
            answer = self.client.call(
                "put_object",
                verb="write",
                where=where,
                num_bytes=len(body),
                Body=body,
                **self._at(key),
                **fields,
                **condition,
            )
        except Exception as exc:
            code = error_code(exc)
            if code in ("PreconditionFailed", "412"):
                raise self._taken(key) from exc
            if condition and code in ("NotImplemented", "501"):
                return self._put(key, body, condition={})
            if fields and rejects_checksums(exc):
                self.client.keeps_checksums = False
                return self._put(key, body, condition=condition)
            raise
        if fields:
            self.client.keeps_checksums = "ChecksumCRC32" in answer
        return bool(fields) and "ChecksumCRC32" in answer

    def _read(self, extents: Sequence[Extent]) -> tuple[bytes, ...]:
        async def work() -> tuple[bytes, ...]:
            gate = asyncio.Semaphore(_READS_AT_ONCE)

            async def one(extent: Extent) -> bytes:
                async with gate:
                    return await read_extent(self, extent)

            tasks = [asyncio.ensure_future(one(extent)) for extent in extents]
            try:
                return tuple(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        return self.client.wait(work)

    def _exists(self, key: str) -> bool:
        try:
            self.info(key)
        except ObjectMissingError:
            return False
        return True

    def _taken(self, key: str) -> NotEmptyError:
        return NotEmptyError(
            f"{self.url_of(key)} is already there",
            hint="choose another destination, or remove it first",
            url=self.url_of(key),
        )

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self.bucket, "Key": self.key_of(check_key(key))}

    def _folder(self, prefix: str) -> str:
        folder = join(self._prefix, prefix)
        return folder + "/" if folder else ""

    def _listed(self, row: Mapping[str, Any]) -> ObjectInfo:
        key = row["Key"][len(self._folder("")) :]
        return ObjectInfo(key, int(row["Size"]), row.get("LastModified"))

    def _pages(self, prefix: str, **more: Any) -> Iterator[Mapping[str, Any]]:
        where = self.url_of(prefix)
        token: dict[str, Any] = {}
        while True:
            page = self.client.call(
                "list_objects_v2",
                verb="list",
                where=where,
                Bucket=self.bucket,
                Prefix=self._folder(prefix),
                **token,
                **more,
            )
            if not page.get("KeyCount", 1):
                self.client.require_bucket(self.bucket, verb="list", where=where)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}


def _objects_of(page: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rows of objects; names that end in a slash are folders that some tools make."""
    return (row for row in page.get("Contents") or () if not row["Key"].endswith("/"))
