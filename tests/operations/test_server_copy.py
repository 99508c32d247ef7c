"""What an S3 server copies itself: how little comes through us, and how it is proved."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from killed_runs import flags, killed_inside
from plain_checkpoint import Saved, random_array, rows_of, write_checkpoint
from recording_store import RecordingStore
from s3_faults import FaultProxy, Reply, Request, edit
from safetensors.numpy import load

from ckptool.cli.app import run
from ckptool.engine.run import How
from ckptool.errors import DamagedError, StorageError
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_item import encode_item
from ckptool.model import Box
from ckptool.operations.export import discard_export, export
from ckptool.operations.reshard import reshard
from ckptool.operations.validate import validate
from ckptool.storage import Store, open_store

MIB = 1 << 20


class Remote:
    """A source on S3 and stores that count what goes through the client."""

    def __init__(self, url: str, options: dict[str, Any], tmp_path: Path) -> None:
        self.url, self.options, self._tmp_path = url, options, tmp_path
        self.counted: dict[str, RecordingStore] = {}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def source(self) -> str:
        return f"{self.url}/source"

    @property
    def dest(self) -> str:
        return f"{self.url}/dest"

    @property
    def store(self) -> Store:
        return open_store(self.dest, options=self.options)

    @property
    def both(self) -> dict[str, Any]:
        return {"source_options": self.options, "dest_options": self.options}

    def save(self, tensors: dict[str, Saved], **more: Any) -> None:
        """Write a checkpoint to the source URL."""
        folder = self._tmp_path / "source"
        write_checkpoint(folder, tensors, **more)
        store = open_store(self.source, options=self.options)
        for path in folder.iterdir():
            store.put(path.name, path.read_bytes())
        self.arrays = {key: saved.array for key, saved in tensors.items()}

    def open(self, url: str, *, options: Any = None) -> RecordingStore:
        return self.counted.setdefault(url, RecordingStore(open_store(url, options=options)))

    def client_share(self) -> float:
        """The larger of bytes fetched and bytes sent, of the bytes of the output."""
        sums = [store.num_bytes for store in self.counted.values()]
        fetched = sum(row["read"] for row in sums)
        sent = sum(row["write"] + row["put"] for row in sums)
        written = sum(o.num_bytes for o in self.store.list())
        return max(fetched, sent) / written

    def assert_exported(self) -> None:
        """safetensors reads what was saved, bit for bit."""
        found: dict[str, Any] = {}
        for info in self.store.list():
            if info.key.endswith(".safetensors"):
                found |= load(self.store.read(info.key))
        assert set(found) == set(self.arrays)
        for key, array in self.arrays.items():
            assert found[key].tobytes() == array.tobytes()

    def assert_loads(self) -> None:
        """Stock dcp.load reads what was saved, bit for bit."""
        folder = self._tmp_path / "dest"
        folder.mkdir()
        for info in self.store.list():
            (folder / info.key).write_bytes(self.store.read(info.key))
        state = {key: torch.zeros(array.shape) for key, array in self.arrays.items()}
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
        for key, array in self.arrays.items():
            assert state[key].numpy().tobytes() == array.tobytes()

    def assert_nothing_left(self) -> None:
        assert list(self.store.list()) == []
        assert list(self.store.list_uploads()) == []


@pytest.fixture
def remote(s3_url, s3_options, tmp_path, monkeypatch) -> Remote:
    remote = Remote(s3_url, s3_options, tmp_path)
    for module in ("open", "export", "reshard"):
        monkeypatch.setattr(f"ckptool.operations.{module}.open_store", remote.open)
    return remote


@pytest.fixture
def proxied(s3_url, s3_options, s3_proxy, tmp_path) -> Remote:
    """The same through a proxy, uncounted."""
    return Remote(s3_url, {**s3_options, "endpoint_url": s3_proxy.endpoint_url}, tmp_path)


def tensors(num: int, *num_rows: int, key: str = "model.w") -> dict[str, Saved]:
    """fp32 tensors of 1,024 columns; 256 rows are a MiB."""
    shape = (sum(num_rows), 1024)
    return {
        f"{key}{n}": rows_of(random_array(shape, "float32", seed=n), "float32", *num_rows)
        for n in range(num)
    }


# how little comes through us


def test_an_export_is_copied_by_the_server(remote):
    """Chunks of 16 MiB, no cast: at most 5 % of the bytes are fetched or sent."""
    remote.save(tensors(2, 4096, 4096, 4096, 4096), num_files=4)
    report = export(remote.source, remote.dest, strip_prefix="", **remote.both).report
    assert remote.client_share() <= 0.05
    assert report is not None
    assert report.num_bytes_copied > 0.95 * report.num_bytes_written
    assert (report.payloads_proved, report.unverifiable, report.trusted) == (8, [], [])
    remote.assert_exported()


def test_a_reshard_that_nests_is_copied_by_the_server(remote):
    """16 ranks to 4: at most 2 % of the bytes are fetched or sent, values included."""
    remote.save(tensors(2, *[1024] * 16), num_files=16, values={"step": 3, "note": "x" * 5000})
    report = reshard(remote.source, remote.dest, to=4, **remote.both).report
    assert remote.client_share() <= 0.02
    assert report is not None
    assert (report.payloads_proved, report.unverifiable, report.trusted) == (32, [], [])
    remote.assert_loads()


def test_a_reshard_that_cuts_sends_one_small_part_a_piece(remote):
    """Chunks of 64 MiB in two, as 8 ranks to 16 do: at most 20 % are fetched or sent."""
    remote.save(tensors(1, 16384, 16384), num_files=2)
    report = reshard(remote.source, remote.dest, to=4, **remote.both).report
    assert 0.10 < remote.client_share() <= 0.20
    assert report is not None
    assert (report.payloads_proved, report.unverifiable, report.trusted) == (2, [], [])
    remote.assert_loads()
    assert validate(remote.dest, read_data=True, options=remote.options).is_ok


def test_the_dry_run_says_what_it_will_cost(remote, capsys):
    """--dry-run --probe tells parts and bytes; a run then moves exactly those."""
    remote.save(tensors(1, 3072, 3072), num_files=2)
    words = ["export", remote.source, remote.dest, *flags(remote.options)]
    assert run([*words, "--dry-run", "--probe"]) == 0
    assert re.search(
        r"3 parts: 19.0 MiB copied by the server itself, 5.0 MiB through", capsys.readouterr().out
    )
    planned = export(remote.source, remote.dest, dry_run=True, probe_items=True, **remote.both)
    report = export(remote.source, remote.dest, **remote.both).report
    assert report is not None and planned.parts is not None
    said = planned.parts
    assert said.num_parts == report.num_parts
    assert said.num_bytes_copied == report.num_bytes_copied > 0
    assert said.num_bytes_sent == report.num_bytes_sent


def test_a_cast_is_not_copied(remote):
    """Bytes that change go through us, once."""
    remote.save(tensors(1, 3072, 3072), num_files=2)
    report = export(remote.source, remote.dest, dtype="bf16", **remote.both).report
    assert report is not None
    assert (report.num_bytes_copied, report.payloads_proved) == (0, 2)


def test_other_credentials_are_not_copied(remote):
    """Between places with other options the server is not asked to copy."""
    remote.save(tensors(1, 3072), num_files=1)
    options = {**remote.options, "ckptool_deadline_s": 100}
    report = export(
        remote.source, remote.dest, source_options=options, dest_options=remote.options
    ).report
    assert report is not None
    assert report.num_bytes_copied == 0
    remote.assert_exported()


# how it is proved


def strip_checksums(reply: Reply) -> None:
    """As Ceph RGW answers: no checksum is kept, none is told."""
    reply.headers = {k: v for k, v in reply.headers.items() if "x-amz-checksum" not in k.lower()}
    reply.body = re.sub(rb"<ChecksumCRC32>.*?</ChecksumCRC32>", b"", reply.body)


def falsify_copies(reply: Reply) -> None:
    """A CRC-32 of other bytes."""
    wrong = base64.b64encode(b"\1\2\3\4")
    reply.body = re.sub(
        rb"(<ChecksumCRC32>).*?(</ChecksumCRC32>)", rb"\g<1>" + wrong + rb"\2", reply.body
    )


def is_copy(request: Request) -> bool:
    return "x-amz-copy-source" in request.headers


def without_checksums(proxy: FaultProxy) -> None:
    proxy.fail(answer=edit(strip_checksums))


@pytest.mark.parametrize("operation", ["export", "reshard"])
def test_without_checksums_the_bytes_are_read(proxied, s3_proxy, operation):
    """A server that tells no CRC-32: what it copies is read to be proved, and it is said."""
    proxied.save(tensors(1, 3072, 3072), num_files=2)
    without_checksums(s3_proxy)
    how: dict[str, Any] = {"to": 1} if operation == "reshard" else {}
    function: Any = reshard if operation == "reshard" else export
    report = function(proxied.source, proxied.dest, **how, **proxied.both).report
    assert report.num_bytes_copied > 0
    assert report.num_bytes_read >= 24 * MIB
    assert (report.payloads_proved, report.trusted) == (2, [])


def test_trust_server_waives_it_by_name(proxied, s3_proxy, capsys):
    """--trust-server: nothing is read for its CRC alone, and the result lists what was not."""
    proxied.save(tensors(1, 3072, 3072), num_files=2)
    without_checksums(s3_proxy)
    words = ["export", proxied.source, proxied.dest, *flags(proxied.options)]
    assert run([*words, "--trust-server"]) == 0
    out = capsys.readouterr().out
    assert "model.w0 were copied by the server and not verified (--trust-server)" in out
    proxied.assert_exported()


def test_damage_is_found_without_checksums(proxied, s3_proxy):
    """One flipped bit in what the server copied stops the run, and nothing is left."""
    proxied.save(tensors(1, 3072, 3072), num_files=2)
    flip(proxied, "__1_0.distcp", 6 * MIB + 704)
    without_checksums(s3_proxy)
    with pytest.raises(DamagedError, match=r"model\.w0"):
        export(proxied.source, proxied.dest, **proxied.both)
    proxied.assert_nothing_left()


@pytest.mark.parametrize("operation", ["export", "reshard"])
def test_damage_is_found_by_the_servers_checksum(remote, operation):
    """One flipped bit in bytes that never came to us: DamagedError, nothing left."""
    remote.save(tensors(1, 3072, 3072), num_files=2)
    flip(remote, "__1_0.distcp", 8 * MIB)
    how: dict[str, Any] = {"to": 1} if operation == "reshard" else {}
    function: Any = reshard if operation == "reshard" else export
    with pytest.raises(DamagedError, match=r"model\.w0"):
        function(remote.source, remote.dest, **how, **remote.both)
    assert remote.counted[remote.dest].requests["copy"] > 0
    remote.assert_nothing_left()


def test_a_copy_with_another_checksum(proxied, s3_proxy):
    """A copy whose CRC-32 is not the payload's is never published."""
    proxied.save(tensors(1, 3072, 3072), num_files=2)
    s3_proxy.fail("PUT", "partNumber", when=is_copy, answer=edit(falsify_copies))
    with pytest.raises((DamagedError, StorageError)):
        export(proxied.source, proxied.dest, **proxied.both)
    proxied.assert_nothing_left()


