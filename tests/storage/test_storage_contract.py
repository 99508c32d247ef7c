"""What every store promises, proved on a folder, on memory:// and on a real S3 server."""

from __future__ import annotations

import concurrent.futures
import random
import uuid
import zlib
from pathlib import Path
from typing import Any

import pytest

from ckptool.errors import (
    NotEmptyError,
    ObjectMissingError,
    RefusedError,
    ShortReadError,
    StorageError,
)
from ckptool.model import Extent
from ckptool.storage import Listing, PartReceipt, Store, open_recipe, open_store

PART = 5 * 2**20


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path / "root"))
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}")
    options: dict[str, Any] = request.getfixturevalue("s3_options")
    return open_store(request.getfixturevalue("s3_url"), options=options)


def _bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def test_put_then_read_gives_the_same_bytes(store: Store) -> None:
    """What was put is read back, whole and by range, and listed with its size."""
    data = _bytes(3000)
    info = store.put("a/b/object", data)
    assert (info.key, info.num_bytes) == ("a/b/object", 3000)
    assert store.read("a/b/object") == data
    assert store.read("a/b/object", start=10, end=20) == data[10:20]
    assert store.read("a/b/object", start=2990) == data[2990:]
    assert store.read("a/b/object", start=7, end=7) == b""
    assert store.info("a/b/object").num_bytes == 3000
    assert [(o.key, o.num_bytes) for o in store.list()] == [("a/b/object", 3000)]


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"xabcx")[1:4]])
def test_put_takes_any_buffer(store: Store, data: Any) -> None:
    """bytearray and memoryview are as good as bytes."""
    store.put("k", data)
    assert store.read("k") == b"abc"


def test_put_replaces(store: Store) -> None:
    """A second put of a key replaces the object."""
    store.put("k", b"one, and longer")
    store.put("k", b"two")
    assert store.read("k") == b"two"


def test_empty_object(store: Store) -> None:
    """An object may have no bytes."""
    store.put("k", b"")
    assert store.read("k") == b""
    assert store.info("k").num_bytes == 0


def test_put_if_absent_refuses_a_taken_key(store: Store) -> None:
    """The first conditional put wins; the second one changes nothing."""
    store.put("k", b"first", if_absent=True)
    with pytest.raises(NotEmptyError, match="already there"):
        store.put("k", b"second", if_absent=True)
    assert store.read("k") == b"first"


def test_listing_of_nothing_is_empty(store: Store) -> None:
    """A folder that is not there has no objects."""
    assert list(store.list()) == []
    assert list(store.list("no/such")) == []
    assert store.list_level() == Listing((), ())
    assert store.list_level("no/such") == Listing((), ())


def test_levels(store: Store) -> None:
    """A level holds its own objects and the names of its folders; siblings do not mix in."""
    for key in ("top", "step-1/.metadata", "step-1/sub/x", "step-10/.metadata"):
        store.put(key, key.encode())
    level = store.list_level()
    assert [o.key for o in level.objects] == ["top"]
    assert level.folders == ("step-1", "step-10")
    below = store.list_level("step-1")
    assert [o.key for o in below.objects] == ["step-1/.metadata"]
    assert below.folders == ("sub",)
    assert [o.key for o in store.list("step-1")] == ["step-1/.metadata", "step-1/sub/x"]


def test_child_sees_keys_relative_to_itself(store: Store) -> None:
    """A child's keys start below it, and its URL says where it is."""
    store.put("run/step-1/x", b"x")
    child = store.child("run").child("step-1")
    assert child.url == store.url_of("run/step-1")
    assert [o.key for o in child.list()] == ["x"]
    assert child.read("x") == b"x"
    child.put("y", b"y")
    assert store.read("run/step-1/y") == b"y"


@pytest.mark.parametrize(
    "key", ["a[1]/x*?.bin", "sp ace/ä", "a#b%20c+d&e=f", "x@y/__0_0.distcp", "k?versionId=1"]
)
def test_keys_are_literal(store: Store, key: str) -> None:
    """Characters that mean something to globs or URLs mean themselves."""
    store.put("a1/x1.bin", b"decoy")
    store.put(key, b"data")
    assert store.read(key) == b"data"
    assert store.info(key).num_bytes == 4
    assert key in [o.key for o in store.list()]
    assert [o.key for o in store.list(key.rpartition("/")[0]) if o.key == key]
    store.delete(key)
    assert [o.key for o in store.list()] == ["a1/x1.bin"]


