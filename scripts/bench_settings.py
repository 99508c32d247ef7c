"""What one benchmark run is about: its checkpoints, its bounds, and how ckptool is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from bench_common import Summary, fsync_tree, measure, python, text_size

__all__ = ["MAX_MEMORY", "Checkpoint", "Settings", "ckptool", "table_row", "torch_tool", "warm"]

MAX_MEMORY = "128MiB"


@dataclass(frozen=True)
class Settings:
    """``size_bytes`` is what a checkpoint holds at least."""

    scratch: Path
    size_bytes: int
    num_rounds: int
    is_quick: bool
    say: Callable[[str], None]

    def made(self, wanted: Checkpoint, *, form: str = "make") -> Path:
        """The folder of a checkpoint, written when it is first asked for.

        ``make-hf`` gives the same tensors as sharded safetensors.
        """
        name = "-".join(str(value) for value in astuple(wanted))
        folder = self.scratch / "made" / f"{form}-{name}"
        if folder.exists():
            return folder
        self.say(f"making a checkpoint of {wanted.num_ranks} ranks")
        vocab = ["--vocab", str(wanted.vocab)] if wanted.vocab else []
        torch_tool(
            form,
            str(folder),
            *("--ranks", str(wanted.num_ranks)),
            *("--chunk-bytes", str(wanted.chunk_bytes)),
            *("--params", str(wanted.num_params)),
            *("--moments", str(wanted.num_moments)),
            *vocab,
        )
        fsync_tree(folder)  # or the first contender's disk would be busy with it
        return folder


@dataclass(frozen=True)
class Checkpoint:
    """One that stock torch writes: parameters with ``num_moments`` moments each, cut on dim 0."""

    num_ranks: int
    chunk_bytes: int
    num_params: int = 1
    num_moments: int = 2
    vocab: int | None = None

    @classmethod
    def of_size(
        cls, size_bytes: int, *, num_ranks: int, chunk_bytes: int, num_moments: int = 2
    ) -> Checkpoint:
        """As many parameters as reach the size."""
        each = num_ranks * chunk_bytes * (1 + num_moments)
        return cls(num_ranks, chunk_bytes, math.ceil(size_bytes / each), num_moments)


def ckptool(*arguments: str) -> list[str]:
    """The product's command line, under the memory bound."""
    return python("-m", "ckptool", *arguments, "--max-memory", MAX_MEMORY)


def torch_tool(*arguments: str) -> None:
    """One command of bench_torch.py, not measured."""
    measure(python("scripts/bench_torch.py", *arguments))


def warm(folder: Path) -> None:
    """Its files are in the page cache when this returns."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def table_row(summary: Summary) -> Mapping[str, str]:
    """A summary for people."""
    rate = summary.output_bytes / 2**20 / summary.work_seconds
    requests: Sequence[str] = [f"{n} {verb}" for verb, n in (summary.requests or {}).items()]
    return {
        "what": summary.name,
        "seconds": f"{summary.work_seconds:.2f}",
        "MiB/s": f"{rate:.0f}",
        "start-up": f"{summary.startup_seconds:.2f}",
        "CPU s": f"{summary.cpu_seconds:.2f}",
        "fetched": text_size(summary.read_bytes),
        "sent": text_size(summary.written_bytes),
        "peak RSS": text_size(summary.peak_rss_bytes),
        "requests": ", ".join(requests) or "-",
    }
