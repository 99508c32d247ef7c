"""S3 servers of the benchmarks' own: SeaweedFS always, Ceph RGW where it is installed."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_common import ROOT, measure, python
from s3_server import S3Server

__all__ = ["Server", "installed", "running", "s3_tool"]

KEY, SECRET, REGION = "AKID", "SECRET", "us-east-1"

_PATIENCE_S = 120
_RGW = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool", "curl")


class Server:
    """A running server."""

    def __init__(self, name: str, endpoint_url: str) -> None:
        self.name = name
        self.endpoint_url = endpoint_url

    def env(self, *, endpoint_url: str | None = None) -> dict[str, str]:
        """The AWS variables that lead to it, or to a forwarder in front of it."""
        return {
            "AWS_ENDPOINT_URL": endpoint_url or self.endpoint_url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
        }

    @functools.cached_property
    def client(self) -> Any:
        import botocore.session
        from botocore.config import Config

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
            config=Config(retries={"total_max_attempts": 1}, read_timeout=_PATIENCE_S),
        )

    def make_bucket(self, name: str) -> str:
        """A new bucket; its URL."""
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def num_bytes(self, name: str) -> int:
        """Bytes of all objects of a bucket."""
        return sum(row["Size"] for row in self._objects(name))

    def remove_bucket(self, name: str) -> None:
        """A bucket with its objects and the uploads that were begun there.

        SeaweedFS gives the room on the disk back only when the bucket goes.
        """
        for row in self._objects(name):
            self.client.delete_object(Bucket=name, Key=row["Key"])
        for row in self.client.list_multipart_uploads(Bucket=name).get("Uploads") or ():
            self.client.abort_multipart_upload(
                Bucket=name, Key=row["Key"], UploadId=row["UploadId"]
            )
        self.client.delete_bucket(Bucket=name)

    def _objects(self, name: str) -> Iterator[dict[str, Any]]:
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=name):
            yield from page.get("Contents", ())


def installed() -> list[str]:
    """The servers that this machine can run."""
    has_rgw = all(shutil.which(program) for program in _RGW)
    return ["seaweedfs", "rgw"] if has_rgw else ["seaweedfs"]


@contextlib.contextmanager
def running(name: str, *, scratch: Path, store_bytes: int) -> Iterator[Server]:
    """The server, empty, and stopped at the end with all that it holds.

    RGW keeps its objects in memory, at most ``store_bytes`` of them; what was deleted counts
    for a while, and a full store answers no more.
    """
    if name == "seaweedfs":
        with S3Server() as server:
            yield Server(name, server.endpoint_url)
        return
    state = scratch / "rgw"
    script, env = str(ROOT / "scripts" / "rgw.sh"), {"PYTHON": sys.executable}
    try:
        started = measure([script, "start", str(state), str(store_bytes)], env=env)
        yield Server(name, started.stdout.split()[-1])
    finally:
        subprocess.run([script, "stop", str(state)], check=True)


def s3_tool(server: Server, *arguments: str) -> str:
    """One command of bench_s3.py; what it prints."""
    command = python("scripts/bench_s3.py", *arguments)
    return measure(command, env=server.env()).stdout.strip()
