"""export: one file or a folder, equal to stock torch's own to the bit."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import stock_ranks
from dcp_writer import flip_bit, save_plain
from exports import assert_same_tree, files, loaded, replace_item, saved_by_torch, tensors_of
from plain_checkpoint import Saved, random_array, read_safetensors, rows_of, write_checkpoint
from recording_store import RecordingStore

from ckptool.engine.run import How
from ckptool.errors import DamagedError, NotEmptyError, UsageError
from ckptool.model import Box
from ckptool.operations.export import export
from ckptool.storage import open_store

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def nested(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What stock torch's own dcp_to_torch_save makes of it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = tmp_path_factory.mktemp("stock") / "stock.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(stock), str(path))
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def test_all_in_safetensors_equals_the_stock_tensors(stock, tmp_path):
    """--all: every tensor under its own key, bit for bit, with the safetensors library."""
    wanted = stock_ranks.tensors()
    result = export(str(stock), str(tmp_path / "x.safetensors"), everything=True)
    found = tensors_of(tmp_path / "x.safetensors")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert stock_ranks.same(found[key], tensor), key
    assert set(result.values_left_out) >= set(stock_ranks.VALUES)


def test_all_in_a_pt_equals_dcp_to_torch_save(stock, nested, tmp_path):
    """--all to .pt: nesting, order of keys, values and every bit are stock's own."""
    result = export(str(stock), str(tmp_path / "x.pt"), everything=True)
    assert not result.values_left_out
    found = loaded(tmp_path / "x.pt")
    assert_same_tree(found, nested)
    assert found["optim"]["param_groups"] == stock_ranks.GROUPS
    assert [len(g["params"]) for g in found["optim"]["param_groups"]] == [2, 1, 0]


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.pth", "x.bin", "hf"])
def test_the_model_under_its_own_names(stock, tmp_path, name):
    """A plain export is the model's state dict: what load_state_dict takes."""
    result = export(str(stock), str(tmp_path / name))
    path = tmp_path / name / "model.safetensors" if name == "hf" else tmp_path / name
    found = tensors_of(path) if path.suffix == ".safetensors" else loaded(path)
    wanted = {
        key.removeprefix("model."): tensor
        for key, tensor in stock_ranks.tensors().items()
        if key.startswith("model.")
    }
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert stock_ranks.same(found[key], tensor), key
    assert result.layout.choice.prefix == "model."
    reasons = set(result.layout.choice.left_out.values())
    assert reasons == {"optimizer state", "random state", "counter", "value"}


def test_from_and_to_s3(stock, s3_url, s3_options, nested, tmp_path):
    """The same bytes as a local export, whichever end is on S3."""
    store = open_store(f"{s3_url}/src", options=s3_options)
    for path in stock.iterdir():
        store.put(path.name, path.read_bytes())
    export(str(stock), str(tmp_path / "local.pt"), everything=True)
    wanted = (tmp_path / "local.pt").read_bytes()
    export(f"{s3_url}/src", str(tmp_path / "from.pt"), everything=True, source_options=s3_options)
    assert (tmp_path / "from.pt").read_bytes() == wanted
    export(
        f"{s3_url}/src", f"{s3_url}/out/to.pt", everything=True,
        source_options=s3_options, dest_options=s3_options,
    )  # fmt: skip
    there = open_store(f"{s3_url}/out", options=s3_options)
    assert there.read("to.pt") == wanted
    assert [info.key for info in there.list()] == ["to.pt"]
    export(f"{s3_url}/src", f"{s3_url}/hf", source_options=s3_options, dest_options=s3_options)
    export(str(stock), str(tmp_path / "hf"))
    folder = open_store(f"{s3_url}/hf", options=s3_options)
    assert folder.read("model.safetensors") == (tmp_path / "hf/model.safetensors").read_bytes()


