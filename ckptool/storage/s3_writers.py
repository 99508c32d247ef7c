"""Multipart uploads: parts in any order from any process, or a stream cut into parts."""

from __future__ import annotations

import base64
import collections
import concurrent.futures
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from ckptool.errors import ObjectMissingError, StorageError, UsageError
from ckptool.storage._keys import split_s3_url
from ckptool.storage.base import Buffer, ObjectInfo, PartReceipt
from ckptool.storage.errors import error_code, rejects_checksums
from ckptool.storage.parts import check_parts
from ckptool.storage.s3_client import S3Client

if TYPE_CHECKING:
    from ckptool.storage.s3 import S3Store

__all__ = ["S3Assembly", "S3Stream", "checksum_fields", "crc32_of"]

_STREAM_PARTS_AT_ONCE = 4
_PARTS_BEFORE_DOUBLING = 1000


class S3Assembly:
    """One multipart upload."""

    def __init__(self, store: S3Store, key: str, *, token: str, num_bytes: int) -> None:
        self._store = store
        self._key = key
        self._token = token
        self._num_bytes = num_bytes
        self._where = store.url_of(key)

    @classmethod
    def begin(cls, store: S3Store, key: str, *, num_bytes: int) -> S3Assembly:
        """Start an upload, one that keeps CRC-32s where the endpoint takes them."""
        return cls(store, key, token=_create_upload(store, key), num_bytes=num_bytes)

    @property
    def token(self) -> str:
        return self._token

    def write_part(
        self, number: int, offset: int, data: Buffer, *, crc32: int | None = None
    ) -> PartReceipt:
        body = data if isinstance(data, bytes) else bytes(data)
        crc32 = crc32_of(body) if crc32 is None else crc32
        return self._store.client.wait(lambda: self.upload(number, body, crc32=crc32))

    async def upload(self, number: int, body: bytes, *, crc32: int) -> PartReceipt:
        """Send one part; runs in the client's event loop."""
        client = self._store.client
        fields = checksum_fields(client, crc32)
        try:
            answer = await client.attempt(
                lambda: client.request("upload_part", Body=body, **self._part(number), **fields),
                verb="write",
                where=f"{self._where}, part {number}",
                num_bytes=len(body),
            )
        except Exception as exc:
            if not fields or not rejects_checksums(exc):
                raise
            client.keeps_checksums = False
            return await self.upload(number, body, crc32=crc32)
        verified = answer.get("ChecksumCRC32") if fields else None
        if fields:
            client.keeps_checksums = verified is not None
        return self._receipt(number, len(body), answer["ETag"], verified)

    def copy_part(self, number: int, source_url: str, *, start: int, end: int) -> PartReceipt:
        """A part that the server copies from bytes ``[start, end)`` of an ``s3://`` object.

        ``checksum`` is the CRC-32 that the server computed of it, None where it gives none.
        """
        client = self._store.client
        bucket, key = split_s3_url(source_url)
        answer = client.call(
            "upload_part_copy",
            verb=f"copy bytes {start} to {end} of {source_url} to",
            where=f"{self._where}, part {number}",
            num_bytes=end - start,
            CopySource={"Bucket": bucket, "Key": key},
            CopySourceRange=f"bytes={start}-{end - 1}",
            **self._part(number),
            **_copy_source_keys(client.options),
        )
        result = answer["CopyPartResult"]
        return self._receipt(number, end - start, result["ETag"], result.get("ChecksumCRC32"))

    def surviving(self, claims: Sequence[tuple[PartReceipt, int, int | None]]) -> set[int]:
        """Parts that the server lists with the same ETag."""
        listed = {receipt.number: receipt.token for receipt in self.listed_parts()}
        return {r.number for r, _, _ in claims if listed.get(r.number) == r.token}

    def listed_parts(self) -> Sequence[PartReceipt]:
        receipts: list[PartReceipt] = []
        marker: dict[str, Any] = {}
        while True:
            try:
                page = self._store.client.call(
                    "list_parts", verb="list", where=self._where, **self._upload(), **marker
                )
            except StorageError as exc:
                if error_code(exc) in ("NoSuchUpload", "404"):
                    raise ObjectMissingError(f"the upload of {self._where} is gone") from exc
                raise
            for row in page.get("Parts") or ():
                number, crc32 = row["PartNumber"] - 1, row.get("ChecksumCRC32")
                receipt = self._receipt(number, row["Size"], row["ETag"], crc32)
                receipts.append(replace(receipt, md5=_md5_of(row["ETag"])))
            if not page.get("IsTruncated"):
                return receipts
            marker = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def commit(self, parts: Sequence[PartReceipt]) -> ObjectInfo:
        ordered = check_parts(parts, num_bytes=self._num_bytes, where=self._where)
        if not ordered:
            self.abort()
            return self._store.put(self._key, b"")
        try:
            self._store.client.call(
                "complete_multipart_upload",
                verb="publish",
                where=self._where,
                MultipartUpload={"Parts": [_completed(part) for part in ordered]},
                **self._upload(),
            )
        except StorageError as exc:
            # An earlier try may have completed it though its answer was lost.
            if error_code(exc) != "NoSuchUpload" or not self._is_published():
                raise
        return self._store.check_size(self._key, self._num_bytes)

    def abort(self) -> None:
        try:
            self._store.client.call(
                "abort_multipart_upload", verb="abort", where=self._where, **self._upload()
            )
        except StorageError as exc:
            if error_code(exc) not in ("NoSuchUpload", "404"):
                raise

    def _is_published(self) -> bool:
        try:
            return self._store.info(self._key).num_bytes == self._num_bytes
        except ObjectMissingError:
            return False

    def _receipt(self, number: int, num_bytes: int, etag: str, crc32: str | None) -> PartReceipt:
        # a copy's ETag may come without the quotes that a listing gives it
        token = f'"{etag.strip(chr(34))}"'
        return PartReceipt(number, num_bytes, token=token, checksum=_decode(crc32))

    def _part(self, number: int) -> dict[str, Any]:
        return {**self._upload(), "PartNumber": number + 1}

    def _upload(self) -> dict[str, Any]:
        return {
            "Bucket": self._store.bucket,
            "Key": self._store.key_of(self._key),
            "UploadId": self._token,
        }


