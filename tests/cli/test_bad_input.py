"""Bad input, command by command: one sentence, the next step, the exit status, nothing created."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dcp_writer import edited_metadata, write_f4

from ckptool.cli.app import run
from ckptool.storage import open_store

PROJECT = Path(__file__).resolve().parents[2]
READERS = ("inspect", "validate", "reshard", "export", "export.pt")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def f4(tmp_path):
    return write_f4(tmp_path / "source" / "step-00000012")


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a command in text and in JSON: both end alike, say one thing, and create nothing."""

    def refused(args: list[str], *, status: int, code: str, words: str) -> dict[str, Any]:
        before = snapshot(tmp_path)
        assert run(args) == status
        out, err = capsys.readouterr()
        assert out == ""
        first, *rest = err.rstrip("\n").split("\n")
        assert first.startswith("ckptool: ")
        assert words in first
        assert len(rest) == 1 and rest[0].startswith("  "), err
        assert "Traceback" not in err
        assert run([*args, "--json"]) == status
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        error: dict[str, Any] = document["error"]
        assert document["schema"] == f"ckptool.{args[0]}/1"
        assert (error["exit_code"], error["code"]) == (status, code)
        assert first == f"ckptool: {error['message']}"
        assert rest[0].strip() == error["hint"]
        assert snapshot(tmp_path) == before
        return error

    return refused


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    """Every file and folder below, with size and time of change."""
    rows = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")]
    return sorted(rows)


def line(command: str, source: Any, dest: Any) -> list[str]:
    """A command line that reads ``source`` and, where it writes, writes ``dest``."""
    name, _, suffix = command.partition(".")
    rest = {
        "reshard": [str(dest), "--to", "2"],
        "export": [f"{dest}.pt", "--all"] if suffix else [str(dest)],
        "validate": ["--read-data"],
    }
    return [name, str(source), *rest.get(name, [])]


def flags(options: dict[str, Any]) -> list[str]:
    pairs = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())
    return [part for pair in pairs for part in ("--storage-option", pair)]


# sources


@pytest.mark.parametrize("command", READERS)
def test_a_missing_path(refused, tmp_path, command):
    """Nothing is there: 10."""
    args = line(command, tmp_path / "nope", tmp_path / "dest")
    error = refused(args, status=10, code="no-checkpoint", words="nothing is there")
    assert error["url"] == str(tmp_path / "nope")


@pytest.mark.parametrize("command", READERS)
def test_a_run_without_a_committed_step(refused, f4, tmp_path, command):
    """Steps are there and none is committed: 10, and they are named."""
    (f4 / ".metadata").unlink()
    args = line(command, f4.parent, tmp_path / "dest")
    refused(args, status=10, code="no-checkpoint", words="step-00000012")


@pytest.mark.parametrize("command", READERS)
def test_an_empty_metadata(refused, f4, tmp_path, command):
    """A .metadata of 0 bytes is a save that did not end: 10."""
    (f4 / ".metadata").write_bytes(b"")
    refused(line(command, f4, tmp_path / "d"), status=10, code="no-checkpoint", words=str(f4))


@pytest.mark.parametrize("num_bytes", [1, 100, 1500])
@pytest.mark.parametrize("command", READERS)
def test_a_metadata_cut_short(refused, f4, tmp_path, command, num_bytes):
    """Damage: 3, the file named."""
    data = (f4 / ".metadata").read_bytes()
    (f4 / ".metadata").write_bytes(data[:num_bytes])
    refused(line(command, f4, tmp_path / "d"), status=3, code="damaged", words=".metadata")


class Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("command", READERS)
def test_a_hostile_metadata(refused, f4, tmp_path, command):
    """A pickle that would run code: 3, the callable named, nothing run."""
    with edited_metadata(f4) as metadata:
        metadata.planner_data = {"x": Runs(str(tmp_path / "ran"))}
    refused(line(command, f4, tmp_path / "d"), status=3, code="damaged", words="io.open")


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "s3://bucket/key", "a/../../b", "file:///etc/passwd"]
)
@pytest.mark.parametrize("command", READERS)
def test_a_hostile_path_in_the_index(refused, f4, tmp_path, command, path):
    """An item outside its checkpoint: 3, and the path is told, not opened."""
    with edited_metadata(f4) as metadata:
        for info in metadata.storage_data.values():
            info.relative_path = path
    refused(line(command, f4, tmp_path / "d"), status=3, code="damaged", words=path)


