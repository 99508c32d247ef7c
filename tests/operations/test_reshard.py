"""reshard: stock torch loads what it writes, and whatever is wrong with a source stops it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stock_ranks
from dcp_writer import edited_metadata, flip_bit, item_of, save_plain
from exports import files
from plain_checkpoint import Saved, random_array, rows_of, write_checkpoint
from recording_store import RecordingStore

from ckptool.engine.run import How
from ckptool.errors import DamagedError, NotEmptyError, RefusedError, UsageError
from ckptool.model import Box, TensorEntry, ValueEntry
from ckptool.operations import reshard as reshard_module
from ckptool.operations.export import export
from ckptool.operations.open import open_checkpoint
from ckptool.operations.reshard import reshard
from ckptool.operations.validate import validate
from ckptool.storage import open_store


def boxes(url: Any, key: str) -> list[str]:
    entry = open_checkpoint(str(url)).index.entries[key]
    assert isinstance(entry, TensorEntry)
    return [str(chunk.box) for chunk in entry.chunks]


# what stock torch makes of it


@pytest.fixture(scope="module")
def resharded(stock, s3_server, s3_bucket, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Many reshards of one checkpoint, local and on S3, by URL; options beside each."""
    root = tmp_path_factory.mktemp("resharded")
    options = s3_server.storage_options()
    remote = f"s3://{s3_bucket}/resharded"
    made: dict[str, dict[str, Any]] = {}

    def make(source: str, dest: str, **how: Any) -> str:
        reshard(
            source,
            dest,
            source_options=options if "s3://" in source else None,
            dest_options=options if "s3://" in dest else None,
            **how,
        )
        made[dest] = options if "s3://" in dest else {}
        return dest

    sixteen = make(str(stock), str(root / "16"), to=16)
    make(str(stock), f"file://{root}/3", to=3)
    merged = make(sixteen, str(root / "16-3-merged"), to=3, merge=True)
    make(merged, str(root / "zstd"), to=5, merge=True, compress="zstd")
    there = make(str(stock), f"{remote}/16", to=16)
    make(there, f"{remote}/3", to=3)
    make(there, str(root / "from-s3"), to=2, merge=True)
    return made


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_stock_torch_loads_every_bit(resharded, num_ranks):
    """dcp.load at 1, 2 and 4 ranks: all tensors and values, from disk and from S3."""
    stock_ranks.assert_stock_loads(resharded, num_ranks=num_ranks)


def test_the_result_validates(resharded):
    """Every item is where the index says, and its CRC is right."""
    for url, options in resharded.items():
        report = validate(url, read_data=True, options=options)
        assert report.is_ok, report.findings
        assert report.data is not None
        assert report.data.num_unverifiable == report.data.num_skipped == 0


def test_step_and_manifest_say_where_it_came_from(resharded):
    """The step number is kept, and the manifest lists every shard file and the index."""
    for url, options in resharded.items():
        checkpoint = open_checkpoint(url, options=options)
        manifest = checkpoint.manifest
        assert manifest is not None
        assert checkpoint.step == manifest.step == 12
        listed = {k: n for k, n in checkpoint.sizes.items() if k.endswith((".distcp", ".index"))}
        assert {key: facts.num_bytes for key, facts in manifest.objects.items()} == listed
        assert checkpoint.findings == ()


# where the pieces go


