"""What a live export tells its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptool.torch.live_plan import LivePlan

__all__ = ["ExportReport", "planned_report"]


@dataclass(frozen=True)
class ExportReport:
    """What a live export did; counts are of all ranks together.

    ``files`` maps names to bytes. ``num_bytes_travelled`` went from one rank to another.
    ``casts`` names the tensors of which a cast overflowed or underflowed elements.
    ``blocked_s`` is how long the call held the caller, ``seconds`` how long all of it took; of
    an export in flight both are what is known so far, and it is not ``committed``. ``error`` is
    why an export failed, where failures are not raised.
    """

    url: str
    mode: str
    files: Mapping[str, int]
    num_tensors: int
    num_tensors_cast: int
    num_bytes: int
    num_bytes_travelled: int
    num_parts: int
    rank_by_rank: bool
    staged_bytes: int
    committed: bool = False
    casts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    blocked_s: float = 0.0
    seconds: float = 0.0
    error: str | None = None


def planned_report(url: str, mode: str, plan: LivePlan, *, rank_by_rank: bool) -> ExportReport:
    """What is known before the first byte is written."""
    tensors = plan.layout.tensors
    return ExportReport(
        url=url,
        mode=mode,
        files={output.key: output.num_bytes for output in plan.plan.outputs},
        num_tensors=len(tensors),
        num_tensors_cast=sum(tensor.dtype != tensor.source_dtype for tensor in tensors),
        num_bytes=plan.plan.num_bytes,
        num_bytes_travelled=plan.num_bytes_travelling,
        num_parts=len(plan.parts),
        rank_by_rank=rank_by_rank,
        staged_bytes=0,
    )
