"""Every golden checkpoint is inspected and proved: what torch loads from it is what we say."""

from __future__ import annotations

import pytest
from golden_cases import golden_cases

from ckptool.operations.inspect import inspect
from ckptool.operations.open import open_checkpoint
from ckptool.operations.validate import validate

CASES = list(golden_cases())
BARE = ("hf-", "safetensors-fs")


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_entries_are_those_that_torch_loads(golden):
    """Keys, kinds, dtypes, shapes and chunks are those of expected.json."""
    report = inspect(str(golden.path))
    found = {e.key: e for e in report.entries}
    assert found.keys() == golden.entries.keys()
    index = open_checkpoint(str(golden.path)).index
    for key, expected in golden.entries.items():
        entry = found[key]
        assert entry.kind == expected["kind"]
        if "path" in expected:
            assert list(entry.path) == expected["path"]
        if entry.kind != "tensor":
            continue
        assert (entry.dtype, list(entry.shape)) == (expected["dtype"], expected["shape"])
        if "chunks" in expected:
            boxes = [[list(c.box.offsets), list(c.box.sizes)] for c in index.entries[key].chunks]
            assert sorted(boxes) == sorted(expected["chunks"])


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_all_bytes_are_whole(golden):
    """No golden checkpoint has an error; what cannot be proved is said to be so."""
    report = validate(str(golden.path), read_data=True)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert report.data.num_damaged == report.data.num_skipped == 0
    case = golden.name.split("/")[1]
    unproved = case.startswith(BARE) or case == "no-crc-1"
    assert report.data.num_ok == (0 if unproved else report.num_items)
    assert report.data.num_unverifiable == (report.num_items if unproved else 0)


def test_the_cases_are_there():
    """The golden checkpoints of three releases are all found."""
    assert len(CASES) >= 70
    assert {c.name.split("/")[0] for c in CASES} == {"torch-2.4.1", "torch-2.8.0", "torch-2.13.0"}
