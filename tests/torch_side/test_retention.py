"""Which steps go, in which order their files go, and what is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from recording_store import RecordingStore

from ckptool.errors import DamagedError
from ckptool.storage import open_store
from ckptool.torch.retention import (
    Retention,
    committed_steps,
    delete_step,
    prune,
    steps_to_delete,
)


def _step(
    root: Path, name: str, *, committed: bool = True, shard: str = "__0_0.ab12.distcp"
) -> None:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / shard).write_bytes(b"shard")
    if committed:
        (folder / ".metadata").write_bytes(b"index")


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (Retention(), []),
        (Retention(keep_last=2), [10, 20, 30]),
        (Retention(keep_last=1, keep_every=20), [10, 30]),
        (Retention(keep_every=100), [10, 20, 30, 40]),
    ],
)
def test_the_rule_names_what_goes(rule: Retention, gone: list[int]) -> None:
    """keep_last and keep_every add up, and the newest step always stays."""
    steps = {number: f"step-{number:08d}" for number in (10, 20, 30, 40, 50)}
    assert steps_to_delete(steps, rule) == [steps[number] for number in gone]


def test_names_of_others_are_never_chosen() -> None:
    """A step that somebody else named stays, whatever the rule says."""
    assert steps_to_delete({1: "epoch-1", 2: "step-00000002"}, Retention(keep_last=1)) == []


def test_metadata_goes_first(tmp_path: Path) -> None:
    """An interruption of a delete leaves an uncommitted step, never a damaged one."""
    _step(tmp_path, "step-00000001")
    _step(tmp_path, "step-00000002")
    store = RecordingStore(open_store(tmp_path))
    delete_step(store, "step-00000001")
    deleted = [key for verb, key, _, _ in store.calls if verb == "delete"]
    assert deleted[0].endswith(".metadata")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"], "no empty folder"


def test_unfinished_steps_behind_the_newest_go(tmp_path: Path) -> None:
    """What never committed goes once a later step is committed; foreign files stay."""
    _step(tmp_path, "step-00000001", committed=False)
    _step(tmp_path, "step-00000002", committed=False, shard="model.safetensors")
    _step(tmp_path, "step-00000003")
    _step(tmp_path, "step-00000004", committed=False)
    store = open_store(tmp_path)
    assert prune(store, Retention()) == ["step-00000001"]
    names = {info.key.split("/")[0] for info in store.list()}
    assert names == {"step-00000002", "step-00000003", "step-00000004"}


def test_two_steps_of_one_number_are_an_error(tmp_path: Path) -> None:
    """Nobody can say which of them is the step."""
    _step(tmp_path, "step-00000001")
    _step(tmp_path, "old-1")
    with pytest.raises(DamagedError, match="two committed steps 1"):
        committed_steps(open_store(tmp_path))
