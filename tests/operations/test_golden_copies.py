"""Every golden checkpoint, resharded and exported, holds what its release loads from it."""

import hashlib
import json
import subprocess
import sys

import pytest
from golden_cases import Golden, golden_cases

from ckptool.operations.export import export
from ckptool.operations.reshard import reshard

CASES = list(golden_cases())


def _digests(path):
    """SHA-256 of each tensor's bytes in a safetensors file, read by hand."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(data[start + a : start + b]).hexdigest()
        for name, row in header.items()
        for a, b in [row["data_offsets"]]
    }


def _storable(case: Golden) -> dict[str, str]:
    """The tensors for which safetensors has a dtype, with their digests."""
    missing = ("complex32", "complex128")
    return {k: row["sha256"] for k, row in case.tensors.items() if row["dtype"] not in missing}


def _assert_holds(case, url, out):
    wanted = _storable(case)
    if wanted:
        export(str(url), str(out), only=list(wanted), strip_prefix=None)
        assert _digests(out) == wanted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_export_holds_the_very_bits(case, tmp_path):
    """One safetensors file of every tensor equals what the release loads."""
    _assert_holds(case, case.path, tmp_path / "x.safetensors")


@pytest.mark.parametrize(("to", "merge"), [(1, True), (3, False), (16, True), (5, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reshard_keeps_every_bit(case, to, merge, tmp_path):
    """After any reshard the tensors are the same, and so are the entries."""
    result = reshard(str(case.path), str(tmp_path / "new"), to=to, merge=merge)
    assert set(result.planned.index.entries) == set(case.entries)
    _assert_holds(case, tmp_path / "new", tmp_path / "x.safetensors")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compressed_reshard_keeps_every_bit(case, tmp_path):
    """With --compress zstd the new items are compressed, and read back as they were."""
    reshard(str(case.path), str(tmp_path / "new"), to=3, merge=True, compress="zstd")
    _assert_holds(case, tmp_path / "new", tmp_path / "x.safetensors")


LOADER = """
import hashlib, json, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

def digest(t):
    t = t.resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

def flat(tree, prefix=""):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield name, digest(value)
        elif isinstance(value, (dict, list)):
            yield from flat(value, name + ".")

found = {}
for url in sys.argv[1:]:
    if url.endswith(".pt"):
        found[url] = dict(flat(torch.load(url, weights_only=True)))
    else:
        state = {}
        _load_state_dict(state, storage_reader=dcp.FileSystemReader(url),
                         planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        found[url] = dict(flat(state))
print(json.dumps(found))
"""


def test_stock_torch_reads_all_of_it(tmp_path):
    """dcp.load and torch.load(weights_only=True) of the installed torch see the same bits."""
    wanted = {}
    for case in CASES:
        out = tmp_path / case.name.replace("/", "-")
        reshard(str(case.path), str(out / "four"), to=4)
        reshard(str(out / "four"), str(out / "two"), to=2, merge=True)
        export(str(case.path), str(out / "all.pt"), everything=True)
        digests = {key: row["sha256"] for key, row in case.tensors.items()}
        # objects-1 holds values of a class that no reader has: torch would import it
        for name in ("all.pt",) if "objects" in case.name else ("four", "two", "all.pt"):
            wanted[str(out / name)] = digests
    loaded = subprocess.run(
        [sys.executable, "-c", LOADER, *wanted], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    found = json.loads(loaded.stdout)
    for url, digests in wanted.items():
        # a value may hold more tensors of its own
        assert {k: v for k, v in found[url].items() if k in digests} == digests, url
