"""Outputs that are written in order: their parts are made side by side all the same."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from plain_checkpoint import random_array, rows_of, write_checkpoint

from ckptool.engine import worker
from ckptool.engine.run import How
from ckptool.errors import StorageError
from ckptool.operations.export import export
from ckptool.operations.reshard import reshard

HOW = How(max_memory=1 << 18, jobs=4)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Many parts of HOW's size, in two shard files."""
    monkeypatch.setattr("ckptool.engine.run.IN_ORDER_JOB_BYTES", HOW.max_memory // 4)
    tensors = {
        key: rows_of(random_array((64, 1000), "float32", seed=seed), "float32", 40, 24)
        for seed, key in enumerate(("a", "b"))
    }
    write_checkpoint(tmp_path / "source", tensors, num_files=2)
    return tmp_path / "source"


class Odd(LocalFileSystem):  # type: ignore[misc]
    """A file system that we know nothing special about."""

    protocol = "odd"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("odd://")))


def test_a_store_that_is_written_in_order(source: Path, tmp_path: Path) -> None:
    """The same bytes as anywhere else, though parts are done out of order."""
    fsspec.register_implementation("odd", Odd, clobber=True)
    for name in ("x.safetensors", "x.pt"):
        export(str(source), str(tmp_path / "local" / name), everything=True)
        export(str(source), f"odd://{tmp_path}/odd/{name}", everything=True, how=HOW)
        local, odd = (tmp_path / folder / name for folder in ("local", "odd"))
        assert odd.read_bytes() == local.read_bytes()


def test_parts_are_made_side_by_side(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts are read at once, though compressed files are written in order."""
    together = threading.Barrier(2, timeout=20)
    calls = itertools.count()
    fill = worker._Filling.fill

    def meet_first(self: Any, known: Any) -> int:
        if next(calls) < 2:
            together.wait()  # raises where the other one does not come
        return fill(self, known)

    monkeypatch.setattr(worker._Filling, "fill", meet_first)
    reshard(str(source), str(tmp_path / "new"), to=2, merge=True, compress="zstd", how=HOW)
    assert next(calls) > 8
    monkeypatch.undo()
    for name in ("source", "new"):
        export(str(tmp_path / name), str(tmp_path / f"{name}.safetensors"), everything=True)
    ours, theirs = (tmp_path / f"{name}.safetensors" for name in ("new", "source"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("number", [0, 3])
def test_nobody_waits_for_a_part_that_failed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Parts behind one that cannot be made are given up, and its error is the one that is told."""
    fill = worker._Filling.fill
    others = threading.Semaphore(0)

    def fail_late(self: Any, known: Any) -> int:
        if (self._step.output, self._step.number) != (0, number):
            others.release()
            return fill(self, known)
        assert others.acquire(timeout=20), "no other part was being made"
        raise StorageError("the part that failed")

    monkeypatch.setattr(worker._Filling, "fill", fail_late)
    with pytest.raises(StorageError, match="the part that failed"):
        reshard(str(source), str(tmp_path / "new"), to=2, merge=True, compress="zstd", how=HOW)
    assert not list((tmp_path / "new").rglob("*distcp*"))
