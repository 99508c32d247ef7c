"""Interrupted runs on a real S3 server: parts that it lists are kept, and no upload is left."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from killed_runs import flags, killed_inside, start
from plain_checkpoint import random_array, rows_of, write_checkpoint
from s3_faults import FaultProxy, Forward, Reply, Request

from ckptool.engine.run import How
from ckptool.errors import DamagedError, NoCheckpointError, RefusedError
from ckptool.layout import JOURNAL_NAME
from ckptool.operations.export import discard_export, export
from ckptool.operations.open import open_checkpoint
from ckptool.operations.reshard import discard_reshard, reshard
from ckptool.storage import Store, open_store

HOW = How(jobs=2, max_memory=40 << 20)
FLAGS = ["--jobs", HOW.jobs, "--max-memory", HOW.max_memory]
NUM_KILLS = 4  # of each of three jobs
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(s3_server, s3_bucket, tmp_path_factory) -> str:
    """23 MiB on S3: chunks that the server can copy in part, and some that it cannot."""
    folder = tmp_path_factory.mktemp("resume-s3") / "step-00000007"
    rows = {"w0": (3584,), "w1": (512,) * 5, "w2": (5120, 512)}
    tensors = {
        f"model.{key}": rows_of(
            random_array((sum(n), 512), "float32", seed=len(key)), "float32", *n
        )
        for key, n in rows.items()
    }
    index = write_checkpoint(folder, tensors, values={"step": 7})
    assert len(index.entries) == 4
    url = f"s3://{s3_bucket}/resume/step-00000007"
    store = open_store(url, options=s3_server.storage_options())
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    return url


class Job:
    """One operation on S3, through a proxy that its process can be killed at."""

    def __init__(self, name: str, source: str, dest: str, options: dict[str, Any]) -> None:
        self.name, self.source, self.dest, self.options = name, source, dest, options
        self.store = open_store(dest, options=options)

    @property
    def how(self) -> dict[str, Any]:
        return {"reshard": {"to": 3}, "export": {}, "cast": {"dtype": "bfloat16"}}[self.name]

    def start(self, proxy: FaultProxy) -> subprocess.Popen[str]:
        return start(*self.args({**self.options, "endpoint_url": proxy.endpoint_url}))

    def args(self, options: dict[str, Any]) -> list[object]:
        words = [part for key, value in self.how.items() for part in (f"--{key}", value)]
        command = "reshard" if self.name == "reshard" else "export"
        return [command, self.source, self.dest, *words, *FLAGS, *flags(options)]

    def run(
        self, *, resume: bool = False, to: str | None = None, proxy: FaultProxy | None = None
    ) -> dict[str, Any]:
        function: Callable[..., Any] = reshard if self.name == "reshard" else export
        storage = self.options | ({"endpoint_url": proxy.endpoint_url} if proxy else {})
        options = {"source_options": storage, "dest_options": storage}
        dest = to or self.dest
        return function(self.source, dest, resume=resume, how=HOW, **self.how, **options).to_json()

    def discard(self) -> None:
        function = discard_reshard if self.name == "reshard" else discard_export
        function(self.dest, dest_options=self.options)


@pytest.fixture
def job(request, source, s3_url, s3_options) -> Job:
    return Job(getattr(request, "param", "reshard"), source, f"{s3_url}/dest", s3_options)


EACH_JOB = pytest.mark.parametrize("job", ["export", "cast", "reshard"], indirect=True)


@pytest.fixture(scope="module")
def expected(source, s3_server, s3_bucket) -> Callable[[Job], tuple[dict[str, bytes], int]]:
    """What a job makes when nobody stops it, and of how many parts."""
    made: dict[str, tuple[dict[str, bytes], int]] = {}

    def get(job: Job) -> tuple[dict[str, bytes], int]:
        if job.name not in made:
            url = f"s3://{s3_bucket}/resume/expected-{job.name}"
            report = job.run(to=url)
            made[job.name] = objects(open_store(url, options=job.options)), report["num_parts"]
        return made[job.name]

    return get


def objects(store: Store) -> dict[str, bytes]:
    """All objects but the manifest, which has a time in it."""
    return {o.key: store.read(o.key) for o in store.list() if o.key != "ckpt.json"}


def listed_parts(store: Store) -> set[tuple[str, int]]:
    """(upload, part) that the server has of uploads that are not finished."""
    return {
        (upload.token, receipt.number)
        for upload in store.list_uploads()
        for receipt in store.attach_assembly(upload.key, upload.token, num_bytes=0).listed_parts()
    }


def sent_parts(proxy: FaultProxy) -> set[tuple[str, int]]:
    """(upload, part) whose bytes a client sent, not those that the server copied."""
    queries = [
        parse_qs(urlsplit(request.path).query)
        for request in proxy.requests
        if request.method == "PUT" and "x-amz-copy-source" not in request.headers
    ]
    return {(q["uploadId"][0], int(q["partNumber"][0]) - 1) for q in queries if "uploadId" in q}


def assert_clean(store: Store) -> None:
    assert list(store.list_uploads()) == []
    assert [o.key for o in store.list() if JOURNAL_NAME in o.key] == []


class KillAt:
    """Kills a process at its n-th request of a kind, before or after the server did it."""

    def __init__(self, number: int, *, done: bool) -> None:
        self.number, self.done = number, done
        self.process: subprocess.Popen[str] | None = None
        self.seen = 0

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        self.seen += 1
        if self.seen == self.number:
            if self.done:
                forward(request)
            assert self.process is not None
            self.process.kill()
        return None if self.seen >= self.number else forward(request)


def kill_at(job: Job, proxy: FaultProxy, method: str, pattern: str, killer: KillAt) -> None:
    proxy.fail(method, pattern, answer=killer)
    killer.process = job.start(proxy)
    err = killer.process.communicate(timeout=120)[1]
    assert killer.process.returncode == -9, err


PART = "partNumber="


@EACH_JOB
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_a_kill_loses_only_what_was_in_flight(job, number, s3_proxy, expected):
    """Kill -9 at any part: parts that the server lists are not written again; same bytes."""
    wanted, num_parts = expected(job)
    rng = random.Random(f"{job.name} {number}")
    killer = KillAt(rng.randint(1, num_parts), done=rng.random() < 0.5)
    kill_at(job, s3_proxy, "PUT", PART, killer)
    with pytest.raises(NoCheckpointError):
        open_checkpoint(job.dest, options=job.options)
    assert not any(key.endswith((".safetensors", ".distcp")) for key in objects(job.store))
    there = listed_parts(job.store) & sent_parts(s3_proxy)
    s3_proxy.clear()
    report = job.run(resume=True, proxy=s3_proxy)
    assert report["num_parts"] == num_parts
    assert report["num_parts_kept"] >= len(there)
    assert not there & sent_parts(s3_proxy)
    assert objects(job.store) == wanted
    assert_clean(job.store)


@EACH_JOB
def test_discard_leaves_nothing(job, s3_proxy):
    """No upload, no object and no journal is left, and a new run is not refused."""
    kill_at(job, s3_proxy, "PUT", PART, KillAt(2, done=True))
    with pytest.raises(RefusedError, match="interrupted") as caught:
        job.run()
    assert "--resume" in str(caught.value) and "--discard" in str(caught.value)
    job.discard()
    assert list(job.store.list()) == []
    assert_clean(job.store)
    job.run()


@pytest.mark.parametrize(
    ("method", "pattern", "done"),
    [
        ("POST", "uploads", True),  # an upload is begun, and no record tells of it
        ("POST", "uploadId=", False),  # an object is to be published
        ("POST", "uploadId=", True),  # it is, and no record tells of it
        ("PUT", r"ckptool-journal\.json\.00000", False),
    ],
)
@pytest.mark.parametrize("end", ["resume", "discard"])
def test_a_kill_at_each_turn(job, method, pattern, done, end, s3_proxy, expected):
    """Whatever it was about to do: --resume ends in the same bytes, --discard in nothing."""
    kill_at(job, s3_proxy, method, pattern, KillAt(1, done=done))
    if end == "resume":
        job.run(resume=True)
        assert objects(job.store) == expected(job)[0]
    else:
        job.discard()
        assert list(job.store.list()) == []
    assert_clean(job.store)


AT_COMMIT = {
    "one-published": "after(Journal, 'published')",
    "before-the-metadata": "before(S3Store, 'put', lambda self, key, *a: key == '.metadata')",
    "committed": "before(Journal, 'remove')",
}
IMPORTS = "from ckptool.engine.journal import Journal\nfrom ckptool.storage.s3 import S3Store\n"


@pytest.mark.parametrize("place", AT_COMMIT)
@pytest.mark.parametrize("end", ["resume", "discard"])
def test_a_kill_in_the_commit(source, s3_url, s3_options, place, end, expected):
    """Between the first published file and the end: no part is written again, or all goes."""
    job = Job("reshard", source, f"{s3_url}/dest", s3_options)
    wanted, num_parts = expected(job)
    killed_inside(IMPORTS + AT_COMMIT[place], job.args(s3_options))
    if end == "resume":
        assert job.run(resume=True)["num_parts_kept"] == num_parts
        assert objects(job.store) == wanted
    else:
        job.discard()
        assert list(job.store.list()) == []
    assert_clean(job.store)


def test_uploads_that_are_gone_are_begun_again(job, s3_proxy, expected):
    """A rule of the bucket may abort old uploads: what is gone is written again."""
    kill_at(job, s3_proxy, "PUT", PART, KillAt(2, done=True))
    for upload in job.store.list_uploads():
        job.store.abort_upload(upload.key, upload.token)
    assert job.run(resume=True)["num_parts_kept"] == 0
    assert objects(job.store) == expected(job)[0]
    assert_clean(job.store)


def test_a_single_file_leaves_the_uploads_of_others(source, s3_url, s3_options, s3_proxy):
    """Beside a file that is discarded, other uploads in its folder go on."""
    job = Job("cast", source, f"{s3_url}/model.safetensors", s3_options)
    folder = open_store(s3_url, options=s3_options)
    other = folder.open_assembly("other.safetensors", num_bytes=1)
    kill_at(job, s3_proxy, "PUT", PART, KillAt(2, done=True))
    job.discard()
    assert [u.key for u in folder.list_uploads()] == ["other.safetensors"]
    other.abort()
    assert list(folder.list()) == []


def test_damage_found_by_a_resumed_run_leaves_nothing(s3_url, s3_options, s3_proxy, tmp_path):
    """Uploads of files that the resumed run has not reached go too."""
    array = random_array((6144, 512), "float32", seed=5)
    index = write_checkpoint(tmp_path / "a", {"w": rows_of(array, "float32", 1536, 4608)})
    source = open_store(f"{s3_url}/source", options=s3_options)
    for path in (tmp_path / "a").iterdir():
        source.put(path.name, path.read_bytes())
    job = Job("reshard", f"{s3_url}/source", f"{s3_url}/dest", s3_options)
    kill_at(job, s3_proxy, "POST", "uploadId=", KillAt(1, done=False))
    uploads = job.store.list_uploads()
    assert len(uploads) == 3
    for upload in uploads:
        if upload.key == "__0_0.distcp":  # its parts have to be made again, from what is broken
            job.store.abort_upload(upload.key, upload.token)
    item = index.entries["w"].chunks[0].item
    data = bytearray(source.read(item.file))
    data[item.offset + 5000] ^= 1
    source.put(item.file, bytes(data))
    with pytest.raises(DamagedError):
        job.run(resume=True)
    assert list(job.store.list()) == []
    assert_clean(job.store)


def test_no_secret_in_a_journal(job, s3_proxy):
    """A journal holds URLs and digests; neither key nor secret, nor the endpoint's options."""
    kill_at(job, s3_proxy, "PUT", PART, KillAt(2, done=True))
    text = b"".join(v for k, v in objects(job.store).items() if JOURNAL_NAME in k).decode()
    assert job.source in text
    for name in ("key", "secret"):
        assert str(job.options[name]) not in text
    job.discard()
