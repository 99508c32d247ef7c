"""News among the ranks of a save: who failed, who is gone, who has come how far.

Every rank keeps one TCP connection to rank 0, which passes each line on to all. A process
that dies closes its connection, so that the others know within a moment, whatever they are
doing; a host that vanishes is noticed by TCP keepalive within about ten seconds. Only JSON
lines travel, after a secret that the ranks shared over their gloo group.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ckptool.errors import CkptoolError, StorageError
from ckptool.torch.channel import close_in_forks
from ckptool.torch.group import Group
from ckptool.torch.ranks_json import error_from_json, error_to_json

__all__ = ["News"]

_PROGRESS_S = 5.0


class News:
    """One rank's end of the news; making one is collective, and so is nothing else."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._changed = threading.Condition()
        self._failures: dict[str, CkptoolError] = {}
        self._gone: set[int] = set()
        self._reached: dict[str, set[int]] = {}
        self._alive: dict[int, float] = {}
        self._told = 0.0
        self._closing = False
        self._server: _Server | None = None
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        if group.size > 1:
            self._connect(group)

    def fail(self, attempt: str, error: BaseException) -> None:
        """Tell every rank that this one failed in ``attempt``."""
        line = {"failed": attempt, "rank": self.rank, "error": error_to_json(error)}
        self._hear(line)
        self._post(line)

    def failure(self, attempt: str) -> CkptoolError | None:
        """Why ``attempt`` cannot succeed, as far as is known here."""
        with self._changed:
            return self._failure(attempt)

    @property
    def gone(self) -> frozenset[int]:
        """Ranks whose process has ended, as far as is known here."""
        with self._changed:
            return frozenset(self._gone)

    def progress(self) -> None:
        """Tell the others that this rank is still at work; cheap to call often."""
        now = time.monotonic()
        if now - self._told >= _PROGRESS_S:
            self._told = now
            self._post({"alive": self.rank})

    def meet(self, attempt: str, point: str, *, timeout_s: float) -> None:
        """Wait until every rank is at ``point`` of ``attempt``.

        Raises once one cannot come, or has shown no progress for ``timeout_s``.
        """
        topic = f"{attempt}/{point}"
        line = {"reached": topic, "rank": self.rank}
        self._hear(line)
        self._post(line)
        started = time.monotonic()
        with self._changed:
            while absent := set(range(self.size)) - self._reached.get(topic, set()):
                failure = self._failure(attempt)
                if failure is not None:
                    raise failure
                quiet = min(max(self._alive.get(rank, 0.0), started) for rank in absent)
                left = quiet + timeout_s - time.monotonic()
                if left <= 0:
                    raise self._late(topic, timeout_s)
                self._changed.wait(min(left, 1.0))
            self._reached.pop(topic, None)

    def close(self) -> None:
        """Leave without being taken for dead."""
        self._closing = True
        self._post({"bye": self.rank})
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.close()

    def _failure(self, attempt: str) -> CkptoolError | None:
        if attempt in self._failures:
            return self._failures[attempt]
        if self._gone:
            ranks = ", ".join(map(str, sorted(self._gone)))
            return StorageError(
                f"rank {ranks} is gone: its process ended in the middle of the run",
                hint="restart the job; it resumes from the last committed step",
            )
        return None

    def _late(self, topic: str, timeout_s: float) -> CkptoolError:
        missing = sorted(set(range(self.size)) - self._reached.get(topic, set()))
        return StorageError(
            f"rank {', '.join(map(str, missing))} did not reach {topic.split('/')[-1]!r} "
            f"of the save within {timeout_s:g} s",
            hint="see that rank's log; process_timeout_s sets the limit",
        )

    def _hear(self, line: dict[str, Any]) -> None:
        with self._changed:
            if "failed" in line:
                error = error_from_json(line["error"], rank=line["rank"])
                self._failures.setdefault(line["failed"], error)
            elif "reached" in line:
                self._reached.setdefault(line["reached"], set()).add(line["rank"])
            elif "alive" in line:
                self._alive[line["alive"]] = time.monotonic()
            elif "gone" in line:
                self._gone.add(line["gone"])
            self._changed.notify_all()

    def _post(self, line: dict[str, Any]) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            if not self._closing:
                self._hear({"gone": 0})

    def _connect(self, group: Group) -> None:
        place = f"{socket.gethostname()}/{_boot_id()}"
        one_host = len(set(group.all_gather(place.encode()))) == 1
        secret = group.broadcast(secrets.token_hex(16).encode()).decode()
        if self.rank == 0:
            self._server = _Server(self.size, secret=secret, one_host=one_host)
        offer = json.dumps(self._server.addresses).encode() if self._server else None
        addresses = json.loads(group.broadcast(offer))

        def hello() -> bytes:
            self._socket = _reach(addresses)
            self._post({"hello": secret, "rank": self.rank})
            if self._socket.recv(1) != b"\n":  # the switchboard knows this rank now
                raise StorageError("rank 0 closed the line for news of saves")
            return b""

        group.together(hello)
        self._thread = threading.Thread(target=self._listen, name="ckptool-news", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._socket is not None
        _read_lines(self._socket, self._hear)
        if not self._closing:
            self._hear({"gone": 0})


class _Server:
    """Rank 0's switchboard: passes every line to all the other ranks."""

    def __init__(self, size: int, *, secret: str, one_host: bool) -> None:
        self._secret = secret
        host = "127.0.0.1" if one_host else ""
        self._listener = socket.create_server((host, 0), backlog=size)
        close_in_forks(self._listener)
        port = self._listener.getsockname()[1]
        hosts = ["127.0.0.1"] if one_host else _own_hosts()
        self.addresses = [[host, port] for host in hosts]
        self._lock = threading.Lock()
        self._members: dict[int, socket.socket] = {}
        self._closed = False
        threading.Thread(target=self._accept, name="ckptool-news-accept", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            _keep_alive(peer)
            close_in_forks(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        rank: int | None = None
        polite = False

        def hear(line: dict[str, Any]) -> None:
            nonlocal rank, polite
            if rank is None:
                if not secrets.compare_digest(str(line.get("hello")), self._secret):
                    raise OSError("a stranger")
                rank = int(line["rank"])
                with self._lock:
                    self._members[rank] = peer
                    peer.sendall(b"\n")
            elif "bye" in line:
                polite = True
            else:
                self._pass_on(line, but=rank)

        _read_lines(peer, hear)
        peer.close()
        if rank is not None:
            with self._lock:
                self._members.pop(rank, None)
            if not polite:
                self._pass_on({"gone": rank}, but=rank)

    def _pass_on(self, line: dict[str, Any], *, but: int) -> None:
        data = json.dumps(line).encode() + b"\n"
        with self._lock:
            for rank, peer in self._members.items():
                if rank != but:
                    try:
                        peer.sendall(data)
                    except OSError:
                        pass


def _read_lines(peer: socket.socket, hear: Callable[[dict[str, Any]], None]) -> None:
    rest = b""
    try:
        while data := peer.recv(65536):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                hear(json.loads(line))
    except (OSError, ValueError):
        return


def _reach(addresses: list[list[Any]]) -> socket.socket:
    reasons = []
    for host, port in addresses:
        try:
            peer = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            reasons.append(f"{host}:{port}: {error}")
            continue
        peer.settimeout(None)
        _keep_alive(peer)
        close_in_forks(peer)
        return peer
    raise StorageError(
        f"cannot reach rank 0 for news of saves ({'; '.join(reasons)})",
        hint="let the hosts of the job reach each other on all TCP ports, as gloo needs too",
    )


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _own_hosts() -> list[str]:
    hosts = [os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only picks the outgoing interface
            hosts.append(probe.getsockname()[0])
    except OSError:
        pass
    return list(dict.fromkeys(host for host in hosts if host))


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
