"""The journal of a run: what is done, so that an interrupted run does only what is missing.

It stands at the destination: ``.ckptool-journal.json`` in a folder, ``NAME.ckptool-journal.json``
beside one file. Its first line says which plan it belongs to; each further line is a JSON
record: an output that was begun (with the token of its assembly), a part that is finished (with
its CRC-32s), an output that was published. Where a store can append, lines are appended as they
come; elsewhere they go into numbered objects beside it, every few seconds. A journal holds
URLs, never options or secrets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptool.engine.cast import CastCount
from ckptool.engine.sinks import Writing
from ckptool.engine.worker import StepResult
from ckptool.errors import DamagedError, ObjectMissingError
from ckptool.planning.parts import Step
from ckptool.planning.plan import Output
from ckptool.storage.base import PartReceipt, Store

__all__ = ["Journal", "JournalHeader", "find_journal", "is_journal_key"]

SCHEMA = "ckptool.journal/1"
FLUSH_S = 2.0
_MARK = ".ckptool-journal.json"


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Which run a journal belongs to; ``plan`` is the digest of its byte plan."""

    operation: str
    source: str
    request: Mapping[str, Any]
    plan: str

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


@dataclass
class _Begun:
    """An output as an earlier run left it."""

    key: str
    token: str
    part_bytes: int
    results: dict[int, StepResult] = field(default_factory=dict)
    listed: dict[int, PartReceipt] = field(default_factory=dict)
    published: bool = False


def is_journal_key(key: str) -> bool:
    """Whether an object belongs to a journal."""
    return _MARK in key


def find_journal(store: Store, key: str) -> JournalHeader | None:
    """The header of the journal at ``key``, None where there is none."""
    try:
        text = store.read(key)
    except ObjectMissingError:
        return None
    return _header(store, key, text.split(b"\n", 1)[0])


class Journal:
    """Keeps the records of one run; used by its coordinator only."""

    def __init__(self, store: Store, key: str, *, begun: dict[int, _Begun], number: int) -> None:
        self._store, self._key = store, key
        self._begun = begun
        self._number = number
        self._num_parts = 0
        self._lines: list[str] = []
        self._flushed = time.monotonic()

    @classmethod
    def create(cls, store: Store, key: str, header: JournalHeader) -> Journal:
        """Begin a journal; nothing else has been written yet."""
        line = json.dumps(header.to_json()) + "\n"
        store.put(key, line.encode(), if_absent=True)
        return cls(store, key, begun={}, number=1)

    @classmethod
    def resume(cls, store: Store, key: str) -> Journal:
        """Read what an earlier run left."""
        begun: dict[int, _Begun] = {}
        keys = _segments(store, key)
        for name in (key, *keys):
            lines = store.read(name).split(b"\n")
            for line in lines[1:] if name == key else lines:
                _replay(begun, line)
        return cls(store, key, begun=begun, number=len(keys) + 1)

    def begin(self, index: int, output: Output, part_bytes: int, writing: Writing) -> int:
        """Open output ``index``, or take up what was left of it; returns the size of its parts."""
        begun = self._begun.get(index)
        if begun is not None and self._take_up(index, output, begun, writing):
            return begun.part_bytes
        writing.open(index)
        token = writing.target(index).token
        self._begun[index] = _Begun(output.key, token, part_bytes)
        self._add({"begin": index, "key": output.key, "token": token, "part_bytes": part_bytes})
        self.flush()
        return part_bytes

    def result_of(self, step: Step) -> StepResult | None:
        """What an earlier run knew of a part that is still there."""
        return self._begun[step.output].results.get(step.number)

    def listed(self, step: Step) -> PartReceipt | None:
        """The receipt of a part that the server has though no record tells of it."""
        receipt = self._begun[step.output].listed.get(step.number)
        same = receipt is not None and receipt.num_bytes == step.num_bytes
        return receipt if same and receipt is not None and receipt.checksum is not None else None

    def finished(self, step: Step, result: StepResult) -> None:
        """Record a part."""
        self._num_parts += 1
        self._add({"part": step.number, "start": step.start, **_result_json(result)})
        if self._store.capabilities.append or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def published(self, index: int) -> None:
        """Record that an output is visible under its name."""
        self._add({"published": index})
        self.flush()

    def flush(self) -> None:
        """Write what was recorded since the last time."""
        if not self._lines:
            return
        data = "".join(self._lines).encode()
        if self._store.capabilities.append:
            self._store.append(self._key, data)
        else:
            self._store.put(f"{self._key}.{self._number:06d}", data)
            self._number += 1
        self._lines = []
        self._flushed = time.monotonic()

    def remove(self) -> None:
        """The run is over: nothing of the journal stays."""
        for name in (*_segments(self._store, self._key), self._key):
            self._store.delete(name)

    @property
    def has_parts(self) -> bool:
        """Whether there is anything worth keeping."""
        return self._num_parts > 0 or any(begun.results for begun in self._begun.values())

    def discard(self) -> None:
        """Abort what was begun, and delete what was published."""
        for begun in self._begun.values():
            self._store.abort_upload(begun.key, begun.token)
            if begun.published:
                self._store.delete(begun.key)

    def _add(self, record: dict[str, Any]) -> None:
        self._lines.append(json.dumps(record, separators=(",", ":")) + "\n")

    def _take_up(self, index: int, output: Output, begun: _Begun, writing: Writing) -> bool:
        """Attach to what was left and forget the parts that are not there any more."""
        if begun.published or self._is_published(output, begun):
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
            return False
        begun.results = {n: r for n, r in begun.results.items() if n in there}
        return True

    def _is_published(self, output: Output, begun: _Begun) -> bool:
        """Whether the object is there whole: the run ended between publishing and recording."""
        done = sum(r.receipt.num_bytes for r in begun.results.values() if r.receipt is not None)
        if done != output.num_bytes:
            return False
        try:
            return self._store.info(output.key).num_bytes == output.num_bytes
        except ObjectMissingError:
            return False