@pytest.mark.parametrize("command", ["reshard", "export", "export.pt"])
def test_a_missing_shard_file(refused, f4, tmp_path, command):
    """Incomplete: 3, with the file and its rank."""
    (f4 / "__2_0.distcp").unlink()
    args = line(command, f4, tmp_path / "d")
    error = refused(args, status=3, code="damaged", words="__2_0.distcp (by its name, of rank 2)")
    assert error["files"] == ["__2_0.distcp"]


@pytest.mark.parametrize("command", ["reshard", "export", "export.pt"])
def test_a_short_shard_file(refused, f4, tmp_path, command):
    """Incomplete: 3, with the byte at which the file ends."""
    data = (f4 / "__1_0.distcp").read_bytes()
    (f4 / "__1_0.distcp").write_bytes(data[:2000])
    args = line(command, f4, tmp_path / "d")
    refused(args, status=3, code="damaged", words="ends at byte 2000")


def test_validate_lists_missing_and_short_files(f4, capsys):
    """validate reports them as findings and ends with 3."""
    (f4 / "__2_0.distcp").unlink()
    (f4 / "__1_0.distcp").write_bytes(b"x" * 2000)
    assert run(["validate", str(f4), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {(f["code"], f["file"]) for f in found} == {
        ("missing-file", "__2_0.distcp"),
        ("short-file", "__1_0.distcp"),
    }


def renamed(folder: Path, old: bytes, new: bytes) -> None:
    """Another global in the pickle; names have a one-byte length before them."""
    data = (folder / ".metadata").read_bytes()
    assert old in data and len(old) == len(new)
    (folder / ".metadata").write_bytes(data.replace(old, new))


@pytest.mark.parametrize("command", READERS)
def test_an_unknown_dtype(refused, f4, tmp_path, command):
    """A dtype of a newer torch is named, and no tensor is guessed at: 11."""
    renamed(f4, b"bfloat16", b"qfloat16")
    refused(line(command, f4, tmp_path / "d"), status=11, code="unsupported", words="qfloat16")


@pytest.mark.parametrize("command", READERS)
def test_an_unknown_class(refused, f4, tmp_path, command):
    """A class that the format does not have is named: never 'metadata is None'."""
    renamed(f4, b"TensorStorageMetadata", b"TensorStorageMetadat2")
    error = refused(
        line(command, f4, tmp_path / "d"), status=11, code="unsupported",
        words="TensorStorageMetadat2",
    )  # fmt: skip
    assert "newer" in error["hint"]


@pytest.mark.parametrize("command", READERS)
def test_a_folder_that_is_no_checkpoint(refused, tmp_path, command):
    """Other files are there: 10, with what they look like."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hello")
    args = line(command, tmp_path / "other", tmp_path / "dest")
    refused(args, status=10, code="no-checkpoint", words="other")


@pytest.mark.parametrize("command", READERS)
def test_a_file_where_a_folder_should_be(refused, tmp_path, command):
    """SOURCE is a file: one sentence all the same."""
    (tmp_path / "file").write_bytes(b"x")
    args = line(command, tmp_path / "file", tmp_path / "dest")
    refused(args, status=10, code="no-checkpoint", words="file")


@pytest.mark.parametrize("command", READERS)
def test_an_unknown_protocol(refused, tmp_path, command):
    """A URL that no file system knows: 2."""
    args = line(command, "nosuch://bucket/run", tmp_path / "dest")
    refused(args, status=2, code="usage", words="nosuch")


# destinations


@pytest.mark.parametrize("command", ["reshard", "export", "export.pt"])
def test_a_destination_that_holds_something(refused, f4, tmp_path, command):
    """11, and what is there stays."""
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "mine").write_bytes(b"mine")
    shutil.copytree(dest, f"{dest}.pt")
    args = line(command, f4, dest)
    refused(args, status=11, code="not-empty", words="mine")


@pytest.mark.parametrize("command", ["reshard", "export"])
def test_a_destination_below_a_file(refused, f4, tmp_path, command):
    """A file stands where a folder is needed: 12, nothing changed."""
    (tmp_path / "file").write_bytes(b"x")
    args = line(command, f4, tmp_path / "file" / "dest")
    refused(args, status=12, code="object-missing", words="Not a directory")


@pytest.mark.parametrize(
    "args",
    [
        ["--dtype", "int8"],
        ["--dtype", "float99"],
        ["--only", "nothing.*"],
        ["--max-file-size", "0"],
        ["--max-file-size", "ten"],
        ["--all", "--only", "model.*"],
        ["--format", "gguf"],
        ["--max-memory", "-1"],
        ["--jobs", "0"],
        ["--rename", "/nonexistent/file"],
        ["--int-keys"],
    ],
    ids=" ".join,
)
def test_impossible_exports(f4, tmp_path, capsys, args):
    """2 or 11 with one sentence; the destination is not made."""
    before = snapshot(tmp_path)
    assert run(["export", str(f4), str(tmp_path / "dest"), *args]) in (2, 11)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ckptool: ")
    assert "Traceback" not in err
    assert snapshot(tmp_path) == before


# stores


@pytest.fixture
def remote(tmp_path, s3_url, s3_options):
    """F4 on S3, in a folder of its own."""
    store = open_store(f"{s3_url}/step-00000012", options=s3_options)
    for path in write_f4(tmp_path / "f4").iterdir():
        store.put(path.name, path.read_bytes())
    return f"{s3_url}/step-00000012"


def buckets(options: dict[str, Any]) -> set[str]:
    import botocore.session

    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )
    return {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}


@pytest.mark.parametrize("command", READERS)
def test_a_missing_bucket_to_read(refused, tmp_path, s3_options, command):
    """12, the bucket named, none created."""
    before = buckets(s3_options)
    args = [*line(command, "s3://no-such-bucket/run", tmp_path / "d"), *flags(s3_options)]
    error = refused(args, status=12, code="access", words="no-such-bucket")
    assert "bucket" in error["message"]
    assert buckets(s3_options) == before


@pytest.mark.parametrize("command", ["reshard", "export", "export.pt"])
def test_a_missing_bucket_to_write(refused, f4, s3_options, command):
    """12 before anything is read; s3fs would create it."""
    before = buckets(s3_options)
    args = [*line(command, f4, "s3://no-such-bucket/new"), *flags(s3_options)]
    refused(args, status=12, code="access", words="no-such-bucket")
    assert buckets(s3_options) == before


@pytest.mark.parametrize("command", READERS)
def test_wrong_credentials(refused, tmp_path, remote, s3_options, command):
    """12, and no secret is printed."""
    wrong = {**s3_options, "key": "nobody", "secret": "not-the-secret-4711"}
    args = [*line(command, remote, tmp_path / "d"), *flags(wrong)]
    error = refused(args, status=12, code="access", words=remote)
    assert "4711" not in json.dumps(error)


@pytest.mark.parametrize("command", ["reshard", "export", "export.pt"])
def test_credentials_that_may_only_read(refused, f4, s3_url, s3_server, s3_options, command):
    """12 with the place that may not be written; nothing is there afterwards."""
    args = [*line(command, f4, f"{s3_url}/new"), *flags(s3_server.storage_options(read_only=True))]
    refused(args, status=12, code="access", words=f"{s3_url}/new")
    assert open_store(s3_url, options=s3_options).list() == []


@pytest.fixture
def closed_port():
    """A port of this machine at which nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("end", ["source", "destination"])
def test_no_network(f4, tmp_path, s3_options, closed_port, end):
    """12 with the endpoint that does not answer, within half a minute."""
    options = {**s3_options, "endpoint_url": f"http://127.0.0.1:{closed_port}"}
    there = "s3://bucket/run"
    source, dest = (there, tmp_path / "d") if end == "source" else (f4, there)
    done = subprocess.run(
        [sys.executable, "-m", "ckptool", *line("reshard", source, dest), *flags(options)],
        cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 12, done.stderr
    assert f"127.0.0.1:{closed_port}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
    assert not (tmp_path / "d").exists()


def test_the_aws_variables_are_enough(remote, s3_server, monkeypatch, capsys):
    """Endpoint and credentials from the usual variables, without any option."""
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    assert run(["inspect", remote, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tensors"] == 15
