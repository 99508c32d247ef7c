"""Fills parts: own pieces from where they are, other ranks' as they arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckptool.engine.cast import CastCount
from ckptool.planning.plan import Literal
from ckptool.torch.live_casts import cast_into
from ckptool.torch.live_cuts import LivePart
from ckptool.torch.live_pieces import Piece
from ckptool.torch.live_source import LiveSource

__all__ = ["Filler"]


class Filler:
    """Makes bytes out of one rank's shares; ``casts`` counts what its casts lost."""

    def __init__(self, source: LiveSource, *, rank: int) -> None:
        self._source, self._rank = source, rank
        self.device = source.device
        self.casts: dict[str, CastCount] = {}

    def outgoing(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Own pieces of another rank's part, one after the other, cast already."""
        data = torch.empty(sum(p.num_bytes for p in pieces), dtype=torch.uint8, device=self.device)
        at = 0
        for piece in pieces:
            self._make(piece, data[at : at + piece.num_bytes])
            at += piece.num_bytes
        return data

    def place(self, out: torch.Tensor, pieces: Sequence[Piece], data: torch.Tensor) -> None:
        """Put pieces that arrived, one after the other in ``data``, where they belong."""
        at = 0
        for piece in pieces:
            _put(out, piece, data[at : at + piece.num_bytes])
            at += piece.num_bytes

    def own(self, out: torch.Tensor, part: LivePart) -> None:
        """Fill in what this rank has of its own part, literals included."""
        at = 0
        for segment in part.step.segments:
            if isinstance(segment, Literal):
                data = torch.frombuffer(bytearray(segment.data), dtype=torch.uint8)
                out[at : at + segment.num_bytes].copy_(data)
            at += segment.num_bytes
        for piece in part.from_rank(self._rank):
            if piece.box is None:
                self._make(piece, out[piece.at : piece.at + piece.num_bytes])
            else:
                data = torch.empty(piece.num_bytes, dtype=torch.uint8, device=self.device)
                self._make(piece, data)
                _put(out, piece, data)

    def ready_made(self, part: LivePart) -> torch.Tensor | None:
        """The bytes of a part that stand in host memory just so."""
        if self.device.type != "cpu" or len(part.pieces) != 1:
            return None
        (piece,) = part.pieces
        if piece.rank != self._rank or piece.source is not None or piece.box is not None:
            return None
        if piece.num_bytes != part.step.num_bytes:
            return None
        return self._source.share(piece.share)[piece.start : piece.end]

    def _make(self, piece: Piece, out: torch.Tensor) -> None:
        data = self._source.share(piece.share)[piece.start : piece.end]
        if piece.source is None or piece.target is None:
            out.copy_(data, non_blocking=out.is_cuda)
            return
        lost = CastCount(piece.entry, *cast_into(out, data, piece.source, piece.target))
        before = self.casts.get(piece.entry)
        self.casts[piece.entry] = lost if before is None else before + lost


def _put(out: torch.Tensor, piece: Piece, data: torch.Tensor) -> None:
    if piece.box is None:
        out[piece.at : piece.at + piece.num_bytes].copy_(data)
        return
    num_bytes = math.prod(piece.region) * piece.itemsize
    region = out[piece.at : piece.at + num_bytes].view(*piece.region, piece.itemsize)
    where = tuple(
        slice(start, end) for start, end in zip(piece.box.offsets, piece.box.ends, strict=True)
    )
    region[where].copy_(data.view(*piece.box.sizes, piece.itemsize))
