"""What an S3 store does when the server, the network or the credentials fail."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_faults import FaultProxy, Reply, Request, cut, edit, error, lost, reset
from s3_server import S3Server

from ckptool.errors import (
    AccessError,
    CkptoolError,
    NotEmptyError,
    ObjectMissingError,
    ShortReadError,
    StorageError,
)
from ckptool.model import Extent
from ckptool.storage import open_store, retry
from ckptool.storage.s3 import S3Store

PART = 5 * 2**20
DATA = random.Random(7).randbytes(300_000)


@pytest.fixture
def options(s3_options: dict[str, Any], s3_proxy: FaultProxy) -> dict[str, Any]:
    return {**s3_options, "endpoint_url": s3_proxy.endpoint_url, "ckptool_deadline_s": 10}


@pytest.fixture
def store(s3_url: str, options: dict[str, Any]) -> S3Store:
    return _open(s3_url, options)


def _open(url: str, options: dict[str, Any]) -> S3Store:
    store = open_store(url, options=options)
    assert isinstance(store, S3Store)
    return store


def _impatient(store: S3Store, options: dict[str, Any]) -> S3Store:
    """The same store with a deadline of one second; its bucket has been seen."""
    hasty = _open(store.url, {**options, "ckptool_deadline_s": 1})
    hasty.put("seen", b"")
    return hasty


def _assemble(store: S3Store, data: bytes) -> None:
    assembly = store.open_assembly("big", num_bytes=len(data))
    starts = range(0, len(data), PART)
    parts = [assembly.write_part(n, s, data[s : s + PART]) for n, s in enumerate(starts)]
    assembly.commit(parts)


def _stream(store: S3Store, data: bytes) -> None:
    stream = store.open_stream("big")
    stream.write(data)
    stream.commit()


CALLS: dict[str, Callable[[S3Store], object]] = {
    "list": lambda store: store.list(),
    "list_level": lambda store: store.list_level(),
    "info": lambda store: store.info("k"),
    "read": lambda store: store.read("k"),
    "read_many": lambda store: store.read_many([Extent("k", 1, 5), Extent("k", 7, 9)]),
    "read_into": lambda store: store.read_into(Extent("k", 0, 9), memoryview(bytearray(9))),
    "put": lambda store: store.put("k", DATA),
    "delete": lambda store: store.delete("k"),
    "assembly": lambda store: _assemble(store, bytes(PART) + DATA),
    "stream": lambda store: _stream(store, bytes(16 * 2**20) + DATA),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_busy_store_is_asked_again(store: S3Store, s3_proxy: FaultProxy, name: str) -> None:
    """Two answers of SlowDown to every kind of request do not fail a call."""
    store.put("k", DATA)
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        s3_proxy.fail(method, times=2)
    CALLS[name](store)


@pytest.mark.parametrize(
    "answer",
    [error(500, "InternalError"), error(502, "BadGateway"), error(504, "odd"), reset()],
    ids=["500", "502", "504", "reset"],
)
def test_other_transient_failures(store: S3Store, s3_proxy: FaultProxy, answer: Any) -> None:
    """Server errors and connections that are reset are tried again."""
    s3_proxy.fail("PUT", "big", times=2, answer=answer)
    _assemble(store, DATA)
    s3_proxy.fail("GET", "big", times=2, answer=answer)
    assert store.read("big") == DATA


def test_patience_ends(store: S3Store, options: dict[str, Any], s3_proxy: FaultProxy) -> None:
    """A store that stays busy gets six tries or more, then the error says what and where."""
    hasty = _impatient(store, options)
    s3_proxy.fail("PUT", "partNumber=2")
    assembly = hasty.open_assembly("big", num_bytes=2 * PART)
    assembly.write_part(0, 0, bytes(PART))
    with pytest.raises(StorageError, match=r"big, part 1 .*SlowDown") as caught:
        assembly.write_part(1, PART, bytes(PART))
    assert "later" in str(caught.value)
    assert s3_proxy.count("PUT", "partNumber=2") >= 6
    assembly.abort()
    assert not hasty.list_uploads()


def test_retries_of_the_client_do_not_multiply(
    store: S3Store, options: dict[str, Any], s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither botocore nor s3fs tries again below us."""
    hasty = _impatient(store, options)
    monkeypatch.setattr(retry.Patience, "next_delay_s", lambda self, failure: None)
    s3_proxy.fail("GET", "k")
    with pytest.raises(StorageError):
        hasty.read("k")
    assert s3_proxy.count("GET", "k") == 1