def test_other_urls(stock, tmp_path):
    """file:// and memory:// take the same bytes, at the root of a store too."""
    export(str(stock), str(tmp_path / "x.safetensors"))
    wanted = (tmp_path / "x.safetensors").read_bytes()
    export(str(stock), f"file://{tmp_path}/y.safetensors")
    assert (tmp_path / "y.safetensors").read_bytes() == wanted
    export(f"file://{stock}", "memory://exported/deep/z.safetensors")
    assert open_store("memory://exported/deep").read("z.safetensors") == wanted
    export(str(stock), "memory://root-of-it.safetensors")
    assert open_store("memory://").read("root-of-it.safetensors") == wanted


def test_a_relative_destination(stock, tmp_path, monkeypatch):
    """A bare file name is a file of the working folder."""
    monkeypatch.chdir(tmp_path)
    export(str(stock), "here.safetensors")
    export(str(stock), "below/here.safetensors")
    assert files(tmp_path) == ["below/here.safetensors", "here.safetensors"]


def test_a_run_is_its_newest_step(stock, tmp_path):
    """SOURCE may be a run: its newest committed step is exported."""
    shutil.copytree(stock, tmp_path / "run" / "step-7")
    shutil.copytree(stock, tmp_path / "run" / "step-9")
    (tmp_path / "run" / "step-9" / ".metadata").unlink()
    result = export(str(tmp_path / "run"), str(tmp_path / "x.pt"))
    assert result.source_url.endswith("step-7")


def test_shapes_are_never_guessed(tmp_path):
    """A first dim of 1, replicated buffers, 0-dim tensors, empty ones: their own shape each."""
    arrays = {
        "one": random_array((1, 17), "float32", seed=1),
        "buf": random_array((3,), "int64", seed=2),
        "scalar": random_array((), "float32", seed=3),
        "none": random_array((0, 4), "float32", seed=4),
    }
    saved = {
        "one": rows_of(arrays["one"], "float32", 1, 0),
        "buf": Saved(arrays["buf"], [Box((0,), (3,))] * 4, "int64"),
        "scalar": Saved(arrays["scalar"], [Box((), ())] * 4, "float32"),
        "none": rows_of(arrays["none"], "float32", 0),
    }
    write_checkpoint(tmp_path / "a", saved)
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    found = read_safetensors(tmp_path / "x.safetensors")
    assert {k: (v[1], v[2]) for k, v in found.items()} == {
        k: (a.shape, a.tobytes()) for k, a in arrays.items()
    }


def test_disjoint_slices_of_one_rank(tmp_path):
    """Rows r and r + 4 by rank r: placed by offset, not by rank."""
    array = random_array((8, 3), "float32", seed=2)
    order = [Box((row, 0), (1, 3)) for rank in range(4) for row in (rank, rank + 4)]
    write_checkpoint(tmp_path / "a", {"w": Saved(array, order, "float32")})
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["w"][2] == array.tobytes()


def test_strided_payloads_become_contiguous(tmp_path):
    """What torch stores of x.t() and of channels_last comes out row by row."""
    state = {
        "t": torch.arange(6.0).reshape(2, 3).t(),
        "cl": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "step": torch.arange(20.0).reshape(4, 5)[::2, 1:4],
    }
    save_plain(state, tmp_path / "a")
    for name in ("x.safetensors", "x.pt"):
        export(str(tmp_path / "a"), str(tmp_path / name), everything=True)
    for found in (tensors_of(tmp_path / "x.safetensors"), loaded(tmp_path / "x.pt")):
        for key, tensor in state.items():
            assert found[key].is_contiguous()
            assert stock_ranks.same(found[key], tensor.contiguous()), key


def test_a_slice_that_drags_its_storage(tmp_path):
    """torch.save(big[:2]) stores all of big: only the slice is exported, all of it is proved."""
    big = torch.arange(4000.0).reshape(1000, 4)
    save_plain({"w": big[:2].clone()}, tmp_path / "a")
    replace_item(tmp_path / "a", "w", saved_by_torch(big[:2]))
    result = export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["w"][2] == big[:2].numpy().tobytes()
    assert (tmp_path / "x.safetensors").stat().st_size < 1000
    assert result.report is not None
    assert result.report.payloads_proved == 1
    data = (tmp_path / "a" / "other.distcp").read_bytes()
    flip_bit(tmp_path / "a" / "other.distcp", data.index(big[900].numpy().tobytes()))
    with pytest.raises(DamagedError, match="w"):
        export(str(tmp_path / "a"), str(tmp_path / "y.safetensors"), everything=True)
    assert not (tmp_path / "y.safetensors").exists()


