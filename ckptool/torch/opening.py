"""The bytes of ``.metadata`` (and of ``ckpt.index``) -> an opened checkpoint, on every rank.

Rank 0 reads them once and passes them on. ``.metadata`` decides what the checkpoint holds; our
index adds where payloads lie and their CRC-32s, as long as it was made for this very
``.metadata``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptool.dtypes import DType
from ckptool.errors import NoCheckpointError, ObjectMissingError
from ckptool.formats.dcp_metadata import read_metadata
from ckptool.layout import METADATA_NAME
from ckptool.model import Index, TensorEntry
from ckptool.storage.base import Store
from ckptool.torch.group import Group
from ckptool.torch.places import Place

__all__ = ["Opened", "open_together"]


@dataclass
class Opened:
    """An index, and the places of payloads that are known without a probe."""

    url: str
    index: Index
    places: dict[tuple[str, int], Place] = field(default_factory=dict)

    def place(self, key: str, chunk: int) -> Place | None:
        return self.places.get((key, chunk))

    def dtype(self, key: str) -> DType:
        entry = self.index.entries[key]
        assert isinstance(entry, TensorEntry)
        return entry.dtype


def open_together(store: Store, group: Group) -> Opened:
    """Collective; raises NoCheckpointError where nothing is committed."""
    data = bytearray()

    def read() -> bool:
        data.extend(read_committed(store))
        return True

    group.from_rank_0(read)
    metadata = group.broadcast(bytes(data) if group.rank == 0 else None)
    return Opened(store.url, read_metadata(metadata))


def read_committed(store: Store) -> bytes:
    """The bytes of ``.metadata``; raises NoCheckpointError where there are none."""
    try:
        data = store.read(METADATA_NAME)
    except ObjectMissingError as error:
        raise NoCheckpointError(
            f"no committed checkpoint in {store.url}",
            hint="ckptool ls shows the steps of a run and their states",
            url=store.url,
        ) from error
    if not data:
        raise NoCheckpointError(
            f"{store.url_of(METADATA_NAME)} is empty: the save did not finish", url=store.url
        )
    return data