@pytest.mark.parametrize("call", ["read", "read_many", "read_into"])
def test_a_read_that_breaks_off_goes_on(store: S3Store, s3_proxy: FaultProxy, call: str) -> None:
    """A connection cut twice at 60 % still gives every byte."""
    store.put("k", DATA)
    s3_proxy.fail("GET", times=2, answer=cut(0.6))
    extent = Extent("k", 1000, 250_000)
    if call == "read":
        got: Any = store.read("k", start=extent.start, end=extent.end)
    elif call == "read_many":
        got = store.read_many([extent, Extent("k", 0, 1)])[0]
    else:
        got = bytearray(extent.num_bytes)
        store.read_into(extent, memoryview(got))
    assert got == DATA[1000:250_000]


def test_a_range_answered_short_goes_on(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A server that sends fewer bytes than asked for, without an error, is asked for the rest."""
    store.put("k", DATA)

    def shorten(reply: Reply) -> None:
        reply.body = reply.body[: len(reply.body) * 6 // 10]

    s3_proxy.fail("GET", times=2, answer=edit(shorten))
    assert store.read("k", start=5, end=200_000) == DATA[5:200_000]


def test_reads_that_stay_short_name_the_byte(
    store: S3Store, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """When patience ends, the error names the object and the offset."""
    store.put("k", DATA)
    hasty = _impatient(store, options)
    s3_proxy.fail("GET", answer=cut(0))
    with pytest.raises(CkptoolError, match=r"/k") as caught:
        hasty.read("k", start=1000, end=2000)
    assert "1000" in str(caught.value)


def test_an_object_that_is_too_short_is_not_asked_again(
    store: S3Store, s3_proxy: FaultProxy
) -> None:
    """Where the object ends before the range does, trying again is no use."""
    store.put("k", b"0123456789")
    s3_proxy.clear()
    with pytest.raises(ShortReadError, match="the object has 10 bytes"):
        store.read("k", start=5, end=20)
    assert s3_proxy.count("GET") == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_bucket_is_named_and_not_made(
    s3_server: S3Server, s3_options: dict[str, Any], name: str
) -> None:
    """Every call says that the bucket is missing; none creates it, though the rights are there."""
    store = _open("s3://no-such-bucket/run", s3_options)
    with pytest.raises(AccessError, match="no-such-bucket") as caught:
        CALLS[name](store)
    assert "create the bucket" in str(caught.value)
    assert s3_server.endpoint_url in str(caught.value)
    with pytest.raises(AccessError):
        _open("s3://no-such-bucket", s3_options).list()


@pytest.mark.parametrize("key", ["AKID", "NOKEY"])
@pytest.mark.parametrize("name", CALLS)
def test_wrong_credentials(s3_url: str, s3_options: dict[str, Any], name: str, key: str) -> None:
    """Every call says that the credentials are wrong, at once, without showing them."""
    store = _open(s3_url, {**s3_options, "key": key, "secret": "T0PSECRET"})
    with pytest.raises(AccessError, match="credentials") as caught:
        CALLS[name](store)
    assert "T0PSECRET" not in f"{caught.value} {caught.value.facts}"


def test_credentials_that_may_only_read(
    s3_server: S3Server, s3_url: str, s3_options: dict[str, Any]
) -> None:
    """They can read; writing says that the permission is missing."""
    _open(s3_url, s3_options).put("k", b"data")
    store = _open(s3_url, s3_server.storage_options(read_only=True))
    assert store.read("k") == b"data"
    for name in ("put", "assembly", "stream"):
        with pytest.raises(AccessError, match="AccessDenied"):
            CALLS[name](store)


def test_an_endpoint_that_never_answers(
    s3_url: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that nobody listens at is given up long before the deadline."""
    monkeypatch.setattr(retry, "_UNREACHABLE_S", 0.3)
    store = _open(s3_url, {**s3_options, "endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(AccessError, match=r"http://127.0.0.1:1.*endpoint_url"):
        store.list()


def test_an_expired_token_is_tried_again(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A token that expires during an upload costs one part's try, not the upload."""
    expired = error(400, "ExpiredToken", "The provided token has expired.")
    s3_proxy.fail("PUT", "partNumber=2", times=1, answer=expired)
    data = bytes(2 * PART) + DATA
    _assemble(store, data)
    assert store.read("big") == data


def test_a_token_that_stays_expired(
    store: S3Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some tries the error says to renew the credentials."""
    monkeypatch.setattr(retry, "_FIRST_DELAY_S", 0.001)
    store.put("seen", b"")
    s3_proxy.fail("PUT", "", answer=error(400, "ExpiredToken", "The provided token has expired."))
    with pytest.raises(AccessError, match="renew the credentials"):
        store.put("k", b"data")
    assert s3_proxy.count("PUT", "k") >= 6


def test_credentials_renewed_in_their_file(
    s3_url: str,
    options: dict[str, Any],
    s3_proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Credentials that expired are read again from where they came from."""
    _open(s3_url, options).put("k", b"data")
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    file.write_text(text.format("AKID", "SECRET"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    expired = error(400, "ExpiredToken")

    def renew(request: Request, forward: Any) -> Reply | None:
        file.write_text(text.format("ROKEY", "ROSECRET"))
        return expired(request, forward)

    s3_proxy.fail(when=lambda r: "AKID" in r.headers["authorization"], answer=renew)
    given = {k: v for k, v in options.items() if k not in ("key", "secret")}
    assert _open(s3_url, given).read("k") == b"data"


@pytest.mark.parametrize("name", CALLS)
def test_requester_pays_goes_with_every_request(
    s3_url: str, options: dict[str, Any], s3_proxy: FaultProxy, name: str
) -> None:
    """No request that may carry it lacks the requester-pays header."""
    store = _open(s3_url, {**options, "requester_pays": True})
    store.put("k", DATA)
    s3_proxy.fail(
        when=lambda r: "x-amz-request-payer" not in r.headers,
        answer=error(403, "AccessDenied"),
    )
    CALLS[name](store)
    store.list_uploads()


def test_checksum_headers_refused(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that refuses our checksums gets none, and sizes are compared instead."""
    s3_proxy.fail(
        when=lambda r: any("checksum" in name for name in r.headers),
        answer=error(501, "NotImplemented", "x-amz-checksum-crc32 is not implemented"),
    )
    data = bytes(PART) + DATA
    assembly = store.open_assembly("big", num_bytes=len(data))
    parts = [assembly.write_part(0, 0, data[:PART]), assembly.write_part(1, PART, data[PART:])]
    assert [part.checksum for part in parts] == [None, None]
    assembly.commit(parts)
    assert store.read("big") == data
    store.put("small", DATA)
    assert store.read("small") == DATA
    assert not store.capabilities.checksums


def test_checksum_trailers_refused_name_the_setting(
    s3_url: str, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """Where the user's own setting makes the client send what is refused, the error names it."""
    config = {"request_checksum_calculation": "when_supported"}
    store = _open(s3_url, {**options, "config_kwargs": config})
    s3_proxy.fail(
        when=lambda r: any("checksum" in name for name in r.headers),
        answer=error(400, "InvalidArgument", "x-amz-sdk-checksum-algorithm is not supported"),
    )
    with pytest.raises(StorageError, match="request_checksum_calculation"):
        store.put("k", DATA)


def test_a_store_that_ignores_checksums(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A store that takes a checksum without a word gets receipts that claim none."""

    def forget(reply: Reply) -> None:
        for name in [name for name in reply.headers if "checksum" in name.lower()]:
            del reply.headers[name]

    s3_proxy.fail("PUT", answer=edit(forget))
    assembly = store.open_assembly("big", num_bytes=len(DATA))
    assert assembly.write_part(0, 0, DATA).checksum is None
    assert not store.capabilities.checksums
    assembly.abort()
    s3_proxy.clear()
    store.put("k", DATA)
    assert s3_proxy.count("HEAD", "/k") == 1


def test_bytes_garbled_on_the_wire_are_found(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that does not have the CRC-32 that it was sent with is refused by the server."""
    monkeypatch.setattr(retry, "_FIRST_DELAY_S", 0.001)
    assembly = store.open_assembly("big", num_bytes=len(DATA))
    with pytest.raises(StorageError, match="what arrived differs"):
        assembly.write_part(0, 0, DATA, crc32=zlib.crc32(DATA) ^ 1)
    assembly.abort()


@pytest.mark.parametrize("name", ["assembly", "stream"])
def test_a_stored_size_that_differs(store: S3Store, s3_proxy: FaultProxy, name: str) -> None:
    """An object that has other than the bytes that were sent is an error after the upload."""

    def grow(reply: Reply) -> None:
        reply.headers["Content-Length"] = str(int(reply.headers["Content-Length"]) + 40)

    s3_proxy.fail("HEAD", "big", answer=edit(grow))
    with pytest.raises(StorageError, match=r"after .* were sent"):
        CALLS[name](store)


def test_a_conditional_put_whose_answer_was_lost(store: S3Store, s3_proxy: FaultProxy) -> None:
    """A put that was stored, though its answer was lost, is no conflict with itself."""
    s3_proxy.fail("PUT", times=1, answer=lost())
    store.put("k", DATA, if_absent=True)
    assert store.read("k") == DATA


def test_a_conditional_put_that_another_one_won(store: S3Store, s3_proxy: FaultProxy) -> None:
    """Two writers that both saw nothing: the server tells the second one."""
    s3_proxy.fail("HEAD", "/k", times=1, answer=error(404, "NotFound"))
    store.put("k", b"theirs")
    with pytest.raises(NotEmptyError):
        store.put("k", b"ours", if_absent=True)
    assert store.read("k") == b"theirs"


@pytest.mark.parametrize("name", ["assembly", "stream"])
def test_a_commit_whose_answer_was_lost(store: S3Store, s3_proxy: FaultProxy, name: str) -> None:
    """An upload that was completed, though its answer was lost, is complete."""
    s3_proxy.fail("POST", "uploadId=", times=1, answer=lost())
    CALLS[name](store)
    assert store.info("big").num_bytes > PART


def test_a_commit_that_is_gone(store: S3Store) -> None:
    """An upload that somebody else aborted cannot be committed."""
    assembly = store.open_assembly("big", num_bytes=len(DATA))
    part = assembly.write_part(0, 0, DATA)
    store.abort_upload("big", assembly.token)
    with pytest.raises(StorageError, match="big"):
        assembly.commit([part])
    with pytest.raises(ObjectMissingError):
        store.info("big")


def test_a_stream_that_fails_publishes_nothing(
    store: S3Store, options: dict[str, Any], s3_proxy: FaultProxy
) -> None:
    """When a part cannot be sent, the object does not appear and abort leaves no parts."""
    hasty = _impatient(store, options)
    s3_proxy.fail("PUT", "partNumber=1")
    stream = hasty.open_stream("big")
    with pytest.raises(StorageError, match="part 0"):  # noqa: PT012
        stream.write(bytes(17 * 2**20))
        stream.commit()
    stream.abort()
    s3_proxy.clear()
    assert [o.key for o in hasty.list()] == ["seen"]
    assert not hasty.list_uploads()
