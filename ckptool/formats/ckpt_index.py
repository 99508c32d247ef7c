"""``ckpt.index``: what ``.metadata`` says in columns, with each payload's place and CRCs.

Optional, small, and read in about a second where ``.metadata`` has millions of chunks. It names
the size and the CRC-32 of the ``.metadata`` it was written beside; where they differ,
``.metadata`` wins. Byte layout, all numbers little-endian:

- bytes 0 to 7: ``CKPTIDX1``
- 4 bytes: H, the number of bytes of the header
- H bytes: the header, a zstd frame of UTF-8 JSON
- the columns, one zstd frame each (packed_columns.py), in the order of the header's ``columns``
- 4 bytes: the CRC-32 of everything before

The header has ``schema`` (``ckptool.index/1``), ``form``, ``version`` and ``notes`` of the Index,
``metadata`` (``num_bytes``, ``crc32``), ``block_bytes``, ``files``, ``transforms``, ``entries``
in the order of ``.metadata``, and ``columns``. A tensor has ``key``, ``dtype``, ``shape``,
``path`` and its number of ``chunks``; a value has ``key``, ``path`` and ``item`` (file number,
offset, length, transform number), null where it is not stored.

The columns hold all chunks of all tensors, tensor after tensor:

- ``offsets`` and ``sizes``: dim after dim, each for all chunks of the tensor
- ``file`` (-1: not stored), ``starts``, ``lengths``, ``transform``
- ``payload_offsets`` (from the item's start), ``payload_num_bytes``, ``payload_crc32s``: -1
  where it is not known
- ``block_counts``: how many block CRCs a chunk has: none, or one per ``block_bytes`` of payload
- ``block_crc32s``: those of all chunks, one after another

What is not checked: whether the boxes tile their tensors, and whether the items lie in their
files; that is for whoever plans with them.
"""

from __future__ import annotations

from ckptool.formats.ckpt_index_reader import IndexFile, read_index
from ckptool.formats.ckpt_index_writer import write_index
from ckptool.formats.payloads import BLOCK_BYTES, Payload, Payloads

__all__ = ["BLOCK_BYTES", "IndexFile", "Payload", "Payloads", "read_index", "write_index"]