def test_uneven_rows_follow_torch_chunk(tmp_path):
    """Six rows over four ranks are 2, 2, 2, 0: to 1, 3, 4, 8 and back, bit-equal."""
    array = random_array((6, 2), "float32", seed=3)
    write_checkpoint(tmp_path / "4", {"w": rows_of(array, "float32", 2, 2, 2, 0)})
    here = tmp_path / "4"
    wanted = {
        1: ["[0:6, 0:2]"],
        3: ["[0:2, 0:2]", "[2:4, 0:2]", "[4:6, 0:2]"],
        8: [*(f"[{r}:{r + 1}, 0:2]" for r in range(6)), "[6:6, 0:2]"],
        4: ["[0:2, 0:2]", "[2:4, 0:2]", "[4:6, 0:2]", "[6:6, 0:2]"],
    }
    for to in (1, 3, 4, 8, 4):
        there = tmp_path / f"{here.name}-{to}"
        reshard(str(here), str(there), to=to, merge=True)
        assert boxes(there, "w") == wanted[to]
        here = there
    reshard(str(here), str(tmp_path / "1"), to=1, merge=True)
    (item,) = (tmp_path / "1").glob("*.distcp")
    assert array.tobytes() in item.read_bytes()


def test_a_first_dim_of_one(tmp_path):
    """(1, 17) on two ranks stays (1, 17): no shape is guessed from the number of shards."""
    array = random_array((1, 17), "float32", seed=1)
    write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float32", 1, 0)})
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=2)
    entry = open_checkpoint(str(tmp_path / "b")).index.entries["w"]
    assert isinstance(entry, TensorEntry)
    assert entry.shape == (1, 17)


def test_disjoint_slices_of_one_rank(tmp_path):
    """A fused weight whose rank r holds rows r and r + 4 keeps its row order."""
    array = random_array((8, 3), "bfloat16", seed=2)
    order = [Box((row, 0), (1, 3)) for rank in range(4) for row in (rank, rank + 4)]
    write_checkpoint(tmp_path / "a", {"w": Saved(array, order, "bfloat16")})
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=1, merge=True)
    assert array.tobytes() in (tmp_path / "b" / "__0_0.distcp").read_bytes()


def test_each_rank_gets_its_rows_in_its_own_file(tmp_path):
    """Target r's rows stand in __r_0.distcp; values are rank 0's."""
    array = random_array((16, 3), "float32", seed=2)
    write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float32", 16)}, values={"it": 1})
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=16)
    index = open_checkpoint(str(tmp_path / "b")).index
    entry, value = index.entries["w"], index.entries["it"]
    assert isinstance(entry, TensorEntry) and isinstance(value, ValueEntry)
    found = {c.item.file: c.box.offsets[0] for c in entry.chunks if c.item}
    assert found == {f"__{rank}_0.distcp": rank for rank in range(16)}
    assert value.item is not None
    assert value.item.file == "__0_0.distcp"


def test_kept_items_are_copied_to_the_byte(tmp_path):
    """A chunk that lies in one target keeps framing and CRC; only cut ones are made anew."""
    array = random_array((8, 64), "float32", seed=5)
    write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float32", 2, 2, 2, 2)})
    result = reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=2)
    assert result.layout.num_kept == 4
    old = [(tmp_path / "a" / f"__{r}_0.distcp").read_bytes() for r in range(4)]
    new = [(tmp_path / "b" / f"__{r}_0.distcp").read_bytes() for r in range(2)]
    assert new == [old[0] + old[1], old[2] + old[3]]
    assert reshard(str(tmp_path / "a"), str(tmp_path / "c"), to=3).layout.num_kept == 3


def test_one_process_without_ranks_is_ordinary(tmp_path):
    """What one process saved with no_dist is split like any other."""
    import torch

    save_plain({"model": {"w": torch.arange(24.0).reshape(8, 3)}}, tmp_path / "a")
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=4)
    assert boxes(tmp_path / "b", "model.w") == [f"[{r}:{r + 2}, 0:3]" for r in (0, 2, 4, 6)]


