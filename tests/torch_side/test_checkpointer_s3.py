"""Saves and loads on a real S3 server, and a proxy in front of it that fails as it is told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gloo import run_ranks
from s3_faults import FaultProxy, error

from ckptool.errors import StorageError
from ckptool.storage import open_store
from ckptool.torch import Checkpointer

DEADLINE_S = 10.0
NEWS_S = 10.0  # how soon after a deadline or a death every rank must know


@pytest.fixture
def options(s3_options: dict[str, Any], s3_proxy: FaultProxy) -> dict[str, Any]:
    return {
        **s3_options,
        "endpoint_url": s3_proxy.endpoint_url,
        "ckptool_deadline_s": DEADLINE_S,
    }


@pytest.fixture(autouse=True)
def no_fault_is_left() -> Iterator[None]:
    yield
    os.environ.pop("CKPTOOL_FAULT", None)


def _state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(5000, 2000, generator=generator), "b": torch.ones(3), "step": seed}


def _zeros() -> dict[str, Any]:
    return {"w": torch.zeros(5000, 2000), "b": torch.zeros(3), "step": None}


def test_a_save_in_flight_to_s3_loads_bit_for_bit(s3_url: str, s3_options: dict[str, Any]) -> None:
    """In parts through the uploader, back in ranges, with every byte verified."""
    with Checkpointer(s3_url, storage_options=s3_options) as checkpointer:
        checkpointer.save(7, _state(7))
        found = _zeros()
        report = checkpointer.load(found)
        assert report is not None
        assert torch.equal(found["w"], _state(7)["w"])
        assert found["step"] == 7
        assert report.unverified_bytes == 0
        assert report.amplification < 1.02
    store = open_store(s3_url, options=s3_options).child("step-00000007")
    manifest = json.loads(store.read("ckpt.json"))
    assert manifest["verified"] == ("checksum" if store.capabilities.checksums else "size")


def test_a_busy_store_is_patiently_asked(
    s3_url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """A part that is answered 503 a few times does not fail the save."""
    s3_proxy.fail("PUT", "partNumber=2", times=3)
    with Checkpointer(s3_url, storage_options=options) as checkpointer:
        checkpointer.save(1, _state(1))
        checkpointer.wait()
        assert checkpointer.latest() == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="busy for ever", marks=pytest.mark.full),  # as on two ranks below
        pytest.param(error(400, "ExpiredToken"), id="token expired"),
    ],
)
def test_patience_ends_with_a_clear_error(
    s3_url: str, options: dict[str, Any], s3_proxy: FaultProxy, answer: Any
) -> None:
    """After at least six more tries, and soon after the deadline, the save fails; the last step
    stands, and nothing half written is left after it; the next save is clean."""
    with Checkpointer(s3_url, storage_options=options) as checkpointer:
        started = time.monotonic()
        checkpointer.save(1, _state(1))
        checkpointer.wait()
        usual_s, before = time.monotonic() - started, s3_proxy.count("PUT", "partNumber=2")
        s3_proxy.fail("PUT", "partNumber=2", answer=answer)
        started = time.monotonic()
        checkpointer.save(2, _state(2))
        with pytest.raises(StorageError) as caught:
            checkpointer.wait()
        assert time.monotonic() - started < usual_s + DEADLINE_S + NEWS_S
        if answer is None:
            assert s3_proxy.count("PUT", "partNumber=2") - before > 6
        assert "__0_0" in str(caught.value)
        s3_proxy.clear()
        assert checkpointer.latest() == 1
        assert not open_store(s3_url, options=options).list_uploads()
        checkpointer.save(2, _state(2))
        checkpointer.wait()
        assert checkpointer.latest() == 2


def test_the_next_start_aborts_stale_uploads(s3_url: str, s3_options: dict[str, Any]) -> None:
    """An uploader that was killed leaves a multipart upload; the next start drops it, and no
    other one."""
    store = open_store(s3_url, options=s3_options)
    other = store.open_assembly("export/model.safetensors", num_bytes=1 << 24)
    with Checkpointer(s3_url, storage_options=s3_options, on_failure="warn") as checkpointer:
        os.environ["CKPTOOL_FAULT"] = "in-part:kill-uploader"
        checkpointer.save(1, _state(1))
        checkpointer.wait()
        os.environ.pop("CKPTOOL_FAULT")
    assert len(store.list_uploads()) == 2
    Checkpointer(s3_url, storage_options=s3_options).close()
    assert [row.token for row in store.list_uploads()] == [other.token]


def worker(rank: int, num_ranks: int, *, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1's parts are refused for ever; both ranks must learn of it."""
    from ckptool.errors import CkptoolError

    state = {f"w{rank}": torch.ones(5000, 2000), "step": 1}
    with Checkpointer(url, storage_options=options, process_timeout_s=60) as checkpointer:
        checkpointer.prepare(state)
        started = time.monotonic()
        checkpointer.save(1, state)
        try:
            checkpointer.wait()
        except CkptoolError as failure:
            return {"error": str(failure), "seconds": time.monotonic() - started}
    return {"error": None, "seconds": 0.0}


