"""Where the work is done changes nothing: threads, processes and Dask write the same bytes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_runs import parts_recorded
from plain_checkpoint import Saved, random_array, rows_of, write_checkpoint

from ckptool.engine.dask_cluster import without_secrets
from ckptool.engine.executors import WorkerRecipe
from ckptool.engine.run import How
from ckptool.errors import CkptoolError, DamagedError, RefusedError, UsageError
from ckptool.layout import JOURNAL_NAME
from ckptool.model import Box
from ckptool.operations.export import export
from ckptool.operations.reshard import reshard
from ckptool.storage import open_store
from ckptool.storage.base import StoreRecipe

distributed = pytest.importorskip("distributed")

THREADS = How(jobs=2, max_memory=2 << 20)
SECRET = "a-secret-of-nobody"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two workers of one thread each, processes of their own."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, columns, compressed and transposed items, and values."""
    folder = tmp_path_factory.mktemp("executors") / "step-00000003"
    array = random_array((768, 1024), "float32", seed=1)
    halves = [Box((0, 512 * k), (768, 512)) for k in range(2)]
    tensors = {
        "model.rows": rows_of(array, "float32", 256, 256, 256),
        "model.columns": Saved(array, halves, "float32"),
        "model.zstd": Saved(array[:64], [Box((0, 0), (64, 1024))], "float32", stored="zstd"),
        "model.turned": Saved(
            array[:64], [Box((0, 0), (64, 1024))], "float32", stored="transposed"
        ),
    }
    write_checkpoint(folder, tensors, values={"step": 3})
    return folder


def shards(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "ckpt.json"}


def how_on(kind: str, cluster: Any) -> How:
    executor = f"dask:{cluster.scheduler_address}" if kind == "dask" else kind
    return How(jobs=2, max_memory=2 << 20, executor=executor)


JOBS: dict[str, Callable[[Path, Path, How], Any]] = {
    "export": lambda a, b, how: export(str(a), str(b), how=how),
    "cast": lambda a, b, how: export(str(a), str(b), dtype="bf16", how=how),
    "torch": lambda a, b, how: export(str(a), str(b), format="torch", how=how),
    "reshard": lambda a, b, how: reshard(str(a), str(b), to=4, merge=True, how=how),
}


@pytest.mark.parametrize("job", JOBS)
def test_the_same_bytes_everywhere(job, source, tmp_path, cluster):
    """Threads, spawned processes and two Dask workers: equal files, equal counts."""
    made, counts = {}, {}
    for kind in ("threads", "processes", "dask"):
        result = JOBS[job](source, tmp_path / kind, how_on(kind, cluster))
        made[kind] = shards(tmp_path / kind)
        counts[kind] = (result.report.payloads_proved, result.report.objects)
    assert made["threads"] == made["processes"] == made["dask"]
    assert counts["threads"] == counts["processes"] == counts["dask"]


def wait_for_parts(folder: Path, number: int, work: threading.Thread) -> None:
    deadline = time.monotonic() + 60
    while parts_recorded(folder / JOURNAL_NAME) < number and work.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Running(threading.Thread):
    """An export in the background, whose end can be waited for."""

    def __init__(self, source: Path, dest: Path, how: How) -> None:
        super().__init__()
        self.source, self.dest, self.how = source, dest, how
        self.report: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.report = export(str(self.source), str(self.dest), how=self.how).report
        except BaseException as error:
            self.error = error


@pytest.fixture
def long(tmp_path) -> Path:
    """128 parts of 256 KiB."""
    array = random_array((8192, 1024), "float32", seed=2)
    write_checkpoint(tmp_path / "long", {"w": rows_of(array, "float32", 4096, 4096)})
    export(str(tmp_path / "long"), str(tmp_path / "expected"), how=THREADS)
    return tmp_path / "long"


def test_a_dask_worker_is_killed(long, tmp_path, cluster):
    """Its tasks go to the other worker: the job ends, with the same bytes."""
    with distributed.Client(cluster, set_as_default=False) as client:
        pids = client.run(os.getpid)
    job = Running(long, tmp_path / "dest", how_on("dask", cluster))
    job.start()
    wait_for_parts(tmp_path / "dest", 3, job)
    assert job.is_alive()
    os.kill(next(iter(pids.values())), signal.SIGKILL)
    job.join(120)
    assert job.error is None
    assert job.report.num_parts > 30
    assert shards(tmp_path / "dest") == shards(tmp_path / "expected")


def test_a_worker_process_is_killed(long, tmp_path):
    """The run stops, says what died of what, and can be taken up."""
    how = How(jobs=2, max_memory=2 << 20, executor="processes")
    before = set(multiprocessing.active_children())
    job = Running(long, tmp_path / "dest", how)
    job.start()
    wait_for_parts(tmp_path / "dest", 3, job)
    mine = [child for child in multiprocessing.active_children() if child not in before]
    assert mine[0].pid is not None
    os.kill(mine[0].pid, signal.SIGKILL)
    job.join(120)
    assert isinstance(job.error, CkptoolError)
    assert "a worker process died" in job.error.message and "-9" in job.error.message
    assert job.error.hint is not None
    assert "--max-memory" in job.error.hint and "--resume" in job.error.hint
    assert not [c for c in multiprocessing.active_children() if c not in before]
    report = export(str(long), str(tmp_path / "dest"), how=how, resume=True).report
    assert report is not None
    assert report.num_parts_kept >= 3
    assert shards(tmp_path / "dest") == shards(tmp_path / "expected")


