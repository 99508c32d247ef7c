"""Checkpoints of other torch releases load bit for bit through our reader."""

from __future__ import annotations

import hashlib

import pytest
import torch
from golden_cases import Golden, golden_cases
from torch_side.states import bits

from ckptool.errors import CkptoolError
from ckptool.model import TensorEntry, ValueEntry
from ckptool.planning.boxes import whole_box
from ckptool.storage import open_store
from ckptool.torch import values
from ckptool.torch.compressed import decompress_value
from ckptool.torch.loading import needs_of
from ckptool.torch.local_state import torch_dtype
from ckptool.torch.opening import open_alone
from ckptool.torch.reading import read_needs

CASES = [case for case in golden_cases() if (case.path / ".metadata").exists()]
OTHER_FORMS = ("safetensors-fs",)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_checkpoint_loads(case: Golden) -> None:
    """Every tensor has the bits that the release itself loads, and every plain value decodes."""
    store = open_store(case.path)
    opened = open_alone(store)
    if any(form in case.name for form in OTHER_FORMS):
        pytest.skip("not items of torch.save")
    for key, entry in opened.index.entries.items():
        if isinstance(entry, ValueEntry):
            _decode(store, entry, plain="objects" not in case.name)
            continue
        assert isinstance(entry, TensorEntry)
        target = torch.zeros(entry.shape, dtype=torch_dtype(entry.dtype))
        needs = needs_of(opened, key, whole_box(entry.shape), target)
        count = read_needs(store, needs)
        assert hashlib.sha256(bits(target)).hexdigest() == case.entries[key]["sha256"], key
        if "no-crc" in case.name:
            assert count.unverified == count.needed


def _decode(store: object, entry: ValueEntry, *, plain: bool) -> None:
    assert entry.item is not None
    item = entry.item
    data = store.read(item.file, start=item.offset, end=item.end)  # type: ignore[attr-defined]
    try:
        values.decode(entry.key, decompress_value(entry.key, item, data))
    except CkptoolError:
        assert not plain