def test_items_without_a_crc(remote, monkeypatch):
    """Payloads that were saved without a CRC are copied, and the result names them."""

    def crcless(array: Any, dtype: Any) -> tuple[bytes, tuple[str, ...]]:
        framing = encode_item(dtype=dtype, shape=array.shape)
        return framing.head + array.tobytes() + framing.tail(0), ()

    monkeypatch.setitem(write_checkpoint.__globals__["_ITEMS"], "plain", crcless)
    remote.save(tensors(1, 3072, 3072), num_files=2)
    report = export(remote.source, remote.dest, strip_prefix="", **remote.both).report
    assert report is not None
    assert report.payloads_proved == 0
    assert [check.entry for check in report.unverifiable] == ["model.w0"] * 2
    remote.assert_exported()


def test_a_journal_knows_copies_again(remote, s3_options):
    """The ETag of a copied part is the same in its answer and in a listing."""
    remote.save(tensors(1, 3072), num_files=1)
    assembly = remote.store.open_assembly("x", num_bytes=6 * MIB)
    source = f"{remote.source}/__0_0.distcp"
    receipt = assembly.copy_part(0, source, start=0, end=6 * MIB)
    assert assembly.surviving([(receipt, 0, None)]) == {0}
    data = open_store(remote.source, options=s3_options).read("__0_0.distcp", end=6 * MIB)
    assert receipt.checksum == crc32(data)
    assembly.abort()