@pytest.mark.parametrize("kind", ["processes", "dask"])
def test_damage_comes_back_as_itself(source, tmp_path, cluster, kind):
    """What a worker raises is raised here: DamagedError with the entry, file and byte."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in source.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    data = bytearray((broken / "__1_0.distcp").read_bytes())
    data[5000] ^= 1
    (broken / "__1_0.distcp").write_bytes(data)
    with pytest.raises(DamagedError, match=r"model\.rows.*__1_0\.distcp"):
        export(str(broken), str(tmp_path / "dest"), how=how_on(kind, cluster))
    assert not list((tmp_path / "dest").iterdir())


# secrets


class Wiretap(logging.Handler):
    """All that is logged anywhere, as text."""

    def __init__(self) -> None:
        super().__init__(level=0)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def wiretap() -> Iterator[Wiretap]:
    tap, root = Wiretap(), logging.getLogger()
    loggers = [root, logging.getLogger("ckptool"), logging.getLogger("distributed")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.addHandler(tap)
    yield tap
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(tap)
        logger.setLevel(level)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_no_secret_leaves_the_recipe(
    kind, source, s3_url, s3_server, s3_options, tmp_path, wiretap, monkeypatch
):
    """Plans, tasks, journals and logs hold URLs, never a secret."""
    from ckptool.engine import journal, run

    secret = str(s3_options["secret"])
    seen: list[bytes] = []
    real_task, real_add = run._Run._task, journal.Journal._add

    def task(self: Any, cut: Any) -> Any:
        made = real_task(self, cut)
        seen.append(pickle.dumps((made, self._plan)))
        return made

    def add(self: Any, record: Any) -> None:
        seen.append(repr((record, self._header)).encode())
        real_add(self, record)

    monkeypatch.setattr(run._Run, "_task", task)
    monkeypatch.setattr(journal.Journal, "_add", add)
    how = How(jobs=2, max_memory=40 << 20, executor=kind)
    export(str(source), s3_url, dest_options=s3_options, how=how)
    recipe = open_store(s3_url, options=s3_options).recipe()
    seen.append(repr(WorkerRecipe(recipe, recipe, 1, 1)).encode())
    assert len(seen) > 3
    text = b"".join(seen) + "\n".join(wiretap.lines).encode()
    assert s3_url.encode() in text
    assert secret.encode() == b"SECRET"
    assert secret.encode() not in text


def test_dask_gets_no_secret(source, s3_url, s3_options, monkeypatch, wiretap):
    """Workers use their own credentials: ours are not sent, and a job still runs."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_options["secret"])
    sent: list[bytes] = []
    real = distributed.Client.submit

    def submit(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(pickle.dumps(args))
        return real(self, function, *args, **kwargs)

    monkeypatch.setattr(distributed.Client, "submit", submit)
    with distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as own:
        how = How(max_memory=80 << 20, executor=f"dask:{own.scheduler_address}")
        report = export(str(source), s3_url, dest_options=s3_options, how=how).report
    assert report is not None and report.num_parts > 0
    assert sent
    text = b"".join(sent) + "\n".join(wiretap.lines).encode()
    assert str(s3_options["endpoint_url"]).encode() in text
    assert s3_options["secret"].encode() not in text
    assert s3_options["key"].encode() not in b"".join(sent)


def test_options_that_tell_nobody_anything():
    """Names of secrets, at any depth, and URLs with a password in them are left out."""
    options = {
        "endpoint_url": "http://127.0.0.1:9000",
        "anon": False,
        "key": SECRET,
        "secret": SECRET,
        "token": SECRET,
        "client_kwargs": {"region_name": "x", "aws_secret_access_key": SECRET},
        "config_kwargs": {"proxies": {"http": f"http://me:{SECRET}@proxy:3128"}},
        "s3_additional_kwargs": {"SSECustomerKey": SECRET},
        "lists": [{"password": SECRET}, f"https://a:{SECRET}@b/"],
    }
    cleaned = without_secrets(StoreRecipe("s3://bucket/x", options))
    assert SECRET not in repr(dict(cleaned.options))
    assert cleaned.options["endpoint_url"] == "http://127.0.0.1:9000"
    assert cleaned.options["client_kwargs"] == {"region_name": "x"}
    assert cleaned.options["anon"] is False


# what is refused


def test_credentials_travel_over_tls_only(source, tmp_path, cluster):
    """--dask-forward-credentials to a tcp:// scheduler is refused."""
    how = How(executor=f"dask:{cluster.scheduler_address}", forward_credentials=True)
    with pytest.raises(RefusedError, match="TLS"):
        export(str(source), str(tmp_path / "dest"), how=how)


def test_nobody_at_the_address(source, tmp_path, monkeypatch):
    """No scheduler there: --dask is named, and nothing is left."""
    monkeypatch.setattr("ckptool.engine.dask_cluster._CONNECT_TIMEOUT_S", 1)
    with pytest.raises(UsageError, match="no Dask scheduler answers"):
        export(str(source), str(tmp_path / "dest"), how=How(executor="dask:tcp://127.0.0.1:1"))
    assert not (tmp_path / "dest").exists() or not list((tmp_path / "dest").iterdir())


@pytest.mark.parametrize("kind", ["processes", "dask"])
def test_memory_is_seen_by_nobody_else(source, cluster, kind):
    """memory:// is empty in another process: refused."""
    with pytest.raises(RefusedError, match="not seen by other processes"):
        export(str(source), "memory://executors/x.safetensors", how=how_on(kind, cluster))