class S3Stream:
    """An object of unknown length: parts are sent while the next ones are gathered."""

    def __init__(
        self,
        store: S3Store,
        key: str,
        *,
        num_bytes: int | None = None,
        max_memory: int | None = None,
    ) -> None:
        self._store = store
        self._key = key
        limits = store.part_limits
        if max_memory is not None:
            fitting = max(limits.min_bytes, max_memory // (_STREAM_PARTS_AT_ONCE + 2))
            limits = replace(limits, preferred_bytes=min(limits.preferred_bytes, fitting))
        self._first_bytes = limits.part_bytes(num_bytes or 0)
        self._grows = num_bytes is None
        self._max_memory = max_memory
        self._pending = bytearray()
        self._assembly: S3Assembly | None = None
        self._running: collections.deque[concurrent.futures.Future[PartReceipt]]
        self._running = collections.deque()
        self._receipts: list[PartReceipt] = []
        self._num_parts = 0
        self._closed = False

    def write(self, data: Buffer) -> None:
        if self._closed:
            raise StorageError(f"{self._store.url_of(self._key)} is committed or aborted already")
        view = memoryview(data).cast("B")
        while len(view):
            part_bytes = self._part_bytes()
            if not self._pending and len(view) >= part_bytes:
                self._send(bytes(view[:part_bytes]))
                view = view[part_bytes:]
                continue
            room = part_bytes - len(self._pending)
            self._pending += view[:room]
            view = view[room:]
            if len(self._pending) == part_bytes:
                self._send_pending()

    def commit(self) -> ObjectInfo:
        self._closed = True
        if self._assembly is None:
            return self._store.put(self._key, self._pending)
        if self._pending:
            self._send_pending()
        self._drain(0)
        num_bytes = sum(part.num_bytes for part in self._receipts)
        whole = self._store.attach_assembly(self._key, self._assembly.token, num_bytes=num_bytes)
        return whole.commit(self._receipts)

    def abort(self) -> None:
        self._closed = True
        for future in self._running:
            future.cancel()
        for future in self._running:
            with contextlib.suppress(Exception, concurrent.futures.CancelledError):
                future.result()
        self._running.clear()
        self._pending = bytearray()
        if self._assembly is not None:
            self._assembly.abort()

    def _part_bytes(self) -> int:
        """Of an unknown length, parts double every 1,000, so that 10,000 hold any object."""
        doublings = self._num_parts // _PARTS_BEFORE_DOUBLING if self._grows else 0
        return min(self._first_bytes << doublings, self._store.part_limits.max_bytes)

    def _parts_at_once(self) -> int:
        """In flight; beside them stand the part that is gathered, and its body."""
        if self._max_memory is None:
            return _STREAM_PARTS_AT_ONCE
        fit = self._max_memory // self._part_bytes() - 2
        return max(1, min(fit, _STREAM_PARTS_AT_ONCE))

    def _send_pending(self) -> None:
        body = bytes(self._pending)
        self._pending = bytearray()
        self._send(body)

    def _send(self, body: bytes) -> None:
        if self._assembly is None:
            self._assembly = S3Assembly.begin(self._store, self._key, num_bytes=0)
        self._drain(self._parts_at_once() - 1)
        assembly, number = self._assembly, self._num_parts
        crc32 = crc32_of(body)
        client = self._store.client
        self._running.append(client.submit(lambda: assembly.upload(number, body, crc32=crc32)))
        self._num_parts += 1

    def _drain(self, allowed: int) -> None:
        while len(self._running) > allowed:
            self._receipts.append(self._running.popleft().result())


def crc32_of(data: Buffer) -> int:
    return int(isal_zlib.crc32(data))


def checksum_fields(client: S3Client, crc32: int) -> dict[str, Any]:
    """What makes the server verify a body; nothing for an endpoint that keeps no checksums."""
    if client.keeps_checksums is False:
        return {}
    return {"ChecksumCRC32": base64.b64encode(crc32.to_bytes(4, "big")).decode()}


def _create_upload(store: S3Store, key: str) -> str:
    client = store.client
    algorithm: dict[str, Any]
    algorithm = {} if client.keeps_checksums is False else {"ChecksumAlgorithm": "CRC32"}
    try:
        answer = client.call(
            "create_multipart_upload",
            verb="write",
            where=store.url_of(key),
            Bucket=store.bucket,
            Key=store.key_of(key),
            **algorithm,
        )
    except StorageError as exc:
        if not algorithm or not rejects_checksums(exc):
            raise
        client.keeps_checksums = False
        return _create_upload(store, key)
    return str(answer["UploadId"])


def _completed(part: PartReceipt) -> dict[str, Any]:
    if part.token is None:
        raise UsageError(f"the receipt of part {part.number} has no token")
    row: dict[str, Any] = {"PartNumber": part.number + 1, "ETag": part.token}
    if part.checksum is not None:
        row["ChecksumCRC32"] = base64.b64encode(part.checksum.to_bytes(4, "big")).decode()
    return row


def _md5_of(etag: str) -> str | None:
    """An ETag is the MD5 of a part where nothing encrypts it; others never equal one."""
    digits = etag.strip('"')
    return digits if re.fullmatch(r"[0-9a-f]{32}", digits) else None


def _decode(crc32: str | None) -> int | None:
    return None if crc32 is None else int.from_bytes(base64.b64decode(crc32), "big")


def _copy_source_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The customer's own encryption keys serve the source of a copy too."""
    extra = options.get("s3_additional_kwargs") or {}
    names = ("SSECustomerAlgorithm", "SSECustomerKey", "SSECustomerKeyMD5")
    return {f"CopySource{name}": extra[name] for name in names if name in extra}
