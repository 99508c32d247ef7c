"""The bare S3 client: what the fastest plain use of s3fs's client does, with no check at all.

    python scripts/bench_s3.py copy s3://bucket/from s3://bucket/to       through the client
    python scripts/bench_s3.py server-copy s3://bucket/from s3://bucket/to
    python scripts/bench_s3.py upload FOLDER s3://bucket/to
    python scripts/bench_s3.py download s3://bucket/from FOLDER
    python scripts/bench_s3.py start-up                           nothing but ckptool's start

The server is that of the usual AWS variables. Parts are --part-bytes large, --at-once of them in
flight.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import s3fs
from bench_common import mark_ready

PART_BYTES = 16 * 2**20
AT_ONCE = 8

_CONFIG = {
    "s3": {"payload_signing_enabled": False},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "max_pool_connections": 64,
}


class Client:
    """Whole objects, in parts that are in flight at the same time."""

    def __init__(self, s3: Any, *, part_bytes: int, at_once: int) -> None:
        self.s3 = s3
        self._part_bytes = part_bytes
        self._slots = asyncio.Semaphore(at_once)

    async def copy(self, source: str, dest: str) -> None:
        """Every byte comes to the client and goes out again."""

        async def one(key: str, num_bytes: int) -> None:
            async def send(upload: dict[str, Any], number: int, start: int, end: int) -> str:
                body = await self._read(source, key, start, end)
                answer = await self.s3.upload_part(**upload, PartNumber=number, Body=body)
                return str(answer["ETag"])

            await self.write(dest, key, num_bytes, send)

        await self._each(source, one)

    async def server_copy(self, source: str, dest: str) -> None:
        """No byte comes to the client."""

        async def one(key: str, num_bytes: int) -> None:
            where = {"Bucket": _bucket(source), "Key": _join(source, key)}

            async def send(upload: dict[str, Any], number: int, start: int, end: int) -> str:
                answer = await self.s3.upload_part_copy(
                    **upload,
                    PartNumber=number,
                    CopySource=where,
                    CopySourceRange=f"bytes={start}-{end - 1}",
                )
                return str(answer["CopyPartResult"]["ETag"])

            await self.write(dest, key, num_bytes, send)

        await self._each(source, one)

    async def upload(self, folder: Path, dest: str) -> None:
        async def one(path: Path) -> None:
            async def send(upload: dict[str, Any], number: int, start: int, end: int) -> str:
                with open(path, "rb") as file:
                    file.seek(start)
                    body = file.read(end - start)
                answer = await self.s3.upload_part(**upload, PartNumber=number, Body=body)
                return str(answer["ETag"])

            key = path.relative_to(folder).as_posix()
            await self.write(dest, key, path.stat().st_size, send)

        await asyncio.gather(*(one(path) for path in folder.rglob("*") if path.is_file()))

    async def download(self, source: str, folder: Path) -> None:
        async def one(key: str, num_bytes: int) -> None:
            path = folder / key if key else folder
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

            async def part(start: int, end: int) -> None:
                async with self._slots:
                    data = await self._read(source, key, start, end)
                    with open(path, "r+b") as file:
                        file.seek(start)
                        file.write(data)

            await asyncio.gather(*(part(*each) for each in self._cut(num_bytes)))

        await self._each(source, one)

    async def list(self, url: str) -> dict[str, int]:
        """Sizes by key below ``url``; the key is empty where ``url`` is the object itself."""
        prefix = _key(url)
        found: dict[str, int] = {}
        token: dict[str, str] = {}
        while True:
            page = await self.s3.list_objects_v2(Bucket=_bucket(url), Prefix=prefix, **token)
            for row in page.get("Contents", ()):
                rest = row["Key"][len(prefix) :] if prefix else "/" + row["Key"]
                if rest == "" or rest.startswith("/"):
                    found[rest.lstrip("/")] = int(row["Size"])
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    async def write(
        self,
        dest: str,
        key: str,
        num_bytes: int,
        send: Callable[[dict[str, Any], int, int, int], Awaitable[str]],
    ) -> None:
        where = {"Bucket": _bucket(dest), "Key": _join(dest, key)}
        begun = await self.s3.create_multipart_upload(**where)
        upload = {**where, "UploadId": begun["UploadId"]}

        async def part(number: int, start: int, end: int) -> dict[str, Any]:
            async with self._slots:
                return {"PartNumber": number, "ETag": await send(upload, number, start, end)}

        cuts = enumerate(self._cut(num_bytes), 1)
        parts = await asyncio.gather(*(part(number, *each) for number, each in cuts))
        await self.s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    async def _each(self, source: str, one: Callable[[str, int], Awaitable[None]]) -> None:
        found = await self.list(source)
        if not found:
            raise SystemExit(f"nothing is at {source}")
        await asyncio.gather(*(one(key, size) for key, size in found.items()))

    async def _read(self, source: str, key: str, start: int, end: int) -> bytes:
        answer = await self.s3.get_object(
            Bucket=_bucket(source), Key=_join(source, key), Range=f"bytes={start}-{end - 1}"
        )
        async with answer["Body"] as body:
            return bytes(await body.read())

    def _cut(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        for start in range(0, num_bytes, self._part_bytes):
            yield start, min(num_bytes, start + self._part_bytes)


def _bucket(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[0]


def _key(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[2]


def _join(url: str, key: str) -> str:
    return "/".join(filter(None, [_key(url), key]))


async def _main(arguments: argparse.Namespace) -> None:
    if arguments.command == "start-up":
        import ckptool.cli.app
        import ckptool.cli.export
        import ckptool.storage.s3  # noqa: F401  what a command on s3:// imports
    filesystem = s3fs.S3FileSystem(
        asynchronous=True, config_kwargs=_CONFIG, skip_instance_cache=True
    )
    session = await filesystem.set_session()
    client = Client(
        await filesystem.get_s3(),
        part_bytes=arguments.part_bytes,
        at_once=arguments.at_once,
    )
    mark_ready()
    try:
        await _do(client, arguments.command, *arguments.places)
    finally:
        await session.close()


async def _do(client: Client, command: str, first: str = "", second: str = "") -> None:
    if command == "copy":
        await client.copy(first, second)
    elif command == "server-copy":
        await client.server_copy(first, second)
    elif command == "upload":
        await client.upload(Path(first), second)
    elif command == "download":
        await client.download(first, Path(second))


_COMMANDS = ("copy", "server-copy", "upload", "download", "start-up")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("places", nargs="*")
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES)
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    asyncio.run(_main(parser.parse_args()))
