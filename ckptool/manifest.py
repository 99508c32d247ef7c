"""``ckpt.json``: the small sidecar that says what a checkpoint's objects should be.

A JSON document with sorted keys: schema, step, created, attempt, layout, versions, verified, and
for ``.metadata`` and every other object its size and, where it is known, its CRC-32. Where it
disagrees with ``.metadata``, ``.metadata`` wins and the disagreement is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.errors import DamagedError, UnsupportedError

__all__ = ["SCHEMA", "Manifest", "ObjectFacts", "read_manifest", "write_manifest"]

SCHEMA = "ckptool.manifest/1"

_RFC3339_UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """What one object should be; ``crc32`` is None where nobody computed it."""

    num_bytes: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint, as whoever committed it describes it.

    ``created`` is RFC 3339 in UTC (``2026-01-31T12:00:00Z``). ``attempt`` is the token that the
    save's own shard names carry. ``layout`` says how the state was spread (world size, mesh
    ...), ``versions`` who wrote it. ``verified`` says how well what arrived was compared with
    what was sent: ``checksum`` or ``size``.
    """

    step: int | None
    created: str
    metadata: ObjectFacts
    objects: Mapping[str, ObjectFacts]
    attempt: str | None = None
    verified: str = "size"
    layout: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: str = SCHEMA


def write_manifest(manifest: Manifest) -> bytes:
    """The JSON of a manifest: the same manifest gives the same bytes."""
    document = {
        "schema": manifest.schema,
        "step": manifest.step,
        "created": manifest.created,
        "attempt": manifest.attempt,
        "layout": dict(manifest.layout),
        "versions": dict(manifest.versions),
        "verified": manifest.verified,
        "metadata": _facts_json(manifest.metadata),
        "objects": {name: _facts_json(facts) for name, facts in manifest.objects.items()},
    }
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def read_manifest(data: bytes) -> Manifest:
    """The manifest that the bytes of a ``ckpt.json`` hold; unknown keys are skipped.

    Raises DamagedError where it is no such document, UnsupportedError for another schema.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"ckpt.json is no JSON: {error}"[:200]) from error
    if not isinstance(document, dict):
        raise DamagedError("ckpt.json is no JSON object")
    schema = _need(document, "schema", str)
    if schema != SCHEMA:
        if not schema.startswith("ckptool.manifest/"):
            raise DamagedError(f"ckpt.json has the schema {schema[:80]!r}, not {SCHEMA}")
        raise UnsupportedError(
            f"ckpt.json has the schema {schema[:80]}; this version reads {SCHEMA}",
            hint="pip install -U ckptool",
        )
    return _manifest(document)


def _manifest(document: dict[str, Any]) -> Manifest:
    step = _optional(document, "step", int)
    if step is not None and step < 0:
        raise DamagedError("ckpt.json has a step below 0")
    created = _need(document, "created", str)
    if not _RFC3339_UTC.fullmatch(created):
        raise DamagedError(
            f"ckpt.json was created at {created[:40]!r}, which is no RFC 3339 UTC time"
        )
    versions = _optional(document, "versions", dict) or {}
    if not all(isinstance(version, str) for version in versions.values()):
        raise DamagedError("ckpt.json has a version that is no text")
    return Manifest(
        step=step,
        created=created,
        metadata=_facts(_need(document, "metadata", dict), ".metadata"),
        objects=_objects(_need(document, "objects", dict)),
        attempt=_optional(document, "attempt", str),
        verified=_need(document, "verified", str),
        layout=_optional(document, "layout", dict) or {},
        versions=versions,
    )


def _objects(said: dict[str, Any]) -> dict[str, ObjectFacts]:
    """Names are for comparing with a listing; one that no listing can have is refused."""
    for name in said:
        if name.startswith("/") or "://" in name or ".." in name.split("/"):
            raise DamagedError(f"ckpt.json names an object outside the checkpoint: {name[:200]!r}")
    return {name: _facts(facts, name) for name, facts in said.items()}


def _facts_json(facts: ObjectFacts) -> dict[str, Any]:
    crc32 = None if facts.crc32 is None else f"{facts.crc32:08x}"
    return {"num_bytes": facts.num_bytes, "crc32": crc32}


def _facts(said: Any, name: str) -> ObjectFacts:
    if not isinstance(said, dict):
        raise DamagedError(f"ckpt.json says nothing readable of {name[:200]!r}")
    num_bytes = said.get("num_bytes")
    if type(num_bytes) is not int or not 0 <= num_bytes < 2**63:
        raise DamagedError(f"ckpt.json gives {name[:200]!r} no size")
    crc32 = said.get("crc32")
    if crc32 is not None and not (isinstance(crc32, str) and re.fullmatch("[0-9a-f]{8}", crc32)):
        raise DamagedError(f"ckpt.json gives {name[:200]!r} a CRC-32 that is not 8 hex digits")
    return ObjectFacts(num_bytes, None if crc32 is None else int(crc32, 16))


def _need(document: dict[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if type(value) is not kind:
        raise DamagedError(f"ckpt.json has no {key}, or one that is no {kind.__name__}")
    return value


def _optional(document: dict[str, Any], key: str, kind: type) -> Any:
    return None if document.get(key) is None else _need(document, key, kind)
