"""The bytes of ``.metadata`` (and of ``ckpt.index``) -> an opened checkpoint, on every rank.

``.metadata`` decides what the checkpoint holds. Our index says the same in less time, and adds
where payloads lie and their CRC-32s; it is used where it was made for this very ``.metadata``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptool.dtypes import DType
from ckptool.errors import CkptoolError, NoCheckpointError, ObjectMissingError
from ckptool.formats.ckpt_index import BLOCK_BYTES, IndexFile, Payloads, read_index
from ckptool.formats.dcp_metadata import read_metadata
from ckptool.layout import INDEX_NAME, METADATA_NAME
from ckptool.model import Index, TensorEntry
from ckptool.storage.base import Store
from ckptool.torch.group import Group
from ckptool.torch.places import Place

__all__ = ["Opened", "open_alone", "open_together"]

log = logging.getLogger("ckptool")


@dataclass
class Opened:
    """An index, and what is known of payloads without a probe."""

    url: str
    index: Index
    payloads: Mapping[str, Payloads] = field(default_factory=dict)

    def place(self, key: str, chunk: int) -> Place | None:
        """Where the payload of a chunk lies; None where the item must say."""
        entry = self.index.entries[key]
        assert isinstance(entry, TensorEntry)
        item, columns = entry.chunks.item(chunk), self.payloads.get(key)
        if columns is None or item is None or item.transforms:
            return None
        facts = columns[chunk]
        if facts.offset is None or facts.num_bytes is None:
            return None
        return Place(
            item.offset + facts.offset,
            facts.num_bytes,
            strides=(),
            crc32=facts.crc32,
            block_num_bytes=BLOCK_BYTES if facts.block_crc32s else 0,
            block_crc32s=facts.block_crc32s,
        )

    def dtype(self, key: str) -> DType:
        entry = self.index.entries[key]
        assert isinstance(entry, TensorEntry)
        return entry.dtype


def open_alone(store: Store) -> Opened:
    """Read in this process; raises NoCheckpointError where nothing is committed."""
    metadata, index = _read(store)
    return _opened(store.url, metadata, index)


def open_together(store: Store, group: Group) -> Opened:
    """Collective: rank 0 reads, and every rank gets the bytes and decodes them."""
    found: list[bytes | None] = []

    def read() -> bool:
        found.extend(_read(store))
        return found[1] is not None

    has_index = group.from_rank_0(read)
    metadata = group.broadcast(found[0] if found else None)
    index = group.broadcast(found[1] if found else None) if has_index else None
    return _opened(store.url, metadata, index)


def _opened(url: str, metadata: bytes, index: bytes | None) -> Opened:
    file = _index_of(metadata, index) if index is not None else None
    if file is not None:
        return Opened(url, file.index, file.payloads)
    return Opened(url, read_metadata(metadata))


def _index_of(metadata: bytes, data: bytes) -> IndexFile | None:
    """The index, where it goes with this ``.metadata``."""
    try:
        file = read_index(data)
    except CkptoolError as error:
        log.warning("%s is left aside: %s", INDEX_NAME, error)
        return None
    if not file.agrees_with(metadata):
        log.warning("%s belongs to another %s and is left aside", INDEX_NAME, METADATA_NAME)
        return None
    return file


def _read(store: Store) -> tuple[bytes, bytes | None]:
    """The bytes of ``.metadata``, and of ``ckpt.index`` where there is one."""
    try:
        metadata = store.read(METADATA_NAME)
    except ObjectMissingError as error:
        raise NoCheckpointError(
            f"no committed checkpoint in {store.url}",
            hint="ckptool ls shows the steps of a run and their states",
            url=store.url,
        ) from error
    if not metadata:
        raise NoCheckpointError(
            f"{store.url_of(METADATA_NAME)} is empty: the save did not finish", url=store.url
        )
    try:
        return metadata, store.read(INDEX_NAME)
    except ObjectMissingError:
        return metadata, None