# too many parts for one object

FEW_PARTS = """
from dataclasses import replace
from ckptool.storage import s3
s3._LIMITS = replace(s3._LIMITS, max_parts=3)
from ckptool.engine import grouped
from ckptool.engine.journal import Journal
from ckptool.storage.s3 import S3Store
from ckptool.storage.s3_writers import S3Assembly
"""


@pytest.fixture
def few_parts(monkeypatch) -> None:
    """A store that takes three parts an object."""
    from dataclasses import replace

    from ckptool.storage import s3

    monkeypatch.setattr(s3, "_LIMITS", replace(s3._LIMITS, max_parts=3))


HOW = How(jobs=2, max_memory=40 * MIB)


@pytest.fixture
def many(remote) -> Remote:
    """Chunks of 5 MiB and a bit, each a part of its own."""
    remote.save(tensors(1, *[1536] * 4, key="w"), num_files=4)
    return remote


@pytest.mark.usefixtures("few_parts")
def test_intermediate_objects(many):
    """More parts than an object takes: they are assembled in two objects and copied together."""
    planned = export(many.source, many.dest, dry_run=True, probe_items=True, how=HOW, **many.both)
    assert planned.parts is not None
    assert planned.parts.num_intermediates == 2
    result = export(many.source, many.dest, how=HOW, **many.both)
    assert result.report is not None
    assert result.report.num_parts == planned.parts.num_parts > 3
    many.assert_exported()
    assert [o.key for o in many.store.list()] == ["model.safetensors"]
    assert list(many.store.list_uploads()) == []


