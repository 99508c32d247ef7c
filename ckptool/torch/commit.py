"""Results of all ranks -> a committed checkpoint, or an error and nothing committed.

The commit rule: every shard file is there with the size that was sent; then ``ckpt.index`` and
``ckpt.json``; then ``.metadata``, in one PUT that is refused where one stands already. Files
that other attempts left are removed only after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ckptool import __version__
from ckptool.errors import DamagedError, NotEmptyError, StorageError
from ckptool.formats.ckpt_index import Payloads, write_index
from ckptool.formats.crc import crc32
from ckptool.formats.dcp_metadata import write_metadata
from ckptool.layout import INDEX_NAME, MANIFEST_NAME, METADATA_NAME, is_committed
from ckptool.manifest import Manifest, ObjectFacts, write_manifest
from ckptool.model import Index
from ckptool.planning.findings import ERROR
from ckptool.planning.structure import check_structure
from ckptool.storage.base import Store
from ckptool.torch.faults import fault_point
from ckptool.torch.retention import is_shard_name

__all__ = ["Commit", "StoredObject", "commit_checkpoint", "refuse_if_committed", "remove_orphans"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A shard file that a rank wrote; ``verified`` is "checksum" or "size"."""

    key: str
    num_bytes: int
    crc32: int | None
    verified: str


@dataclass(frozen=True)
class Commit:
    """What a commit says of the checkpoint; ``payloads`` go into ``ckpt.index``."""

    step: int | None
    attempt: str | None
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    payloads: Mapping[str, Payloads] = field(default_factory=dict)


def refuse_if_committed(store: Store) -> None:
    """Raise NotEmptyError where a committed checkpoint stands."""
    if is_committed({info.key: info.num_bytes for info in store.list_level().objects}):
        raise NotEmptyError(
            f"{store.url} is a committed checkpoint, and is never written over",
            hint="save under another step, or delete it first",
            url=store.url,
        )


def commit_checkpoint(
    store: Store,
    index: Index,
    objects: Sequence[StoredObject],
    facts: Commit,
    *,
    rank: int = 0,
    owner_pid: int | None = None,
) -> Manifest:
    """Make the checkpoint in ``store`` a committed one; raises before that if anything is off."""
    _check_index(index)
    _check_sizes(store, objects)
    metadata = write_metadata(index)
    fault_point("before-manifest", rank=rank, owner_pid=owner_pid)
    index_bytes = write_index(index, payloads=facts.payloads, metadata=metadata)
    _put(store, INDEX_NAME, index_bytes)
    manifest = _manifest(objects, metadata, index_bytes, facts)
    _put(store, MANIFEST_NAME, write_manifest(manifest))
    fault_point("before-metadata", rank=rank, owner_pid=owner_pid)
    _put(store, METADATA_NAME, metadata, if_absent=True)
    fault_point("after-metadata", rank=rank, owner_pid=owner_pid)
    return manifest


def remove_orphans(store: Store, live: set[str]) -> None:
    """Delete the shard files of other attempts; only after the commit."""
    for info in store.list():
        if info.key not in live and is_shard_name(info.key):
            store.delete(info.key)


def _manifest(
    objects: Sequence[StoredObject], metadata: bytes, index_bytes: bytes, facts: Commit
) -> Manifest:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    stored = {row.key: ObjectFacts(row.num_bytes, row.crc32) for row in objects}
    stored[INDEX_NAME] = ObjectFacts(len(index_bytes), crc32(index_bytes))
    return Manifest(
        step=facts.step,
        created=now,
        attempt=facts.attempt,
        layout=dict(facts.layout),
        versions={"ckptool": __version__, **facts.versions},
        verified="checksum" if all(row.verified == "checksum" for row in objects) else "size",
        objects=stored,
        metadata=ObjectFacts(len(metadata), crc32(metadata)),
    )


def _check_index(index: Index) -> None:
    for finding in check_structure(index):
        if finding.severity == ERROR:
            raise DamagedError(
                f"the save is incomplete: {finding.message}",
                hint="nothing was committed; every rank must save all that it holds",
            )


def _check_sizes(store: Store, objects: Sequence[StoredObject]) -> None:
    found = {info.key: info.num_bytes for info in store.list()}
    for row in objects:
        if found.get(row.key) != row.num_bytes:
            raise StorageError(
                f"{store.url_of(row.key)} has {found.get(row.key, 'no')} bytes after "
                f"{row.num_bytes} were sent",
                hint="nothing was committed; save again",
            )
    if is_committed(found):
        refuse_if_committed(store)


def _put(store: Store, key: str, data: bytes, *, if_absent: bool = False) -> None:
    info = store.put(key, data, if_absent=if_absent)
    if info.num_bytes != len(data):
        raise StorageError(
            f"{store.url_of(key)} has {info.num_bytes} bytes after {len(data)} were sent",
            hint="the checkpoint is not to be trusted: delete it and save again",
        )
