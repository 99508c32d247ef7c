"""What only S3 has: uploads that nobody finished, server-side copies, forks, other writers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import pytest
from s3_faults import FaultProxy
from s3_server import S3Server

from ckptool.errors import UsageError
from ckptool.storage import StoreRecipe, open_recipe, open_store
from ckptool.storage.s3 import S3Store

PART = 5 * 2**20


@pytest.fixture
def store(s3_url: str, s3_options: dict[str, Any]) -> S3Store:
    store = open_store(s3_url, options=s3_options)
    assert isinstance(store, S3Store)
    return store


def test_capabilities(store: S3Store) -> None:
    """S3 can do all that a store may declare, and its parts are verified by the server."""
    caps = store.capabilities
    assert caps.shared
    assert caps.assembly
    assert caps.server_copy
    assert caps.conditional_put
    data = b"x" * 1000
    part = store.open_assembly("k", num_bytes=1000).write_part(0, 0, data)
    assert part.checksum == zlib.crc32(data)
    assert store.capabilities.checksums


def test_pending_uploads_are_listed_and_aborted(store: S3Store) -> None:
    """An upload that is neither committed nor aborted is found below its folder, and dropped."""
    kept = store.open_assembly("a/k", num_bytes=10)
    other = store.child("b").open_assembly("k", num_bytes=10)
    found = store.list_uploads()
    assert {(u.key, u.token) for u in found} == {("a/k", kept.token), ("b/k", other.token)}
    assert all(u.started for u in found)
    assert [u.key for u in store.list_uploads("a")] == ["a/k"]
    assert [u.key for u in store.child("b").list_uploads()] == ["k"]
    store.abort_upload("a/k", kept.token)
    store.abort_upload("a/k", kept.token)
    assert [u.key for u in store.list_uploads()] == ["b/k"]
    other.abort()
    assert not store.list_uploads()


_KILLED = """
import os, pickle, sys
from ckptool.storage import open_recipe
store = open_recipe(pickle.loads(sys.stdin.buffer.read()))
stream = store.open_stream("k")
stream.write(bytes(40 * 2**20))
os._exit(9)
"""


def test_a_killed_writer_leaves_what_can_be_found(store: S3Store) -> None:
    """After a kill there is no object, and its upload is listed and can be aborted."""
    recipe = pickle.dumps(store.recipe())
    subprocess.run([sys.executable, "-c", _KILLED], input=recipe, check=False)
    assert list(store.list()) == []
    (upload,) = store.list_uploads()
    store.abort_upload(upload.key, upload.token)
    assert not store.list_uploads()


def test_server_copy(store: S3Store) -> None:
    """A part can be a range of another object; its CRC-32 comes from the server."""
    data = random.Random(1).randbytes(2 * PART + 100)
    store.put("source dir/ä+b", data)
    assembly = store.open_assembly("k", num_bytes=PART + 57)
    first = assembly.copy_part(0, store.url_of("source dir/ä+b"), start=33, end=33 + PART)
    last = assembly.write_part(1, PART, data[:57])
    assert first.num_bytes == PART
    assert first.checksum == zlib.crc32(data[33 : 33 + PART])
    assembly.commit([last, first])
    assert store.read("k") == data[33 : 33 + PART] + data[:57]


def test_publishing_copies_nothing(
    s3_url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """Writing never copies or renames an object, which would fail above 5 GB."""
    store = open_store(s3_url, options={**s3_options, "endpoint_url": s3_proxy.endpoint_url})
    store.put("a", b"data", if_absent=True)
    stream = store.open_stream("b")
    stream.write(bytes(20 * 2**20))
    stream.commit()
    assert not [r for r in s3_proxy.requests if "x-amz-copy-source" in r.headers]
    assert s3_proxy.count("PUT", "partNumber=") == 2


@pytest.mark.parametrize(
    ("bounds", "sizes_mib"),
    [
        ({}, [16, 16, 2]),
        ({"num_bytes": 300 << 30}, [31, 3]),  # in 10,000 parts
        ({"max_memory": 8 << 20}, [5] * 6 + [4]),
        ({"max_memory": 60 << 20}, [10, 10, 10, 4]),
    ],
)
def test_a_streams_parts(
    s3_url: str,
    s3_options: dict[str, Any],
    s3_proxy: FaultProxy,
    bounds: dict[str, int],
    sizes_mib: list[int],
) -> None:
    """Of one size that holds the longest object, small enough for a few to fit a budget."""
    store = open_store(s3_url, options={**s3_options, "endpoint_url": s3_proxy.endpoint_url})
    stream = store.open_stream("k", **bounds)
    for _ in range(17):
        stream.write(bytes(2 << 20))
    assert stream.commit().num_bytes == 34 << 20
    sent = sorted(
        (int(r.path.partition("partNumber=")[2].split("&")[0]), len(r.body) >> 20)
        for r in s3_proxy.requests
        if "partNumber=" in r.path
    )
    assert [size for _, size in sent] == sizes_mib


def test_bodies_are_not_hashed_twice(
    s3_url: str, s3_options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """Our CRC-32 goes along with each body, and no SHA-256 of it is computed."""
    store = open_store(s3_url, options={**s3_options, "endpoint_url": s3_proxy.endpoint_url})
    store.put("a", b"data")
    (request,) = [r for r in s3_proxy.requests if r.method == "PUT"]
    assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert "x-amz-checksum-crc32" in request.headers
    assert request.body == b"data"


def test_what_others_write_is_seen_at_once(
    store: S3Store, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """No listing is remembered: objects of another writer appear, and grow, at once."""
    other = open_store(s3_url, options=s3_options)
    assert list(store.list()) == []
    other.put("step-1/.metadata", b"1")
    assert [(o.key, o.num_bytes) for o in store.list()] == [("step-1/.metadata", 1)]
    other.put("step-1/.metadata", b"123")
    assert store.list_level("step-1").objects[0].num_bytes == 3
    assert store.info("step-1/.metadata").num_bytes == 3


def test_many_objects_are_listed_page_by_page(
    s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of more than one page has every object once."""
    store = open_store(s3_url, options=s3_options)
    assert isinstance(store, S3Store)
    for n in range(7):
        store.put(f"d{n}/k", b"")
    call = store.client.call

    def small_pages(method: str, **kwargs: Any) -> Any:
        more = {"MaxKeys": 3} if method == "list_objects_v2" else {}
        return call(method, **kwargs, **more)

    monkeypatch.setattr(store.client, "call", small_pages)
    assert [o.key for o in store.list()] == [f"d{n}/k" for n in range(7)]
    assert store.list_level().folders == tuple(f"d{n}" for n in range(7))