def test_replicas(tmp_path):
    """Boxes stored twice are fine, and the first is taken."""
    array = random_array((4, 2), "float32", seed=1)
    halves = rows_of(array, "float32", 2, 2).boxes
    write_checkpoint(tmp_path / "a", {"w": Saved(array, [*halves] * 2, "float32")})
    export(str(tmp_path / "a"), str(tmp_path / "x.safetensors"), everything=True)
    assert read_safetensors(tmp_path / "x.safetensors")["w"][2] == array.tobytes()


def test_one_file_takes_no_maximum(stock, tmp_path):
    """A file name together with --max-file-size, or with another --format: exit 2."""
    with pytest.raises(UsageError, match="--max-file-size"):
        export(str(stock), str(tmp_path / "x.pt"), max_file_size=1000)
    with pytest.raises(UsageError, match="--format"):
        export(str(stock), str(tmp_path / "x.pt"), format="safetensors")
    assert files(tmp_path) == []


def test_never_over_what_is_there(stock, tmp_path):
    """A file, a folder of that name, a folder with something in it: exit 11, untouched."""
    (tmp_path / "x.pt").write_bytes(b"mine")
    (tmp_path / "y.pt").mkdir()
    (tmp_path / "y.pt" / "z").write_bytes(b"mine")
    for name in ("x.pt", "y.pt", ""):
        with pytest.raises(NotEmptyError):
            export(str(stock), str(tmp_path / name))
    assert files(tmp_path) == ["x.pt", "y.pt/z"]
    assert (tmp_path / "x.pt").read_bytes() == b"mine"


def test_a_dry_run_creates_nothing(stock, tmp_path):
    """The plan is printed from the index; with a probe the exact sizes are known."""
    result = export(str(stock), str(tmp_path / "x.safetensors"), dry_run=True)
    assert result.report is None and result.plan is None
    probed = export(str(stock), str(tmp_path / "x.safetensors"), dry_run=True, probe_items=True)
    assert probed.plan is not None
    assert files(tmp_path) == []
    export(str(stock), str(tmp_path / "x.safetensors"))
    assert (tmp_path / "x.safetensors").stat().st_size == probed.plan.num_bytes


def test_every_byte_is_fetched_once(tmp_path, monkeypatch):
    """Bytes fetched are close to bytes needed, in few requests, whatever the parts."""
    array = random_array((256, 8192), "float32", seed=1)
    columns = [Box((0, c), (256, 2048)) for c in range(0, 8192, 2048)]
    rows = rows_of(array, "float32", *[64] * 4)
    write_checkpoint(tmp_path / "a", {"r": rows, "c": Saved(array, columns, "float32")})
    store = RecordingStore(open_store(str(tmp_path / "a")))
    monkeypatch.setattr("ckptool.operations.open.open_store", lambda url, options=None: store)
    cases: dict[str, dict[str, Any]] = {
        "x.safetensors": {},
        "x.pt": {},
        "half.safetensors": {"dtype": "bfloat16"},
        "small.safetensors": {"how": How(max_memory=4 << 20)},
    }
    for name, how in cases.items():
        store.reset()
        export(str(tmp_path / "a"), str(tmp_path / name), everything=True, **how)
        assert store.num_bytes["read"] < 1.05 * 2 * array.nbytes, name
        wanted = [c for c in store.calls if c[0] == "read" and c[3] - c[2] > 8192]
        seen: dict[str, list[tuple[int, int]]] = {}
        for _, key, start, end in wanted:
            seen.setdefault(key, []).append((start, end))
        for ranges in seen.values():
            ranges.sort()
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), name
        if "how" not in how:
            assert store.requests["read"] <= 1 + 2 * 8 + 40, name
