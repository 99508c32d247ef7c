"""The journal of a run: what is done, so that an interrupted run does only what is missing.

It stands at the destination: ``.ckptool-journal.json`` in a folder, ``NAME.ckptool-journal.json``
beside one file. Its first line says which plan it belongs to; each further line is a JSON
record: an output that was begun (with the token of its assembly), a part that is finished (with
its CRC-32s), an output that was published. Where a store can append, lines are appended as they
come; elsewhere they go into numbered objects beside it, every few seconds. A journal holds
URLs, never options or secrets. Whatever else stands at its place when it is taken up or
discarded, begun and never finished, was left by the run that was killed, and goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ckptool.engine import grouped
from ckptool.engine.grouped import MEMBER_MARK
from ckptool.engine.journal_records import (
    Begun,
    JournalHeader,
    find_journal,
    replay,
    result_json,
)
from ckptool.engine.sinks import Writing
from ckptool.engine.worker import StepResult
from ckptool.errors import ObjectMissingError
from ckptool.layout import JOURNAL_NAME
from ckptool.planning.copies import PartGroup
from ckptool.planning.parts import Step
from ckptool.planning.plan import Output
from ckptool.storage.base import PartReceipt, PendingUpload, Store

__all__ = ["Journal", "JournalHeader", "find_journal"]

FLUSH_S = 2.0


class Journal:
    """Keeps the records of one run; used by its coordinator only."""

    def __init__(
        self,
        store: Store,
        key: str,
        header: JournalHeader,
        *,
        begun: dict[int, Begun],
        number: int,
    ) -> None:
        self._store, self._key, self._header = store, key, header
        self._begun = begun
        self._number = number
        self._num_parts = 0
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._beside: tuple[Future[Any], list[str]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @classmethod
    def create(cls, store: Store, key: str, header: JournalHeader) -> Journal:
        """Begin a journal; nothing else has been written yet."""
        line = json.dumps(header.to_json()) + "\n"
        store.put(key, line.encode(), if_absent=True)
        return cls(store, key, header, begun={}, number=1)

    @classmethod
    def resume(cls, store: Store, key: str, header: JournalHeader) -> Journal:
        """Read what an earlier run left; ``header`` as ``find_journal`` gave it."""
        begun: dict[int, Begun] = {}
        keys = _segments(store, key)
        for name in (key, *keys):
            lines = store.read(name).split(b"\n")
            for line in lines[1:] if name == key else lines:
                replay(begun, line)
        last = int(keys[-1].rpartition(".")[2]) if keys else 0
        journal = cls(store, key, header, begun=begun, number=last + 1)
        journal._lines.append("\n")  # the last line may have been cut short
        return journal

    def part_bytes(self, index: int) -> int | None:
        """The size of the parts of output ``index`` as an earlier run cut it."""
        begun = self._begun.get(index)
        return None if begun is None else begun.part_bytes

    def begin(
        self,
        index: int,
        output: Output,
        part_bytes: int,
        writing: Writing,
        *,
        groups: Sequence[PartGroup] = (),
    ) -> None:
        """Open output ``index``, or take up what was left of it."""
        begun = self._begun.get(index)
        if begun is not None and self._take_up(index, output, begun, writing):
            return
        writing.open(index, groups=groups)
        token = writing.target(index).token
        self._begun[index] = Begun(output.key, token, part_bytes)
        self._add({"begin": index, "key": output.key, "token": token, "part_bytes": part_bytes})
        self.flush()

    def result_of(self, step: Step) -> StepResult | None:
        """What an earlier run knew of a part that is still there."""
        return self._begun[step.output].results.get(step.number)

    def listed(self, step: Step) -> PartReceipt | None:
        """The receipt of a part that the server has though no record tells of it."""
        receipt = self._begun[step.output].listed.get(step.number)
        return receipt if receipt is not None and receipt.num_bytes == step.num_bytes else None

    def finished(self, step: Step, result: StepResult) -> None:
        """Record a part."""
        self._num_parts += 1
        self._add({"part": step.number, "start": step.start, **result_json(result)})
        if self._store.capabilities.append:
            self.flush()
        elif time.monotonic() - self._flushed > FLUSH_S:
            self._flush_beside()

    def published(self, index: int) -> None:
        """Record that an output is visible under its name."""
        self._add({"published": index})
        self.flush()

    def flush(self) -> None:
        """Write what was recorded since the last time."""
        self._settle()
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        if self._store.capabilities.append:
            self._store.append(self._key, data)
        else:
            self._store.put(self._next_key(), data)
        self._lines = []
        self._flushed = time.monotonic()

    def remove(self) -> None:
        """The run is over: nothing of the journal stays."""
        self._drop_beside()
        for name in (*_segments(self._store, self._key), self._key):
            self._store.delete(name)

    @property
    def has_parts(self) -> bool:
        """Whether there is anything worth keeping."""
        return self._num_parts > 0 or any(begun.results for begun in self._begun.values())

    def sweep(self) -> None:
        """Drop what was begun and never recorded: the run was killed in between."""
        known = {token for begun in self._begun.values() for token in begun.tokens}
        for upload in self._uploads():
            if upload.token not in known:
                self._store.abort_upload(upload.key, upload.token)

    def discard(self) -> None:
        """Leave nothing of the run, neither begun nor published; the journal itself stays."""
        self._drop_beside()
        uploads = self._uploads()
        pending = {upload.token for upload in uploads}
        for key in self._header.commits:
            self._store.delete(key)
        for begun in self._begun.values():
            was_published = pending.isdisjoint(begun.tokens)
            grouped.drop(self._store, *begun.place)
            if was_published:
                self._store.delete(begun.key)
        for upload in uploads:
            self._store.abort_upload(upload.key, upload.token)

    def _uploads(self) -> list[PendingUpload]:
        """What was begun and not finished at the destination: a folder, or one name in it."""
        name = self._key.removesuffix(JOURNAL_NAME)
        return [
            upload
            for upload in self._store.list_uploads()
            if not name
            or upload.key == name
            or upload.key.startswith((self._key, f"{name}{MEMBER_MARK}"))
        ]

    def _flush_beside(self) -> None:
        """Write while the run goes on: a busy server takes its time for a small object, too."""
        if self._beside is not None and not self._beside[0].done():
            return
        self._settle()
        lines, self._lines = self._lines, []
        future = self._pool.submit(self._store.put, self._next_key(), "".join(lines).encode())
        self._beside = (future, lines)
        self._flushed = time.monotonic()

    def _settle(self) -> None:
        """Wait for what is being written; what failed is to be written again."""
        if self._beside is None:
            return
        (future, lines), self._beside = self._beside, None
        try:
            future.result()
        except BaseException:
            self._lines = lines + self._lines
            raise

    def _drop_beside(self) -> None:
        """Let nothing be written from now on; whether the last of it was does not matter."""
        if self._beside is not None:
            wait([self._beside[0]])
            self._beside = None

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._key}.{self._number - 1:06d}"

    def _add(self, record: dict[str, Any]) -> None:
        self._lines.append(json.dumps(record, separators=(",", ":")) + "\n")

    def _take_up(self, index: int, output: Output, begun: Begun, writing: Writing) -> bool:
        """Attach to what was left and forget the parts that are not there any more."""
        if begun.published or self._is_published(output, begun):
            grouped.drop(self._store, *begun.place)
            writing.mark_published(index)
            return True
        assembly = writing.attach(index, begun.token)
        results = begun.results.values()
        claims = [(r.receipt, r.start, r.crc32) for r in results if r.receipt is not None]
        try:
            there = assembly.surviving(claims)
            begun.listed = {receipt.number: receipt for receipt in assembly.listed_parts()}
        except ObjectMissingError:
            writing.detach(index)
            grouped.drop(self._store, *begun.place)
            return False
        begun.results = {n: r for n, r in begun.results.items() if n in there}
        return True

    def _is_published(self, output: Output, begun: Begun) -> bool:
        """Whether the object is there whole: the run ended between publishing and recording."""
        done = sum(r.receipt.num_bytes for r in begun.results.values() if r.receipt is not None)
        if done != output.num_bytes:
            return False
        try:
            return self._store.info(output.key).num_bytes == output.num_bytes
        except ObjectMissingError:
            return False


def _segments(store: Store, key: str) -> list[str]:
    folder = key.rpartition("/")[0]
    found = (info.key for info in store.list_level(folder).objects)
    return sorted(k for k in found if k.startswith(f"{key}.") and k[len(key) + 1 :].isdigit())
