"""The lines of a journal: which run it is of, and what a part's result looks like in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptool.engine import grouped
from ckptool.engine.cast import CastCount
from ckptool.engine.worker import StepResult
from ckptool.errors import DamagedError, ObjectMissingError
from ckptool.storage.base import PartReceipt, Store

__all__ = ["Begun", "JournalHeader", "find_journal", "replay", "result_json"]

SCHEMA = "ckptool.journal/1"


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Which run a journal belongs to; ``plan`` is the digest of its byte plan.

    ``commits`` are the keys that its end writes, in the order in which a discard takes them
    away: what makes a result look whole comes first.
    """

    operation: str
    source: str
    request: Mapping[str, Any]
    plan: str
    commits: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


@dataclass
class Begun:
    """An output as an earlier run left it."""

    key: str
    token: str
    part_bytes: int
    results: dict[int, StepResult] = field(default_factory=dict)
    listed: dict[int, PartReceipt] = field(default_factory=dict)
    published: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Its key, and the token that names its uploads."""
        return self.key, self.token

    @property
    def tokens(self) -> list[str]:
        """Of its uploads, as the store lists them."""
        return [token for _, token in grouped.uploads_of(*self.place)]


def find_journal(store: Store, key: str) -> JournalHeader | None:
    """The header of the journal at ``key``, None where there is none."""
    try:
        text = store.read(key)
    except ObjectMissingError:
        return None
    return _header(store, key, text.split(b"\n", 1)[0])


def replay(begun: dict[int, Begun], line: bytes) -> None:
    """Take one record; a line that a crash cut short is as if it had not been written."""
    if not line.strip():
        return
    try:
        record = json.loads(line)
    except ValueError:
        return
    if "begin" in record:
        begun[record["begin"]] = Begun(record["key"], record["token"], record["part_bytes"])
    elif "published" in record:
        begun[record["published"]].published = True
    elif "part" in record:
        result = _result_of_json(record)
        begun[result.output].results[result.number] = result


def result_json(result: StepResult) -> dict[str, Any]:
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


def _header(store: Store, key: str, line: bytes) -> JournalHeader:
    try:
        found = json.loads(line)
        if found["schema"] != SCHEMA:
            raise ValueError(found["schema"])
        return JournalHeader(
            found["operation"],
            found["source"],
            found["request"],
            found["plan"],
            tuple(found["commits"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{store.url_of(key)} is no journal that this version reads: {error}",
            hint="remove it, and what the interrupted run left, by hand",
            url=store.url_of(key),
        ) from error