@pytest.mark.usefixtures("few_parts")
def test_the_dry_run_names_intermediate_objects(many, capsys):
    """The plan says that it goes through intermediate objects, and how many."""
    words = ["export", many.source, many.dest, *flags(many.options), "--max-memory", "640MiB"]
    assert run([*words, "--dry-run", "--probe"]) == 0
    assert "2 intermediate objects are assembled first" in capsys.readouterr().out


TURNS = {
    "in-the-parts": "seen = []; after(Journal, 'finished', lambda *a: seen.append(1) or seen[1:])",
    "one-made": "after(S3Assembly, 'commit')",
    "joining": "before(grouped._Grouped, '_compare')",
    "joined": "before(S3Store, 'delete', lambda self, key: 'ckptool-part' in key)",
    "published": "before(Journal, 'published')",
}


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize(("turn", "end"), list(itertools.product(TURNS, ["resume", "discard"])))
def test_a_kill_among_intermediate_objects(many, turn, end):
    """Wherever it was killed: --resume makes the same file, --discard leaves nothing."""
    words = ["--jobs", HOW.jobs, "--max-memory", HOW.max_memory, *flags(many.options)]
    killed_inside(FEW_PARTS + TURNS[turn], ["export", many.source, many.dest, *words])
    if end == "resume":
        report = export(many.source, many.dest, resume=True, how=HOW, **many.both).report
        assert report is not None
        if turn != "in-the-parts":
            assert report.num_parts_kept == report.num_parts
        many.assert_exported()
        assert [o.key for o in many.store.list()] == ["model.safetensors"]
        assert list(many.store.list_uploads()) == []
    else:
        discard_export(many.dest, dest_options=many.options)
        many.assert_nothing_left()


@pytest.mark.usefixtures("few_parts")
def test_damage_among_intermediate_objects(many):
    """A damaged source leaves no intermediate object and no upload."""
    flip(many, "__3_0.distcp", 4 * MIB)
    with pytest.raises(DamagedError):
        export(many.source, many.dest, how=HOW, **many.both)
    many.assert_nothing_left()


@pytest.mark.usefixtures("few_parts")
def test_a_join_with_another_checksum(s3_url, s3_options, s3_proxy, tmp_path):
    """The second copy is proved too: one with another CRC-32 is never published."""
    many = Remote(s3_url, {**s3_options, "endpoint_url": s3_proxy.endpoint_url}, tmp_path)
    many.save(tensors(1, *[1536] * 4, key="w"), num_files=4)

    def is_join(request: Request) -> bool:
        return "ckptool-part" in request.headers.get("x-amz-copy-source", "")

    s3_proxy.fail("PUT", "partNumber", when=is_join, answer=edit(falsify_copies))
    with pytest.raises(StorageError, match="CRC-32"):
        export(many.source, many.dest, how=HOW, **many.both)
    assert "model.safetensors" not in [o.key for o in many.store.list()]
    discard_export(many.dest, dest_options=many.options)
    many.assert_nothing_left()


def flip(remote: Remote, file: str, byte: int) -> None:
    store = open_store(remote.source, options=remote.options)
    data = bytearray(store.read(file))
    data[byte] ^= 16
    store.put(file, bytes(data))


def test_columns_go_through_us(remote):
    """Chunks that are cut on dim 1 are placed by stride: nothing is copied, all is proved."""
    array = random_array((1536, 1024), "float32", seed=1)
    boxes = [Box((0, 512 * k), (1536, 512)) for k in range(2)]
    remote.save({"w": Saved(array, boxes, "float32")}, num_files=2)
    report = export(remote.source, remote.dest, **remote.both).report
    assert report is not None
    assert (report.num_bytes_copied, report.payloads_proved) == (0, 2)
    remote.assert_exported()
