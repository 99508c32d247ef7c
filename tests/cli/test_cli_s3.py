"""The command line against a real S3 server: the same answers, and errors in plain words."""

from __future__ import annotations

import json

import pytest
from dcp_writer import write_f4

from ckptool.cli.app import run
from ckptool.storage import open_store


@pytest.fixture
def call(capsys):
    def call(*args):
        status = run([str(a) for a in args])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def flags(options):
    """Storage options as the command line takes them."""
    pairs = (f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items())
    return [part for pair in pairs for part in ("--storage-option", pair)]


@pytest.fixture
def remote(tmp_path, s3_url, s3_options):
    """F4 as the step of a run on S3; its URL and the options to reach it."""
    store = open_store(f"{s3_url}/step-00000012", options=s3_options)
    for path in write_f4(tmp_path / "f4").iterdir():
        store.put(path.name, path.read_bytes())
    return s3_url, flags(s3_options)


def test_all_commands_read_from_s3(call, remote):
    """ls, inspect and validate of a run on S3 say what they say of a local one."""
    url, options = remote
    document = json.loads(call("ls", url, *options, "--json")[1])
    assert [(s["step"], s["committed"]) for s in document["steps"]] == [(12, True)]
    document = json.loads(call("inspect", url, *options, "--json")[1])
    assert (document["num_tensors"], document["num_values"]) == (15, 4)
    assert document["url"] == f"{url}/step-00000012"
    status, out, err = call("validate", url, *options, "--read-data", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["data"]["num_ok"] == 40


def test_a_missing_bucket(call, s3_options, s3_server):
    """Exit 12, the bucket named; none is created."""
    status, out, err = call("inspect", "s3://no-such-bucket-here/run", *flags(s3_options))
    assert (status, out) == (12, "")
    assert "no-such-bucket-here" in err


def test_wrong_credentials(call, remote, s3_options):
    """Exit 12, and no secret in what is printed."""
    url, _ = remote
    wrong = {**s3_options, "key": "nobody", "secret": "not-the-secret-4711"}
    status, out, err = call("validate", url, *flags(wrong), "--json")
    assert status == 12
    assert json.loads(out)["error"]["code"] == "access"
    assert "4711" not in out + err


def test_no_network(call, s3_options):
    """Exit 12 with the endpoint that does not answer."""
    options = {**s3_options, "endpoint_url": "http://127.0.0.1:9", "ckptool_deadline_s": 1}
    options.pop("client_kwargs", None)
    status, _, err = call("ls", "s3://bucket/run", *flags(options))
    assert status == 12
    assert "127.0.0.1:9" in err