def test_stale_files_of_more_ranks_are_left_behind(stock, tmp_path):
    """The world size is not guessed from files: an orphan is neither read nor copied."""
    shutil.copytree(stock, tmp_path / "a")
    (tmp_path / "a" / "__9_0.distcp").write_bytes(b"stale")
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=2)
    assert [f for f in files(tmp_path / "b") if f.endswith("distcp")] == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def test_values_are_verbatim(stock, tmp_path):
    """Whatever a value is, its stored bytes are the same afterwards."""
    reshard(str(stock), str(tmp_path / "b"), to=3)
    for key in ("it", "name", "blob", "big", "optim.param_groups.1.lr"):
        (old, a, n), (new, b, m) = item_of(stock, key), item_of(tmp_path / "b", key)
        assert old.read_bytes()[a : a + n] == new.read_bytes()[b : b + m]


def test_keys_of_a_rank_are_told(tmp_path):
    """Random states of each rank are copied and reported as bound to the old world size."""
    array = random_array((8,), "uint8", seed=5)
    saved = {f"rng.{rank}.cpu": rows_of(array, "uint8", 8) for rank in range(2)}
    write_checkpoint(tmp_path / "a", saved)
    result = reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=3)
    assert result.layout.rank_bound == ("rng.0.cpu", "rng.1.cpu")


# requests and bytes


class Recorded:
    """Wraps what an operation opens, by URL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.stores: dict[str, RecordingStore] = {}
        for module in modules:
            monkeypatch.setattr(module, "open_store", self._open)

    def _open(self, url: str, *, options: Any = None) -> RecordingStore:
        return self.stores.setdefault(url, RecordingStore(open_store(url, options=options)))


def test_whole_runs_are_copied(tmp_path, monkeypatch):
    """16 to 4: each target reads each of its four files once, in one request besides the probe."""
    array = random_array((64, 4096), "float32", seed=1)
    tensors = {f"t{n}": rows_of(array, "float32", *[4] * 16) for n in range(6)}
    write_checkpoint(tmp_path / "a", tensors, num_files=16)
    opened = Recorded(monkeypatch, reshard_module)
    monkeypatch.setattr("ckptool.operations.open.open_store", opened._open)
    result = reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=4)
    assert result.layout.num_kept == 6 * 16
    source = opened.stores[str(tmp_path / "a")]
    payload = [c for c in source.calls if c[0] == "read" and c[3] - c[2] > 2 * 65536]
    total = sum(p.stat().st_size for p in (tmp_path / "a").glob("*.distcp"))
    assert len(payload) == 16
    assert sum(end - start for _, _, start, end in payload) == total
    assert source.num_bytes["read"] < 1.1 * total
    assert source.requests["read"] <= 16 + 16 * 7 + 1


@pytest.mark.parametrize("stored", ["zstd", "transposed"])
def test_items_that_must_be_made_normal_are_fetched_once(tmp_path, monkeypatch, stored):
    """Sixteen column cuts that every part of the output needs: each item is read once."""
    array = random_array((256, 1024), "float32", seed=1)
    columns = [Box((0, c), (256, 64)) for c in range(0, 1024, 64)]
    write_checkpoint(tmp_path / "a", {"w": Saved(array, columns, "float32", stored=stored)})
    opened = Recorded(monkeypatch, reshard_module)
    monkeypatch.setattr("ckptool.operations.open.open_store", opened._open)
    how = How(max_memory=8 << 20, jobs=4)
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=5, merge=True, how=how)
    total = sum(p.stat().st_size for p in (tmp_path / "a").glob("*.distcp"))
    assert opened.stores[str(tmp_path / "a")].num_bytes["read"] < 1.2 * total


def test_framing_is_proved_before_it_is_copied(tmp_path, monkeypatch):
    """Whatever bit of a kept item is wrong: where validate would object, nothing is committed."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    array = random_array((6, 4), "float32", seed=1)
    write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float32", 6)})
    path = tmp_path / "a" / "__0_0.distcp"
    clean = path.read_bytes()
    num_damaged = 0
    for at in range(0, len(clean), 11):
        data = bytearray(clean)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        if validate(str(tmp_path / "a"), read_data=True).is_ok:
            continue
        num_damaged += 1
        with pytest.raises(DamagedError):
            reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=1)
    assert num_damaged > 40
    assert not (tmp_path / "b" / ".metadata").exists()