def dying_worker(rank: int, num_ranks: int, *, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 is killed in the midst of its second upload; rank 0 tells what it hears."""
    from ckptool.errors import CkptoolError

    state = {f"w{rank}": torch.ones(5000, 2000), "step": 1}
    checkpointer = Checkpointer(url, storage_options=options, process_timeout_s=60)
    started = time.monotonic()
    checkpointer.save(1, state)
    checkpointer.wait()
    usual_s = time.monotonic() - started
    os.environ["CKPTOOL_FAULT"] = "in-part:kill:1"
    started = time.monotonic()
    checkpointer.save(2, state)
    try:
        checkpointer.wait()
    except CkptoolError as failure:
        print(json.dumps([str(failure), usual_s, time.monotonic() - started]), flush=True)
        os._exit(7)
    return {}


def test_a_rank_that_dies_in_an_upload_is_heard_of(s3_url: str, s3_options: dict[str, Any]) -> None:
    """The other rank has a clear error soon, the last step stands, and after the next start no
    multipart upload is left."""
    ends = run_ranks(
        __file__, "dying_worker", num_ranks=2, must_succeed=False, url=s3_url, options=s3_options
    )
    assert [end.code for end in ends] == [7, -9], [end.output for end in ends]
    told, usual_s, seconds = json.loads(ends[0].output.splitlines()[-1])
    assert "gone" in told
    assert seconds < usual_s + NEWS_S
    with Checkpointer(s3_url, storage_options=s3_options) as checkpointer:
        assert checkpointer.latest() == 1
    assert not open_store(s3_url, options=s3_options).list_uploads()


def test_a_killed_uploader_is_heard_of(s3_url: str, s3_options: dict[str, Any]) -> None:
    """The save fails soon, not at a timeout; the last step stands, and the next save is whole."""
    with Checkpointer(s3_url, storage_options=s3_options) as checkpointer:
        started = time.monotonic()
        checkpointer.save(1, _state(1))
        checkpointer.wait()
        usual_s = time.monotonic() - started
        os.environ["CKPTOOL_FAULT"] = "in-part:kill-uploader"
        started = time.monotonic()
        checkpointer.save(2, _state(2))
        with pytest.raises(StorageError, match="uploader process"):
            checkpointer.wait()
        assert time.monotonic() - started < usual_s + NEWS_S
        del os.environ["CKPTOOL_FAULT"]
        assert checkpointer.latest() == 1
        checkpointer.save(2, _state(2))
        checkpointer.wait()
        assert checkpointer.latest() == 2


def test_compressed_saves_to_s3_load_bit_for_bit(s3_url: str, s3_options: dict[str, Any]) -> None:
    """Sent in order, in parts, and back; what a failed one began is gone."""
    state = {**_state(5), "flat": torch.ones(5000, 2000)}
    with Checkpointer(
        s3_url, storage_options=s3_options, compress="zstd", on_failure="warn"
    ) as checkpointer:
        os.environ["CKPTOOL_FAULT"] = "in-part:raise"
        checkpointer.save(5, state)
        checkpointer.wait()
        del os.environ["CKPTOOL_FAULT"]
        assert not checkpointer.finished()[0].committed
        assert not open_store(s3_url, options=s3_options).list_uploads()
        checkpointer.save(5, state)
        found = {**_zeros(), "flat": torch.zeros(5000, 2000)}
        loaded = checkpointer.load(found)
        assert loaded is not None
        assert loaded.unverified_bytes == 0
        assert all(torch.equal(found[key], state[key]) for key in ("w", "b", "flat"))
        assert loaded.fetched_bytes < 45_000_000


def test_one_ranks_storage_failure_is_every_ranks(
    s3_url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """After at least six more tries, soon after the deadline, both ranks raise the storage's
    own words, and nothing stands."""
    s3_proxy.fail("PUT", "__1_0.*partNumber=1")
    ends = run_ranks(__file__, "worker", num_ranks=2, url=s3_url, options=options)
    for end in ends:
        assert "__1_0" in str(end.result["error"])
        assert end.result["seconds"] < DEADLINE_S + 2 * NEWS_S  # and the parts before it
    assert s3_proxy.count("PUT", "__1_0.*partNumber=1") > 6
    s3_proxy.clear()
    store = open_store(s3_url, options=options)
    assert not [info for info in store.list() if info.key.endswith(".metadata")]
    assert not store.list_uploads()


def test_who_may_only_read_may_load(s3_url: str, s3_server: Any) -> None:
    """Credentials that read and list suffice to load; a save with them says what is missing."""
    with Checkpointer(s3_url, storage_options=s3_server.storage_options()) as checkpointer:
        checkpointer.save(1, _state(1), mode="sync")
    options = s3_server.storage_options(read_only=True)
    with Checkpointer(s3_url, storage_options=options, on_failure="warn") as checkpointer:
        found = _zeros()
        assert checkpointer.load(found) is not None
        assert torch.equal(found["w"], _state(1)["w"])
        checkpointer.save(2, _state(2))
        checkpointer.wait()
        assert "denied" in str(checkpointer.finished()[0].error).lower()
