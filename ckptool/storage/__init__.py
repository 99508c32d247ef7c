"""Stores: keys and bytes on any storage, retried, verified and told in one vocabulary.

Opening a local path loads neither fsspec nor s3fs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ckptool.storage.base import (
    Assembly,
    Buffer,
    Capabilities,
    CopyingAssembly,
    Listing,
    ObjectInfo,
    PartLimits,
    PartReceipt,
    PendingUpload,
    Store,
    StoreRecipe,
    StreamWriter,
)

__all__ = [
    "Assembly",
    "Buffer",
    "Capabilities",
    "CopyingAssembly",
    "Listing",
    "ObjectInfo",
    "PartLimits",
    "PartReceipt",
    "PendingUpload",
    "Store",
    "StoreRecipe",
    "StreamWriter",
    "open_recipe",
    "open_store",
]


def open_store(url: str | os.PathLike[str], *, options: Mapping[str, Any] | None = None) -> Store:
    """The store rooted at a path or URL; nothing is read or created yet.

    ``options`` are what fsspec's ``storage_options`` takes for the URL's protocol, and
    ``ckptool_deadline_s``: how long transient failures are retried (300 s by default).
    """
    root = os.fspath(url)
    protocol = _protocol_of(root)
    if protocol in ("file", "local"):
        from ckptool.storage.local import LocalStore

        return LocalStore(root, options=options)
    if protocol in ("s3", "s3a"):
        from ckptool.storage.s3 import S3Store

        return S3Store.open(root, options=options)
    from ckptool.storage.fsspec_store import FsspecStore

    return FsspecStore.open(root, options=options)


def open_recipe(recipe: StoreRecipe) -> Store:
    """The store that another process's ``Store.recipe`` describes."""
    return open_store(recipe.url, options=recipe.options)


def _protocol_of(url: str) -> str:
    if "::" in url and "://" in url:
        return url.split("::", 1)[0]
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url)
    return match.group(1).lower() if match else "file"