# refusals


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_destination_that_holds_something(stock, tmp_path, what):
    """Exit 11, and what is there is untouched."""
    (tmp_path / "b").mkdir()
    if what == "file":
        (tmp_path / "b" / "x").write_bytes(b"mine")
    else:
        (tmp_path / "b" / "sub").mkdir()
        (tmp_path / "b" / "sub" / "x").write_bytes(b"mine")
    with pytest.raises(NotEmptyError, match="not empty"):
        reshard(str(stock), str(tmp_path / "b"), to=2)
    assert files(tmp_path / "b") == (["x"] if what == "file" else ["sub/x"])
    assert len([p for p in (tmp_path / "b").rglob("*") if p.is_file()]) == 1


def test_memory_is_for_one_rank(stock):
    """memory:// is not seen by a second process: one rank works, two are refused."""
    with pytest.raises(RefusedError, match="not seen by other processes") as caught:
        reshard(str(stock), "memory://resharded/two", to=2)
    assert caught.value.exit_code == 11
    assert open_store("memory://resharded").list() == []
    reshard(str(stock), "memory://resharded/one", to=1)
    assert validate("memory://resharded/one", read_data=True).is_ok


@pytest.mark.parametrize("arguments", [{"to": 0}, {"to": -1}, {"to": 2, "compress": "gzip"}])
def test_impossible_requests(stock, tmp_path, arguments):
    """Exit 2 before anything is looked at."""
    with pytest.raises(UsageError):
        reshard(str(stock), str(tmp_path / "b"), **arguments)


def test_a_dry_run_writes_nothing(stock, tmp_path):
    """The layout plan comes from the index alone; with a probe the files are known too."""
    result = reshard(str(stock), str(tmp_path / "b"), to=16, dry_run=True)
    assert result.report is None and result.planned is None
    assert sum(result.layout.rank_num_bytes()) > 0
    probed = reshard(str(stock), str(tmp_path / "b"), to=16, dry_run=True, probe_items=True)
    assert probed.report is None and probed.planned is not None
    assert not (tmp_path / "b").exists()


# damage: nothing is committed, and the message names the place


@pytest.fixture
def damaged(stock, tmp_path) -> Path:
    shutil.copytree(stock, tmp_path / "damaged")
    return tmp_path / "damaged"


def refused(source: Path, **how: Any) -> DamagedError:
    """The error of a reshard; nothing may be left at the destination."""
    dest = source.parent / "dest"
    with pytest.raises(DamagedError) as caught:
        reshard(str(source), str(dest), to=3, **how)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert [name for name in files(dest) if name != "dest"] == []
    return caught.value


def drop_chunk(folder: Path, key: str, offset: tuple[int, ...]) -> None:
    with edited_metadata(folder) as metadata:
        entry = metadata.state_dict_metadata[key]
        entry.chunks = [c for c in entry.chunks if tuple(c.offsets) != offset]
        for index in list(metadata.storage_data):
            if index.fqn == key and tuple(index.offset or ()) == offset:
                del metadata.storage_data[index]


def test_a_missing_chunk(damaged):
    """The tensor and the box that nobody stored are named, before anything is written."""
    drop_chunk(damaged, "model.w", (6, 0))
    error = refused(damaged)
    assert "model.w" in error.message
    assert "[6:9, 0:6]" in error.message


def test_missing_files_are_all_named(damaged):
    """Node-local disks: every missing file with its rank, not only the first."""
    for rank in (2, 3):
        (damaged / f"__{rank}_0.distcp").unlink()
    error = refused(damaged)
    for rank in (2, 3):
        assert f"__{rank}_0.distcp (by its name, of rank {rank}) is missing" in error.message
    assert error.facts["files"] == ["__2_0.distcp", "__3_0.distcp"]
    assert "host" in str(error.hint)