def _header(store: Store, key: str, line: bytes) -> JournalHeader:
    try:
        found = json.loads(line)
        if found["schema"] != SCHEMA:
            raise ValueError(found["schema"])
        return JournalHeader(found["operation"], found["source"], found["request"], found["plan"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{store.url_of(key)} is no journal that this version reads: {error}",
            hint="remove it, and what the interrupted run left, by hand",
            url=store.url_of(key),
        ) from error


def _segments(store: Store, key: str) -> list[str]:
    folder = key.rpartition("/")[0]
    found = (info.key for info in store.list_level(folder).objects)
    return sorted(k for k in found if k.startswith(f"{key}.") and k[len(key) + 1 :].isdigit())


def _replay(begun: dict[int, _Begun], line: bytes) -> None:
    """Take one record; a line that a crash cut short is as if it had not been written."""
    if not line.strip():
        return
    try:
        record = json.loads(line)
    except ValueError:
        return
    if "begin" in record:
        begun[record["begin"]] = _Begun(record["key"], record["token"], record["part_bytes"])
    elif "published" in record:
        begun[record["published"]].published = True
    elif "part" in record:
        result = _result_of_json(record)
        begun[result.output].results[result.number] = result


def _result_json(result: StepResult) -> dict[str, Any]:
    receipt = result.receipt
    assert receipt is not None
    return {
        "output": result.output,
        "crc32": result.crc32,
        "receipt": [receipt.num_bytes, receipt.token, receipt.checksum],
        "proofs": result.proofs,
        "sums": result.sums,
        "settled": result.settled,
        "trusted": result.trusted,
        "casts": [[c.entry, c.overflows, c.underflows] for c in result.casts],
    }


def _result_of_json(record: Mapping[str, Any]) -> StepResult:
    num_bytes, token, checksum = record["receipt"]
    result = StepResult(
        record["output"],
        record["part"],
        record["crc32"],
        receipt=PartReceipt(record["part"], num_bytes, token, checksum),
        start=record["start"],
    )
    result.proofs = [tuple(row) for row in record["proofs"]]
    result.sums = [tuple(row) for row in record["sums"]]
    result.settled = [tuple(row) for row in record["settled"]]
    result.trusted = list(record["trusted"])
    result.casts = [CastCount(*row) for row in record["casts"]]
    return result
