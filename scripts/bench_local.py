"""The local comparisons: export and reshard on one disk, and as the size grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_common import (
    Case,
    Summary,
    interleave,
    interleave_with_start,
    python,
    ratio,
    remove,
    summarise,
)
from bench_settings import Checkpoint, Settings, ckptool, table_row, torch_tool, warm

__all__ = ["LocalFigures", "measure_growth", "measure_local"]

ALL = "ckptool export --all (.pt)"
PLAIN = "ckptool export (.safetensors)"
FROM_SHARDS = "ckptool export --all of sharded safetensors"
TORCH_SAVE = "dcp_to_torch_save"
CONSOLIDATE = "Hugging Face consolidation"
COPY = "cp --reflink=never"
RESHARD = "ckptool reshard"
LOAD_SAVE = "dcp.load + dcp.save"

_START = "start-up"
_IMPORTS = "import ckptool.cli.app, ckptool.cli.export, ckptool.storage.local"
_GROWTH = (1, 2, 4, 8)


@dataclass(frozen=True)
class LocalFigures:
    """Summaries by comparison and contender."""

    export: Mapping[str, Summary]
    reshards: Mapping[str, Mapping[str, Summary]]

    @property
    def vs_dcp(self) -> float | None:
        return ratio(self.export.get(ALL), self.export.get(TORCH_SAVE))

    @property
    def vs_cp(self) -> float | None:
        return ratio(self.export.get(ALL), self.export.get(COPY))

    @property
    def export_peak_bytes(self) -> int:
        return max(s.peak_rss_bytes for name, s in self.export.items() if "ckptool" in name)

    def tables(self) -> dict[str, Sequence[Mapping[str, str]]]:
        tables = {"Export, local": [table_row(s) for s in self.export.values()]}
        for title, rows in self.reshards.items():
            tables[f"{title}, local"] = [table_row(s) for s in rows.values()]
        return tables

    def to_json(self) -> dict[str, Any]:
        groups = {"export": self.export, **self.reshards}
        return {title: [s.to_json() for s in rows.values()] for title, rows in groups.items()}


def measure_local(settings: Settings) -> LocalFigures:
    """Export, then unless it is to be quick 8 to 16 and 16 to 4."""
    reshards = {}
    export = _export(settings)
    for source, to in () if settings.is_quick else ((8, 16), (16, 4)):
        title = f"reshard {source} to {to}"
        reshards[title] = _reshard(settings, num_ranks=source, to=to)
    return LocalFigures(export, reshards)


def measure_growth(settings: Settings) -> list[dict[str, Any]]:
    """Ours and dcp_to_torch_save at 1, 2, 4 and 8 times an eighth of the size."""
    rows = []
    for times in _GROWTH:
        size_bytes = settings.size_bytes * times // _GROWTH[-1]
        made = Checkpoint.of_size(size_bytes, num_ranks=8, chunk_bytes=_chunk_bytes(settings, 4))
        place = _Place(settings, made)
        try:
            rounds = min(3, settings.num_rounds)
            found = place.compare([place.export_all(), place.torch_save()], num_rounds=rounds)
        finally:
            place.remove()
        rows.append(
            {
                "times": times,
                "output_bytes": found[ALL].output_bytes,
                "ckptool": found[ALL].to_json(),
                TORCH_SAVE: found[TORCH_SAVE].to_json(),
            }
        )
    return rows


def _export(settings: Settings) -> dict[str, Summary]:
    chunk_bytes = _chunk_bytes(settings, 16)
    made = Checkpoint.of_size(settings.size_bytes, num_ranks=8, chunk_bytes=chunk_bytes)
    place = _Place(settings, made)
    try:
        cases = [place.export_all(), place.export_model(), place.copy(), place.torch_save()]
        if settings.is_quick:  # a first run says little of what takes a tenth of a second
            return {**place.compare(cases[:3], num_rounds=3), **place.compare(cases[3:])}
        found = place.compare([*cases, *place.of_shards()])
        place.check(*cases[:2])
        return found
    finally:
        place.remove()


def _reshard(settings: Settings, *, num_ranks: int, to: int) -> dict[str, Summary]:
    chunk_bytes = (64 if to == 16 else 16) << 20
    made = Checkpoint.of_size(settings.size_bytes, num_ranks=num_ranks, chunk_bytes=chunk_bytes)
    place = _Place(settings, made)
    try:
        cases = [place.reshard(to), place.copy(), place.load_save(to)]
        found = place.compare(cases)
        place.check(cases[0])
        return found
    finally:
        place.remove()


def _chunk_bytes(settings: Settings, mib: int) -> int:
    return (mib << 20) // (4 if settings.is_quick else 1)


class _Place:
    """A checkpoint on the disk, and the contenders that read it."""

    def __init__(self, settings: Settings, made: Checkpoint) -> None:
        self._settings = settings
        self._made = made
        self._folder = settings.scratch / "local"
        self._source = settings.made(made)
        self._folder.mkdir()

    def remove(self) -> None:
        remove(self._folder)

    def compare(
        self, cases: Sequence[Case], *, num_rounds: int | None = None
    ) -> dict[str, Summary]:
        """Summaries by contender, in their order."""
        rounds = num_rounds or self._settings.num_rounds
        start = Case(_START, lambda: python("-c", _IMPORTS))
        idle, runs = interleave_with_start(start, cases, num_rounds=rounds, say=self._settings.say)
        return {
            name: summarise(name, some, startup=idle if name.startswith("ckptool") else None)
            for name, some in runs.items()
        }

    def export_all(self) -> Case:
        def command(source: Path, dest: Path) -> list[str]:
            return ckptool("export", str(source), str(dest), "--all")

        return self._case(ALL, command, dest="all.pt")

    def export_model(self) -> Case:
        def command(source: Path, dest: Path) -> list[str]:
            return ckptool("export", str(source), str(dest))

        return self._case(PLAIN, command, dest="model.safetensors")

    def reshard(self, to: int) -> Case:
        def command(source: Path, dest: Path) -> list[str]:
            return ckptool("reshard", str(source), str(dest), "--to", str(to))

        return self._case(RESHARD, command, dest="resharded")

    def copy(self) -> Case:
        def command(source: Path, dest: Path) -> list[str]:
            return ["cp", "--reflink=never", "-r", str(source), str(dest)]

        return self._case(COPY, command, dest="copy")

    def torch_save(self) -> Case:
        return self._torch(TORCH_SAVE, "to-torch-save", dest="dcp.pt")

    def load_save(self, to: int) -> Case:
        return self._torch(LOAD_SAVE, "reshard", "--ranks", str(to), dest="loaded")

    def of_shards(self) -> list[Case]:
        """Torch's consolidation, and ours of the same sharded safetensors."""
        shards = self._settings.made(self._made, form="make-hf")

        def command(source: Path, dest: Path) -> list[str]:
            return ckptool("export", str(source), str(dest), "--all")

        return [
            self._case(FROM_SHARDS, command, dest="all.safetensors", source=shards),
            self._torch(CONSOLIDATE, "consolidate", dest="consolidated", source=shards),
        ]

    def check(self, *cases: Case) -> None:
        """What these write holds the same bits as the source, by torch's own readers."""
        for case in cases:
            try:
                interleave([_kept(case)], num_rounds=1)
                torch_tool("same", str(self._source), str(case.outputs()[0]))
            finally:
                case.clean()

    def _torch(self, name: str, action: str, *more: str, dest: str, source: Path | None = None):
        def command(source: Path, dest: Path) -> list[str]:
            return python("scripts/bench_torch.py", action, str(source), str(dest), *more)

        return self._case(name, command, dest=dest, source=source)

    def _case(
        self,
        name: str,
        command: Callable[[Path, Path], list[str]],
        *,
        dest: str,
        source: Path | None = None,
    ) -> Case:
        read, written = source or self._source, self._folder / dest
        return Case(
            name,
            lambda: command(read, written),
            outputs=lambda: [written],
            prepare=lambda: warm(read),
            clean=lambda: remove(written),
        )


def _kept(case: Case) -> Case:
    return Case(case.name, case.command, case.outputs, case.env, case.prepare)
