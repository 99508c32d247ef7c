"""What a journal records while the run goes on, on a store that cannot append."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from ckptool.engine import journal as journal_module
from ckptool.engine.journal import Journal, JournalHeader, find_journal
from ckptool.engine.worker import StepResult
from ckptool.errors import StorageError
from ckptool.planning.parts import Step
from ckptool.storage import open_store
from ckptool.storage.base import PartReceipt

KEY = "out.ckptool-journal.json"
HEADER = JournalHeader("export", "s3://bucket/step-00000001", {}, "digest")


class Putting:
    """A store whose puts can be held up, or fail."""

    def __init__(self) -> None:
        self._store = open_store(f"memory://{uuid.uuid4().hex}")
        self.free = threading.Event()
        self.free.set()
        self.fails = False
        self.begun = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes, **more: Any) -> Any:
        self.begun.set()
        assert self.free.wait(30)
        if self.fails:
            raise StorageError("the server is away")
        return self._store.put(key, data, **more)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Putting]:
    monkeypatch.setattr(journal_module, "FLUSH_S", 0.0)
    putting = Putting()
    yield putting
    putting.free.set()


def _journal(store: Putting) -> Journal:
    journal = Journal.create(store, KEY, HEADER)
    journal._add({"begin": 0, "key": "out", "token": "t", "part_bytes": 8})
    journal.flush()
    return journal


def _finish(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        step = Step(0, "out", number, 8 * number, 8 * number + 8, (), ())
        result = StepResult(0, number, crc32=number, receipt=PartReceipt(number, 8), start=8)
        journal.finished(step, result)


def _recorded(store: Putting) -> set[int]:
    header = find_journal(store, KEY)
    assert header == HEADER
    begun = Journal.resume(store, KEY, header)._begun
    return set(begun[0].results)


def test_the_run_goes_on_while_records_are_written(store: Putting) -> None:
    """A slow put holds up nobody; what was finished meanwhile is recorded after it."""
    journal = _journal(store)
    store.free.clear()
    store.begun.clear()
    _finish(journal, 0)
    assert store.begun.wait(30)
    _finish(journal, 1, 2)
    assert _recorded(store) == set()
    store.free.set()
    journal.flush()
    assert _recorded(store) == {0, 1, 2}


def test_records_that_could_not_be_written_are_written_again(store: Putting) -> None:
    """The failure is raised, and a later flush, or a later run, loses nothing."""
    journal = _journal(store)
    store.fails = True
    _finish(journal, 0)
    with pytest.raises(StorageError, match="the server is away"):
        journal.flush()
    store.fails = False
    journal.flush()
    header = find_journal(store, KEY)
    assert header is not None
    resumed = Journal.resume(store, KEY, header)
    _finish(resumed, 1)
    resumed.flush()
    assert _recorded(store) == {0, 1}


@pytest.mark.parametrize("end", ["discard", "remove"])
def test_what_is_thrown_away_need_not_have_been_written(store: Putting, end: str) -> None:
    """A record that failed does not stop the run's end from clearing up."""
    journal = _journal(store)
    store.fails = True
    _finish(journal, 0)
    assert journal._beside is not None
    assert isinstance(journal._beside[0].exception(30), StorageError)
    store.fails = False
    getattr(journal, end)()
    journal.remove()
    assert [info.key for info in store.list()] == []


def test_nothing_is_written_behind_a_journal_that_is_removed(store: Putting) -> None:
    """What is on its way has arrived before the journal goes."""
    journal = _journal(store)
    store.free.clear()
    _finish(journal, 0)
    threading.Timer(0.2, store.free.set).start()
    journal.remove()
    assert [info.key for info in store.list()] == []
