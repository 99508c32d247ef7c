"""The saver's group of ranks: what it leaves behind in the process that it lives in."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ckptool.torch.group import Group


@pytest.fixture
def group() -> Iterator[Group]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = Group(timeout_s=30)
    yield made
    made.close()
    dist.destroy_process_group()


def test_the_last_collective_is_held(group: Group) -> None:
    """gloo's thread is never the last owner of a tensor: freed at exit, it would abort the rank."""
    tensor = torch.zeros(3)
    known = weakref.ref(tensor)
    group.broadcast_tensor(tensor, source=0)
    del tensor
    gc.collect()
    assert known() is not None
    group.all_gather(b"next")
    deadline = time.monotonic() + 10  # gloo's thread lets go of it when it comes to it
    while known() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert known() is None, "what is older than the last one is given back"


def test_a_group_outlives_the_trainings_groups(group: Group) -> None:
    """A save in flight goes on after ``destroy_process_group``, and closes after another start."""
    dist.destroy_process_group()
    assert group.all_gather(b"x") == group.gather(b"x") == [b"x"]
    assert group.broadcast(b"x") == group.scatter([b"x"]) == b"x"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group.close()


def test_a_closed_group_leaves_no_thread(group: Group) -> None:
    """The threads of gloo that a group brought have ended once it is closed."""
    before = _threads()
    another = Group(timeout_s=30)
    another.all_gather(b"x")
    brought = _threads() - before
    assert brought
    another.close()
    assert not brought & _threads()


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))
