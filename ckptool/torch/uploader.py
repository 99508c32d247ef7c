"""The process beside each rank that encodes and uploads what the rank staged.

Started as ``python -m ckptool.torch.uploader FD``; it loads no torch. It shares the staged
memory, takes orders over a socket, and when its rank dies it aborts its upload and ends within
five seconds. Orders: ``open`` (a run), ``memory``, ``image``, ``upload``, ``layout``,
``commit``, ``stop``; answers: ``done``, ``failed``, ``alive``.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptool.errors import CkptoolError, StorageError
from ckptool.storage import Store, open_store
from ckptool.torch.channel import Channel, Message
from ckptool.torch.faults import part_fault
from ckptool.torch.image import Image, Region
from ckptool.torch.ranks_json import error_from_json, error_to_json
from ckptool.torch.save_commit import CommitOrder, commit_rows
from ckptool.torch.shard_file import write_shard_file
from ckptool.torch.shard_items import Payload, TensorItem, ValueItem

__all__ = ["main"]

_LAST_SECONDS = 4.0


class _Uploader:
    def __init__(self, channel: Channel, *, owner_pid: int) -> None:
        self._channel, self._owner_pid = channel, owner_pid
        self._orders: queue.Queue[Message | None] = queue.Queue()
        self._stopped: dict[str, CkptoolError] = {}
        self._orphaned = False
        self._busy: tuple[str, str] | None = None
        self._run: Store | None = None
        self._memory = memoryview(b"")
        self._image = Image((), 0)
        self._layout: Mapping[str, Any] = {}
        self._threads = 8
        self._rank = 0

    def serve(self) -> None:
        """Take orders until the rank is gone."""
        for work in (self._listen, self._watch):
            threading.Thread(target=work, daemon=True).start()
        while (message := self._orders.get()) is not None:
            order = message.facts
            try:
                answer = self._obey(order["op"], message)
                self._tell({"op": "done", "id": order["id"], "answer": answer})
            except Exception as error:
                answer = json.loads(error_to_json(error))
                self._tell({"op": "failed", "id": order["id"], "error": answer})

    def _obey(self, op: str, message: Message) -> Any:
        handlers: dict[str, Callable[[Message], Any]] = {
            "open": self._open,
            "memory": self._share,
            "image": self._set_image,
            "layout": self._set_layout,
            "upload": self._upload,
            "commit": self._commit,
        }
        return handlers[op](message)

    def _open(self, message: Message) -> None:
        facts = message.facts
        self._rank, self._threads = facts["rank"], facts["num_threads"]
        self._run = open_store(facts["url"], options=facts["options"])

    def _share(self, message: Message) -> None:
        (fd,) = message.fds
        size = int(message.facts["num_bytes"])
        self._memory = memoryview(mmap.mmap(fd, max(size, 1)))[:size]
        os.close(fd)

    def _set_image(self, message: Message) -> None:
        rows = json.loads(message.blob)
        self._image = Image(tuple(map(Region.from_json, rows["regions"])), rows["num_bytes"])

    def _set_layout(self, message: Message) -> None:
        self._layout = json.loads(message.blob)

    def _upload(self, message: Message) -> Any:
        facts = message.facts
        _take_fault(facts)
        assert self._run is not None
        attempt, folder, key = facts["attempt"], facts["name"], facts["key"]
        image = self._memory[: self._image.num_bytes]
        tensors = [
            TensorItem(row.dtype, row.sizes, _payload(image, row)) for row in self._image.regions
        ]

        def on_open(token: str) -> None:
            self._busy = (f"{folder}/{key}", token)

        def on_part(number: int, is_last: bool) -> None:
            part_fault(number, is_last, rank=self._rank, owner_pid=self._owner_pid)
            self._tell({"op": "alive"})

        try:
            shard = write_shard_file(
                self._run.child(folder),
                key,
                [*tensors, *_values(message)],
                image=image,
                compress=facts["compress"] is not None,
                num_threads=self._threads,
                verify_after_write=facts["verify_after_write"],
                on_open=on_open,
                on_part=on_part,
                should_stop=lambda: self._why_stop(attempt),
            )
        finally:
            self._busy = None
        return shard.to_json()

    def _commit(self, message: Message) -> Any:
        _take_fault(message.facts)
        assert self._run is not None
        order = CommitOrder.from_json(message.facts["order"])
        rows = json.loads(message.blob)
        return commit_rows(
            self._run, order, self._layout, rows, rank=self._rank, owner_pid=self._owner_pid
        )

    def _why_stop(self, attempt: str) -> CkptoolError | None:
        if self._orphaned:
            return StorageError("the rank is gone")
        return self._stopped.get(attempt)

    def _tell(self, facts: Mapping[str, Any]) -> None:
        try:
            self._channel.send(facts)
        except OSError:
            self._orphaned = True

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if message.facts["op"] == "stop":
                why = json.dumps(message.facts["error"])
                self._stopped[message.facts["attempt"]] = error_from_json(why, rank=None)
            else:
                self._orders.put(message)
        self._orphan()

    def _watch(self) -> None:
        """A child that a rank forked may keep its socket open: look at the rank itself too."""
        while os.getppid() == self._owner_pid:
            time.sleep(0.5)
        self._orphan()

    def _orphan(self) -> None:
        if self._orphaned:
            return
        self._orphaned = True
        self._orders.put(None)
        threading.Timer(_LAST_SECONDS, lambda: os._exit(3)).start()
        if self._busy is not None and self._run is not None:
            try:
                self._run.abort_upload(*self._busy)
            except CkptoolError:
                pass  # the next start aborts it


def main() -> None:
    """Serve the socket whose descriptor is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the rank decides when this ends
    os.nice(5)
    owner_pid = int(sys.argv[2])
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    _Uploader(channel, owner_pid=owner_pid).serve()
    os._exit(0)


def _payload(image: memoryview, row: Region) -> Payload:
    return lambda start, end: image[row.payload_start + start : row.payload_start + end]


def _values(message: Message) -> list[ValueItem]:
    at, found = 0, []
    for num_bytes in message.facts["values"]:
        found.append(ValueItem(message.blob[at : at + num_bytes]))
        at += num_bytes
    return found


def _take_fault(facts: Mapping[str, Any]) -> None:
    if facts.get("fault"):
        os.environ["CKPTOOL_FAULT"] = facts["fault"]
    else:
        os.environ.pop("CKPTOOL_FAULT", None)


if __name__ == "__main__":
    main()
