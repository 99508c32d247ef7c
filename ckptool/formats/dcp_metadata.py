"""A DCP ``.metadata``: read into an Index, written from one, merged from those of single ranks.

The format is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``; none of it is ever
unpickled by Python, and writing it needs no torch.
"""

from __future__ import annotations

from ckptool.formats.dcp_merge import merge_rank_local
from ckptool.formats.dcp_reader import read_metadata
from ckptool.formats.dcp_writer import write_metadata

__all__ = ["merge_rank_local", "read_metadata", "write_metadata"]