@pytest.mark.parametrize("key", ["", "../x", "a/../x", "/abs", "a//b", "a/./b", "nul\0"])
def test_keys_stay_below_the_root(store: Store, key: str) -> None:
    """A key that names no place below the root is refused, whatever is asked of it."""
    for call in (store.info, store.read, store.delete, store.open_stream):
        with pytest.raises(RefusedError, match="is not a key"):
            call(key)
    with pytest.raises(RefusedError, match="is not a key"):
        store.put(key, b"")


def test_missing_object(store: Store) -> None:
    """What is not there raises ObjectMissingError with its URL; deleting it is no error."""
    for call in (store.info, store.read):
        with pytest.raises(ObjectMissingError) as caught:
            call("no/such")
        assert store.url_of("no/such") in str(caught.value)
        assert caught.value.hint
    with pytest.raises(ObjectMissingError):
        store.read("no/such", start=3, end=9)
    store.delete("no/such")


def test_a_folder_is_no_object(store: Store) -> None:
    """A name that only has objects below it is missing."""
    store.put("a/b", b"")
    with pytest.raises(ObjectMissingError):
        store.info("a")


def test_delete(store: Store) -> None:
    """A deleted object is gone from every listing."""
    store.put("a/b", b"1")
    store.put("a/c", b"2")
    store.delete("a/b")
    assert [o.key for o in store.list()] == ["a/c"]
    store.delete("a/c")
    assert list(store.list()) == []
    assert store.list_level("a") == Listing((), ())


def test_read_many_keeps_the_order(store: Store) -> None:
    """Ranges come back in the order asked for, over several objects."""
    a, b = _bytes(5000, 1), _bytes(4000, 2)
    store.put("a", a)
    store.put("b", b)
    extents = [Extent("b", 5, 9), Extent("a", 4000, 5000), Extent("a", 0, 0), Extent("b", 0, 4000)]
    assert list(store.read_many(extents)) == [b[5:9], a[4000:], b"", b]
    assert list(store.read_many([])) == []


def test_read_many_raises_for_any_failure(store: Store) -> None:
    """One range that fails fails the call."""
    store.put("a", b"abc")
    with pytest.raises(ObjectMissingError):
        store.read_many([Extent("a", 0, 3), Extent("gone", 0, 3)])


def test_read_into_fills_the_buffer(store: Store) -> None:
    """The extent's bytes land in the caller's memory."""
    data = _bytes(3 * 2**20)
    store.put("k", data)
    buffer = bytearray(2 * 2**20 + 17)
    store.read_into(Extent("k", 1000, 1000 + len(buffer)), memoryview(buffer))
    assert buffer == data[1000 : 1000 + len(buffer)]


@pytest.mark.parametrize(("start", "end"), [(0, 11), (5, 20), (10, 12), (50, 60)])
def test_short_reads_raise(store: Store, start: int, end: int) -> None:
    """A range that reaches past the end is an error that names the object, never short bytes."""
    store.put("k", b"0123456789")
    with pytest.raises(ShortReadError, match="k"):
        store.read("k", start=start, end=end)
    with pytest.raises(ShortReadError):
        store.read_many([Extent("k", start, end)])
    with pytest.raises(ShortReadError):
        store.read_into(Extent("k", start, end), memoryview(bytearray(end - start)))


@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3], [16 * 2**20, 5, 17 * 2**20, 1]])
def test_stream(store: Store, sizes: list[int]) -> None:
    """A stream of any length arrives whole, and not before it is committed."""
    pieces = [_bytes(size, seed) for seed, size in enumerate(sizes)]
    stream = store.open_stream("out/k")
    for piece in pieces:
        stream.write(piece)
    assert list(store.list()) == []
    info = stream.commit()
    assert info.num_bytes == sum(sizes)
    assert store.read("out/k") == b"".join(pieces)
    assert [o.key for o in store.list()] == ["out/k"]
    stream.abort()
    assert store.info("out/k").num_bytes == sum(sizes)


