"""The saver's group of ranks: what it leaves behind in the process that it lives in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def test_the_last_collective_is_held(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's thread is never the last owner of a tensor: freed at exit, it would abort the rank."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def recorded(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            for arg in args:
                of_arg = arg if isinstance(arg, list) else [arg]
                tensors.extend(weakref.ref(t) for t in of_arg if isinstance(t, torch.Tensor))
            return real(*args, **options)

        return call

    for name in ("all_gather", "broadcast", "gather", "scatter"):
        monkeypatch.setattr(dist, name, recorded(name))
    for call in (
        lambda: group.all_gather(b"all"),
        lambda: group.gather(b"one"),
        lambda: group.broadcast(b"from rank 0"),
        lambda: group.scatter([b"row"]),
        lambda: group.broadcast_tensor(torch.zeros(3), source=0),
    ):
        call()
        gc.collect()
        assert tensors[-1]() is not None
    assert tensors[0]() is None, "what is older than that is given back"


def test_a_closed_group_leaves_no_thread(group: Group) -> None:
    """A closed group's gloo threads have ended, those of the training's group have not."""
    group.all_gather(b"x")
    before = _num_gloo_threads()
    group.close()
    assert 0 < _num_gloo_threads() < before


def _num_gloo_threads() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("pt_gloo") for name in names)