def test_a_short_file(damaged):
    """A shard cut to 60 % is told by its size, without reading it."""
    path = damaged / "__2_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])
    error = refused(damaged)
    assert f"__2_0.distcp (by its name, of rank 2) ends at byte {len(data) * 6 // 10}" in str(error)


def test_another_dtype_in_the_index(damaged):
    """int32 over a float32 payload: stock casts silently, here nothing is written."""
    import torch

    with edited_metadata(damaged) as metadata:
        metadata.state_dict_metadata["model.w"].properties.dtype = torch.int32
    error = refused(damaged)
    assert "the index says int32" in error.message
    assert "holds float32" in error.message


def test_a_flipped_bit_in_a_value(damaged):
    """Values are proved before they are copied."""
    path, start, length = item_of(damaged, "name")
    data = path.read_bytes()
    at = data.index("run/ä".encode(), start)
    assert at < start + length
    flip_bit(path, at)
    assert refused(damaged).facts["entry"] == "name"


def test_a_payload_without_crc_is_told(tmp_path):
    """CRCs that the writer left out: copied, and reported as not verified."""
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        save_plain({"w": torch.ones(6)}, tmp_path / "a")
    finally:
        torch.serialization.set_crc32_options(True)
    result = reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=1)
    assert result.report is not None
    assert [check.entry for check in result.report.unverifiable] == ["w"]


def test_hostile_pickles_never_run(damaged, tmp_path):
    """An object in planner_data that would run code: refused, and nothing ran."""
    marker = tmp_path / "ran"
    with edited_metadata(damaged) as metadata:
        metadata.planner_data = {"x": _Runs(str(marker))}
    error = refused(damaged)
    assert not marker.exists()
    assert ".metadata" in error.message


class _Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_replicas_are_written_once(tmp_path):
    """The same box by two ranks (hybrid sharding) is one chunk afterwards."""
    array = random_array((4, 3), "float32", seed=9)
    halves = rows_of(array, "float32", 2, 2)
    write_checkpoint(tmp_path / "a", {"w": Saved(array, [*halves.boxes] * 2, "float32")})
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=2)
    assert boxes(tmp_path / "b", "w") == ["[0:2, 0:3]", "[2:4, 0:3]"]


def test_many_wrapped_items_at_once(tmp_path):
    """Items that must be decompressed, cut and shared by threads come out whole every time."""
    arrays = {f"t{n}": random_array((7, 33), "float32", seed=n) for n in range(40)}
    saved = {
        key: Saved(array, rows_of(array, "float32", 3, 3, 1).boxes, "float32", stored="zstd")
        for key, array in arrays.items()
    }
    write_checkpoint(tmp_path / "a", saved)
    for attempt in range(3):
        out = tmp_path / f"{attempt}.pt"
        export(str(tmp_path / "a"), str(out), everything=True, how=How(jobs=16, max_memory=1 << 16))
        data = out.read_bytes()
        assert all(array.tobytes() in data for array in arrays.values())


def test_large_tensors_in_small_parts(tmp_path):
    """Column cuts, transposed storages and casts under a small budget: every element in place."""
    array = np.arange(300 * 50, dtype=np.float32).reshape(300, 50)
    cells = [Box((r, c), (100, 10)) for c in (0, 10, 20, 30, 40) for r in (0, 100, 200)]
    saved = {
        "grid": Saved(array, cells, "float32"),
        "turned": Saved(array, cells, "float32", stored="transposed"),
    }
    write_checkpoint(tmp_path / "a", saved)
    reshard(str(tmp_path / "a"), str(tmp_path / "b"), to=7, merge=True, how=How(max_memory=1 << 14))
    reshard(str(tmp_path / "b"), str(tmp_path / "c"), to=1, merge=True, how=How(max_memory=1 << 14))
    data = (tmp_path / "c" / "__0_0.distcp").read_bytes()
    assert data.count(array.tobytes()) == 2