def test_stream_abort_leaves_nothing(store: Store) -> None:
    """An aborted stream was never there, and an object of that name stays as it was."""
    store.put("k", b"before")
    stream = store.open_stream("k")
    stream.write(_bytes(18 * 2**20))
    stream.abort()
    stream.abort()
    assert store.read("k") == b"before"
    assert [o.key for o in store.list()] == ["k"]


def test_assembly_in_any_order_from_threads(store: Store) -> None:
    """Parts written in any order by several threads make the object, at commit."""
    data = _bytes(3 * PART + 1234)
    bounds = [(n, n * PART, min(len(data), (n + 1) * PART)) for n in range(4)]
    assembly = store.open_assembly("a/k", num_bytes=len(data))

    def write(part: tuple[int, int, int]) -> PartReceipt:
        number, start, end = part
        piece = memoryview(data)[start:end]
        return assembly.write_part(number, start, piece, crc32=zlib.crc32(piece))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        receipts = list(pool.map(write, reversed(bounds)))
    assert list(store.list()) == []
    assert {r.checksum for r in receipts} in (
        {None},
        {zlib.crc32(data[start:end]) for _, start, end in bounds},
    )
    info = assembly.commit(receipts)
    assert info.num_bytes == len(data)
    assert store.read("a/k") == data


def test_assembly_can_be_attached(store: Store) -> None:
    """The token opens the same assembly again, for writing and for commit."""
    data = _bytes(PART + 10)
    first = store.open_assembly("k", num_bytes=len(data))
    one = first.write_part(0, 0, data[:PART])
    second = store.attach_assembly("k", first.token, num_bytes=len(data))
    two = second.write_part(1, PART, data[PART:])
    second.commit([one, two])
    assert store.read("k") == data


def test_assembly_of_nothing(store: Store) -> None:
    """An object of no bytes has no parts."""
    store.open_assembly("k", num_bytes=0).commit([])
    assert store.read("k") == b""


def test_assembly_with_a_part_missing(store: Store) -> None:
    """A commit without all its parts names the part and publishes nothing."""
    assembly = store.open_assembly("k", num_bytes=2 * PART + 1)
    parts = [assembly.write_part(n, n * PART, bytes(PART)) for n in (0, 1)]
    with pytest.raises(StorageError, match="bytes"):
        assembly.commit(parts)
    last = assembly.write_part(2, 2 * PART, b"x")
    with pytest.raises(StorageError, match="part 1"):
        assembly.commit([parts[0], last])
    assert list(store.list()) == []
    assembly.abort()
    assembly.abort()
    assert list(store.list()) == []


def test_a_part_can_be_written_twice(store: Store) -> None:
    """The last writing of a part counts, so that a part can be tried again."""
    assembly = store.open_assembly("k", num_bytes=PART + 1)
    assembly.write_part(0, 0, b"a" * PART)
    parts = [assembly.write_part(0, 0, b"b" * PART), assembly.write_part(1, PART, b"c")]
    assembly.commit(parts)
    assert store.read("k") == b"b" * PART + b"c"


def test_recipe_opens_the_same_store(store: Store) -> None:
    """A recipe opens the same objects again, and its text shows no option."""
    store.put("k", b"data")
    recipe = store.recipe()
    assert open_recipe(recipe).read("k") == b"data"
    assert "SECRET" not in repr(recipe)
    assert "SECRET" not in repr(store) + store.url


def test_child_recipe(store: Store) -> None:
    """A child's recipe opens the child."""
    store.put("a/k", b"data")
    assert open_recipe(store.child("a").recipe()).read("k") == b"data"


def test_part_limits_hold(store: Store) -> None:
    """Parts of the size that the limits name hold the largest object, and no larger one."""
    limits = store.part_limits
    assert limits.part_bytes(1) == limits.preferred_bytes
    for num_bytes in (600 * 10**9, 5 * 2**40, limits.max_bytes * limits.max_parts):
        size = limits.part_bytes(num_bytes)
        assert limits.min_bytes <= size <= limits.max_bytes
        assert -(-num_bytes // size) <= limits.max_parts
    with pytest.raises(RefusedError, match="too large"):
        limits.part_bytes(limits.max_bytes * limits.max_parts + 1)