def test_ordinary_variables_are_enough(
    s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Endpoint and credentials from the usual AWS variables need no option."""
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    store = open_store(s3_url)
    store.put("k", b"data")
    assert open_store(s3_url).read("k") == b"data"


def test_user_settings_win(s3_url: str, s3_options: dict[str, Any]) -> None:
    """What the user configures is not tuned away."""
    config = {"max_pool_connections": 3, "s3": {"addressing_style": "path"}, "read_timeout": 7}
    store = open_store(s3_url, options={**s3_options, "config_kwargs": config})
    assert isinstance(store, S3Store)
    store.put("k", b"data")
    used = store.client._filesystem()._s3.meta.config
    assert used.max_pool_connections == 3
    assert used.read_timeout == 7
    assert used.s3["addressing_style"] == "path"
    assert used.s3["payload_signing_enabled"] is False
    assert config == {
        "max_pool_connections": 3,
        "s3": {"addressing_style": "path"},
        "read_timeout": 7,
    }


def test_a_forked_child_can_use_its_parents_store(store: S3Store) -> None:
    """A store that the parent has used works in a forked child, and still in the parent."""
    store.put("k", b"data")
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, store.read("k"))
            store.put("child", b"was here")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"data"
    os.waitpid(pid, 0)
    assert store.read("child") == b"was here"


def _read_elsewhere(recipe: StoreRecipe, key: str) -> bytes:
    return open_recipe(recipe).read(key)


def test_a_spawned_child_opens_a_recipe(store: S3Store) -> None:
    """A recipe travels to a spawned process; the store itself, with its secrets, does not."""
    store.put("k", b"data")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_read_elsewhere, (store.recipe(), "k")) == b"data"
    with pytest.raises(TypeError, match="secrets"):
        pickle.dumps(store)


@pytest.mark.parametrize("url", ["s3://", "s3:///key"])
def test_a_url_without_a_bucket(url: str) -> None:
    """Such a URL is a wrong call."""
    with pytest.raises(UsageError, match="names no bucket"):
        open_store(url)


def test_the_whole_bucket_is_a_store(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    """A root without a folder works, with or without a slash at its end."""
    for url in (f"s3://{s3_bucket}", f"s3://{s3_bucket}/"):
        store = open_store(url, options=s3_options)
        store.put("at-the-root", b"data")
        assert store.url == f"s3://{s3_bucket}"
        assert store.read("at-the-root") == b"data"
        assert "at-the-root" in [o.key for o in store.list_level().objects]
    store.delete("at-the-root")


def test_the_server_helper_starts_once_and_ends(tmp_path: Path) -> None:
    """The helper finds a server that runs already, and its stop ends the process."""
    script = Path(__file__).parents[2] / "scripts" / "s3_server.py"
    state = ["--state", str(tmp_path / "state")]

    def helper(*arguments: str) -> str:
        command = [sys.executable, str(script), *arguments, *state]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    url = helper("start", "--bucket", "bbb")
    assert helper("start") == url
    server = S3Server(tmp_path / "state")
    open_store("s3://bbb/x", options=server.storage_options()).put("k", b"data")
    helper("stop")
    with pytest.raises(RuntimeError, match="not running"):
        server.storage_options()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)
