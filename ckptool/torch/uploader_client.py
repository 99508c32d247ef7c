"""A rank's handle of its uploader process: start it, share memory with it, give it orders."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptool.errors import CkptoolError, StorageError, UsageError
from ckptool.storage.base import StoreRecipe
from ckptool.torch.channel import Channel
from ckptool.torch.image import Image
from ckptool.torch.ranks_json import error_from_json, error_to_json

__all__ = ["UploaderClient"]

_STOP_S = 5.0


class UploaderClient:
    """One process; orders are given by one thread at a time, and each is waited for."""

    def __init__(self, recipe: StoreRecipe, *, rank: int, num_threads: int) -> None:
        _check_options(recipe)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._numbers = itertools.count()
        self._answers = threading.Condition()
        self._answered: dict[int, Mapping[str, Any]] = {}
        self._dead = False
        self._heard = time.monotonic()
        self._on_alive: Callable[[], None] = lambda: None
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ckptool.torch.uploader",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
        )
        theirs.close()
        self._listener = threading.Thread(target=self._listen, name="ckptool-uploader", daemon=True)
        self._listener.start()
        self.order(
            "open",
            url=recipe.url,
            options=dict(recipe.options),
            rank=rank,
            num_threads=num_threads,
        )

    @property
    def is_alive(self) -> bool:
        return not self._dead and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def share(self, fd: int, num_bytes: int) -> None:
        """Let it see a memfd."""
        self.order("memory", fds=[fd], num_bytes=num_bytes)

    def set_image(self, image: Image) -> None:
        """Tell it where the payloads lie in the shared memory."""
        rows = {"regions": [r.to_json() for r in image.regions], "num_bytes": image.num_bytes}
        self.order("image", blob=json.dumps(rows).encode())

    def order(
        self,
        op: str,
        *,
        blob: bytes = b"",
        fds: Sequence[int] = (),
        on_alive: Callable[[], None] = lambda: None,
        why_stop: Callable[[], CkptoolError | None] = lambda: None,
        quiet_s: float = 60.0,
        **facts: Any,
    ) -> Any:
        """Give an order and return its answer; raises its error, or StorageError if it died.

        ``on_alive`` is called whenever the uploader shows progress; it is killed if it shows
        none for ``quiet_s``. Once ``why_stop`` gives an error, the order is broken off with it.
        """
        number = next(self._numbers)
        self._on_alive = on_alive
        self._heard = time.monotonic()
        fault = os.environ.get("CKPTOOL_FAULT")
        try:
            self._channel.send({"op": op, "id": number, "fault": fault, **facts}, blob, fds)
        except OSError as error:
            raise self._died() from error
        answer = self._await(number, facts.get("attempt", ""), why_stop, quiet_s)
        if answer["op"] == "failed":
            raise error_from_json(json.dumps(answer["error"]), rank=None)
        return answer["answer"]

    def close(self) -> None:
        """Let it end; it finishes nothing."""
        self._channel.close_both()
        try:
            self._process.wait(timeout=6)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(timeout=5)
        self._channel.close()

    def _await(
        self,
        number: int,
        attempt: str,
        why_stop: Callable[[], CkptoolError | None],
        quiet_s: float,
    ) -> Mapping[str, Any]:
        stopped: tuple[float, CkptoolError] | None = None
        with self._answers:
            while number not in self._answered:
                if self._dead:
                    raise stopped[1] if stopped else self._died()
                self._answers.wait(0.5)
                now = time.monotonic()
                if stopped is None and (error := why_stop()) is not None:
                    stopped = (now + _STOP_S, error)
                    self._stop(attempt, error)
                if stopped is not None and now > stopped[0]:
                    self._process.kill()
                elif now - self._heard > quiet_s:
                    self._process.kill()
                    raise StorageError(
                        f"the uploader process {self.pid} showed no progress for {quiet_s:g} s",
                        hint="it was killed; the next save starts another one",
                    )
            return self._answered.pop(number)

    def _stop(self, attempt: str, error: CkptoolError) -> None:
        why = json.loads(error_to_json(error))
        try:
            self._channel.send({"op": "stop", "attempt": attempt, "error": why})
        except OSError:
            pass

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._heard = time.monotonic()
            if message.facts["op"] == "alive":
                self._on_alive()
                continue
            with self._answers:
                self._answered[message.facts["id"]] = message.facts
                self._answers.notify_all()
        with self._answers:
            self._dead = True
            self._answers.notify_all()

    def _died(self) -> StorageError:
        code = self._process.poll()
        return StorageError(
            f"the uploader process {self._process.pid} ended"
            + (f" with exit code {code}" if code is not None else ""),
            hint="the next save starts another one; the host's log may say why it was killed",
        )


def _check_options(recipe: StoreRecipe) -> None:
    try:
        json.dumps(dict(recipe.options))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"storage_options for {recipe.url} hold what JSON cannot: {error}",
            hint='give plain values, or save with mode="sync"',
        ) from error
