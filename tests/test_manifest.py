"""`ckpt.json`: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptool.errors import DamagedError, UnsupportedError
from ckptool.manifest import Manifest, ObjectFacts, read_manifest, write_manifest

MANIFEST = Manifest(
    step=12000,
    created="2026-01-31T12:00:00Z",
    metadata=ObjectFacts(1234, 0x00C0FFEE),
    objects={"__0_0.7f3a.distcp": ObjectFacts(2**40, 0), "ckpt.index": ObjectFacts(7)},
    attempt="7f3a",
    verified="checksum",
    layout={"world_size": 8, "mesh": {"dp": 4, "tp": 2}},
    versions={"ckptool": "0.1.0", "torch": "2.13.0"},
)


def test_written_and_read_back() -> None:
    """A manifest comes back equal; the same one gives the same bytes, whatever its order."""
    data = write_manifest(MANIFEST)
    assert read_manifest(data) == MANIFEST
    other_order = dict(reversed(list(MANIFEST.objects.items())))
    assert write_manifest(Manifest(**{**_fields(), "objects": other_order})) == data
    assert json.loads(data)["metadata"] == {"num_bytes": 1234, "crc32": "00c0ffee"}


def _fields() -> dict[str, Any]:
    return {name: getattr(MANIFEST, name) for name in Manifest.__slots__}


def test_unknown_keys_are_skipped() -> None:
    """A manifest of a later writer with more keys is read."""
    document = json.loads(write_manifest(MANIFEST)) | {"mood": "fine"}
    assert read_manifest(json.dumps(document).encode()) == MANIFEST


def test_optional_keys_may_be_absent() -> None:
    """Only what a reader needs is required."""
    document = json.loads(write_manifest(MANIFEST))
    for key in ("step", "attempt", "layout", "versions"):
        del document[key]
    manifest = read_manifest(json.dumps(document).encode())
    assert (manifest.step, manifest.attempt, manifest.layout) == (None, None, {})


def test_cut_short_anywhere() -> None:
    """A manifest cut at any byte is damaged, and nothing else."""
    data = write_manifest(MANIFEST).rstrip()
    for end in range(len(data)):
        with pytest.raises(DamagedError):
            read_manifest(data[:end])


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "12"},
        {"step": -1},
        {"step": True},
        {"created": None},
        {"created": "yesterday"},
        {"created": "2026-01-31T12:00:00+01:00"},
        {"metadata": {"num_bytes": -1, "crc32": None}},
        {"metadata": {"num_bytes": 1.0, "crc32": None}},
        {"metadata": {"num_bytes": 1, "crc32": "xyz"}},
        {"metadata": {"num_bytes": 1, "crc32": 5}},
        {"metadata": []},
        {"objects": []},
        {"objects": {"../x": {"num_bytes": 1, "crc32": None}}},
        {"objects": {"s3://x/y": {"num_bytes": 1, "crc32": None}}},
        {"objects": {"x": None}},
        {"layout": []},
        {"versions": {"torch": 2}},
        {"verified": None},
        {"schema": "something.else/1"},
        {"schema": 1},
    ],
    ids=str,
)
def test_wrong_content_is_damaged(changes: dict[str, Any]) -> None:
    """Each field of a wrong kind or range is refused with its name."""
    document = json.loads(write_manifest(MANIFEST)) | changes
    with pytest.raises(DamagedError, match=r"ckpt\.json"):
        read_manifest(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_other_bytes_are_damaged(data: bytes) -> None:
    """Bytes that are no JSON object are refused, however deep."""
    with pytest.raises(DamagedError):
        read_manifest(data)


def test_later_schema_asks_for_a_newer_version() -> None:
    """A manifest of a later schema is unsupported, not damaged."""
    document = json.loads(write_manifest(MANIFEST)) | {"schema": "ckptool.manifest/2"}
    with pytest.raises(UnsupportedError, match="manifest/2"):
        read_manifest(json.dumps(document).encode())
