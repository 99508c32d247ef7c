"""What saves and loads tell their caller."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadReport", "SaveReport"]


@dataclass(frozen=True)
class SaveReport:
    """What a save did; ``num_bytes`` are those of all ranks' shard files.

    ``blocked_s`` is how long the call held the caller, ``seconds`` how long it took until the
    commit. While a save is in flight it is not ``committed``, and both counts are of what is
    known so far. ``skipped`` says that another save was in flight; ``error`` is why a save
    failed, where failures are not raised.
    """

    step: int
    url: str
    committed: bool
    num_bytes: int
    blocked_s: float
    seconds: float
    mode: str = "sync"
    deleted: tuple[str, ...] = ()
    skipped: bool = False
    error: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """What a load did; bytes are those of all ranks together.

    ``missing`` are the keys that this rank asked for and the checkpoint does not have.
    ``unverified_bytes`` were handed on without a checksum that covered them.
    """

    step: int
    url: str
    missing: tuple[str, ...]
    needed_bytes: int
    fetched_bytes: int
    unverified_bytes: int
    seconds: float

    @property
    def amplification(self) -> float:
        """Bytes fetched for each byte that was needed."""
        return self.fetched_bytes / max(self.needed_bytes, 1)
