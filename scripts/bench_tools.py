"""Measures ckptool's export and reshard beside torch's own tools and the raw limits.

Both sides of a comparison run in turn on the same checkpoint, with its files in the page cache,
and are timed until what they wrote is on the disk. Start-up (the interpreter and its imports)
is measured for both and taken off both, of ckptool the quickest start seen. ``--json`` writes
one document; each ``*_vs_*`` in its ratios is our speed / theirs, above 1 when we are faster, and
what was not measured is null.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_common import machine, parse_size, print_table, text_size, write_json
from bench_index import NUM_RANKS, measure_index
from bench_local import LocalFigures, measure_growth, measure_local
from bench_plot import Panel, draw
from bench_remote import RemoteFigures, measure_remote
from bench_servers import installed
from bench_settings import Settings

SECTIONS = ("local", "s3", "growth", "index")
DEFINITIONS = {
    "export_local_vs_dcp": "export --all to a .pt, local: speed / that of dcp_to_torch_save",
    "export_local_vs_cp": "the same: speed / that of cp --reflink=never of the checkpoint",
    "export_s3_vs_client": "export --all, S3 to S3: speed / that of the bare client's copy; the "
    "smallest of the servers measured",
    "export_read_amplification": "the same: bytes that came over the wire / bytes of the output; "
    "the largest of the servers measured",
    "reshard_s3_client_share": "reshard 8 to 16, S3 to S3 on SeaweedFS: the larger of bytes "
    "fetched and sent over the wire / bytes of the output",
    "peak_rss_mib": "the largest of all local exports, summed over the process tree",
}
_QUICK_BYTES = 192 * 2**20
_ROOM = 16


def main() -> int:
    arguments = _parse()
    settings_args = {"is_quick": arguments.quick, "say": _say if not arguments.silent else _mute}
    size_bytes = arguments.size or (_QUICK_BYTES if arguments.quick else 2 * 2**30)
    num_rounds = arguments.rounds or (1 if arguments.quick else 5)
    sections = _sections(arguments)
    started = time.monotonic()
    os.sync()  # what was written before is not to be waited for in anybody's fsync
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with _scratch(arguments.scratch, room_bytes=_ROOM * size_bytes) as scratch:
        settings = Settings(scratch, size_bytes, num_rounds, **settings_args)
        document = _measure(settings, sections, arguments.plot)
    document["seconds"] = time.monotonic() - started
    if arguments.json:
        write_json(arguments.json, document)
    rows = [
        {"ratio": name, "value": "-" if value is None else f"{value:.3f}"}
        for name, value in document["ratios"].items()
    ]
    print_table("Ratios", rows)
    return 0


def _measure(settings: Settings, sections: list[str], plot: str | None) -> dict[str, Any]:
    local = measure_local(settings) if "local" in sections else None
    names = installed()[:1] if settings.is_quick else installed()
    servers = {name: measure_remote(settings, name) for name in names if "s3" in sections}
    growth = measure_growth(settings) if "growth" in sections else None
    index = None
    if "index" in sections:
        rounds = min(3, settings.num_rounds)
        index = measure_index(
            settings.scratch, num_ranks=NUM_RANKS, num_rounds=rounds, say=settings.say
        )
    _print(local, servers, growth, index)
    if plot and growth:
        Path(plot).write_text(_picture(growth))
    return {
        "schema": "ckptool.bench_tools/1",
        "quick": settings.is_quick,
        "machine": machine(),
        "size_bytes": settings.size_bytes,
        "rounds": settings.num_rounds,
        "ratios": _ratios(local, servers, growth),
        "definitions": DEFINITIONS,
        "local": local.to_json() if local else None,
        "servers": {
            name: servers[name].to_json() if name in servers else None
            for name in ("seaweedfs", "rgw")
        },
        "growth": growth,
        "index": index,
    }


def _ratios(
    local: LocalFigures | None,
    servers: dict[str, RemoteFigures],
    growth: list[dict[str, Any]] | None,
) -> dict[str, float | None]:
    weed = servers.get("seaweedfs")
    peaks = [local.export_peak_bytes] if local else []
    peaks += [row["ckptool"]["peak_rss_bytes"] for row in growth or ()]
    return {
        "export_local_vs_dcp": local.vs_dcp if local else None,
        "export_local_vs_cp": local.vs_cp if local else None,
        "export_s3_vs_client": min((s.export_vs_client for s in servers.values()), default=None),
        "export_read_amplification": max(
            (s.export_read_amplification for s in servers.values()), default=None
        ),
        "reshard_s3_client_share": weed.shares["reshard 8 to 16"] if weed else None,
        "peak_rss_mib": max(peaks) / 2**20 if peaks else None,
    }


def _print(
    local: LocalFigures | None,
    servers: dict[str, RemoteFigures],
    growth: list[dict[str, Any]] | None,
    index: dict[str, Any] | None,
) -> None:
    for title, rows in (local.tables() if local else {}).items():
        print_table(title, rows)
    for figures in servers.values():
        for title, rows in figures.tables().items():
            print_table(title, rows)
    if growth:
        print_table("As the size grows: export --all, local", _growth_rows(growth))
    if index:
        title = f"The index of {NUM_RANKS} ranks ({text_size(index['metadata_bytes'])})"
        print_table(title, _index_rows(index))


def _growth_rows(growth: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "size": f"{row['times']}x",
            "bytes": text_size(row["output_bytes"]),
            **{
                f"{who} {unit}": text(row[who])
                for who in ("ckptool", "dcp_to_torch_save")
                for unit, text in (
                    ("s", lambda figures: f"{figures['work_seconds']:.2f}"),
                    ("peak RSS", lambda figures: text_size(figures["peak_rss_bytes"])),
                )
            },
        }
        for row in growth
    ]


def _index_rows(index: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "what": name,
            "seconds": f"{row['seconds']:.2f}",
            "without start-up": f"{row['work_seconds']:.2f}",
            "memory over imports": text_size(row["memory_bytes"]),
        }
        for name, row in index["rows"].items()
    ]


def _picture(growth: list[dict[str, Any]]) -> str:
    def series(name: str, unit: float) -> dict[str, list[float]]:
        return {
            who: [row[who][name] / unit for row in growth]
            for who in ("ckptool", "dcp_to_torch_save")
        }

    panels = [
        Panel("seconds, to fsync, without start-up", series("work_seconds", 1)),
        Panel("peak memory, MiB", series("peak_rss_bytes", 2**20)),
    ]
    labels = [text_size(row["output_bytes"]) for row in growth]
    return draw(panels, labels=labels, title="export --all of a growing checkpoint, local disk")


def _sections(arguments: argparse.Namespace) -> list[str]:
    if arguments.only:
        return list(arguments.only)
    chosen = ["local", "s3"] if arguments.quick else list(SECTIONS)
    chosen += ["growth"] if arguments.plot else []
    return chosen + (["index"] if arguments.index else [])


@contextlib.contextmanager
def _scratch(parent: str | None, *, room_bytes: int) -> Iterator[Path]:
    """A folder that is gone at the end; what children put aside goes there too."""
    folder = Path(tempfile.mkdtemp(prefix="bench-tools-", dir=parent)).absolute()
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        free = shutil.disk_usage(folder).free
        if free < room_bytes:
            sys.exit(
                f"{folder.parent} has {text_size(free)} free of {text_size(room_bytes)} that this "
                "takes: give another --scratch, or a smaller --size"
            )
        yield folder
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _mute(text: str) -> None:
    pass


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_tools",
        description="Measure ckptool beside torch's own tools and the raw limits.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, within a minute")
    parser.add_argument("--json", metavar="PATH", help="write one document of all figures")
    parser.add_argument(
        "--plot", metavar="PATH", help="draw time and memory as the size grows (SVG)"
    )
    parser.add_argument("--index", action="store_true", help="with --quick: the big index too")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="repeatable")
    parser.add_argument("--size", type=parse_size, help="of a checkpoint, such as 2GiB")
    parser.add_argument("--rounds", type=int, help="5, with --quick 1")
    parser.add_argument("--scratch", metavar="DIR", help="where to work; a local disk")
    parser.add_argument("-q", dest="silent", action="store_true", help="no talk on stderr")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
