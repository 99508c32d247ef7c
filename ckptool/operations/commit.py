"""The commit rule: payload objects first, index and manifest, ``.metadata`` last, in one PUT."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ckptool import __version__
from ckptool.errors import NotEmptyError, StorageError
from ckptool.formats.crc import crc32
from ckptool.layout import INDEX_NAME, MANIFEST_NAME, METADATA_NAME
from ckptool.manifest import Manifest, ObjectFacts, write_manifest
from ckptool.storage.base import Store

__all__ = ["COMMIT_KEYS", "commit_checkpoint", "refuse_unless_empty"]

COMMIT_KEYS = (METADATA_NAME, MANIFEST_NAME, INDEX_NAME)  # last written, first taken away


def refuse_unless_empty(dest: Store, *, what: str = "destination") -> None:
    """Raise NotEmptyError when anything stands below the root of ``dest``."""
    level = dest.list_level()
    names = [info.key for info in level.objects] + [f"{name}/" for name in level.folders]
    if names:
        shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
        raise NotEmptyError(
            f"the {what} {dest.url} is not empty: it holds {shown}",
            hint="name a folder that does not exist yet, or remove this one first",
            url=dest.url,
        )


def commit_checkpoint(
    dest: Store,
    *,
    metadata: bytes,
    index_file: bytes,
    objects: Mapping[str, ObjectFacts],
    step: int | None,
    layout: Mapping[str, Any],
    verified: str,
    again: bool = False,
) -> Manifest:
    """Write ``ckpt.index``, ``ckpt.json`` and last ``.metadata``; shard files are visible before.

    ``again``: a resumed run may find the ``.metadata`` that it wrote before it was stopped.
    """
    manifest = Manifest(
        step=step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        attempt=None,
        layout=dict(layout),
        versions={"ckptool": __version__},
        verified=verified,
        objects={**objects, INDEX_NAME: ObjectFacts(len(index_file), crc32(index_file))},
        metadata=ObjectFacts(len(metadata), crc32(metadata)),
    )
    dest.put(INDEX_NAME, index_file)
    dest.put(MANIFEST_NAME, write_manifest(manifest))
    info = dest.put(METADATA_NAME, metadata, if_absent=not again)
    if info.num_bytes != len(metadata):
        raise StorageError(
            f"{dest.url_of(METADATA_NAME)} has {info.num_bytes} bytes after {len(metadata)} "
            "were sent",
            hint="the checkpoint is not to be trusted: remove it and run again",
        )
    return manifest
