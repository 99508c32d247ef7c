"""``ckptool inspect``."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.findings import print_findings
from ckptool.cli.options import common_options, exit_statuses
from ckptool.cli.output import Output
from ckptool.cli.text import count, size, table
from ckptool.operations.inspect import EntryReport, InspectReport, inspect

__all__ = ["command"]


@click.command("inspect", epilog=exit_statuses(0, 1, 2, 3, 10, 11, 12, 130))
@click.argument("checkpoint")
@click.option("--tensors", is_flag=True, help="Print every entry (--json always has them).")
@click.option("--files", is_flag=True, help="Print every file.")
@click.option(
    "--match", metavar="GLOB", multiple=True, help="Only entries whose key matches; repeatable."
)
@common_options
def command(
    out: Output,
    *,
    checkpoint: str,
    tensors: bool,
    files: bool,
    match: tuple[str, ...],
    source_options: dict[str, Any],
) -> int:
    """Show what a checkpoint holds: entries, dtypes, shapes, files.

    CHECKPOINT is a step, or a run, whose newest committed step is taken. Only its metadata is
    read, no shard file.
    """
    report = inspect(checkpoint, match=match, options=source_options)
    out.document(report.to_json())
    _print_head(out, report)
    _print_totals(out, report)
    if tensors or (match and not out.as_json):
        out.line()
        for line in table(
            ["KEY", "KIND", "DTYPE", "SHAPE", "SIZE", "CHUNKS", "FILES"],
            [_entry_row(e) for e in report.entries],
        ):
            out.line(line)
    if files:
        out.line()
        rows = [
            [f.name, f.role, size(f.num_bytes), size(f.referenced_bytes), f.num_items]
            for f in report.files
        ]
        for line in table(["FILE", "ROLE", "SIZE", "REFERENCED", "ITEMS"], rows):
            out.line(line)
    print_findings(out, report.findings)
    _print_notes(out, report)
    return 0


def _print_head(out: Output, report: InspectReport) -> None:
    step = "-" if report.step is None else report.step
    out.line(f"{report.url}")
    version = f", version {report.version}" if report.version else ""
    ranks = "" if report.world_size is None else f", saved by {count(report.world_size, 'rank')}"
    out.line(f"  step {step}, form {report.form}{version}{ranks}")
    out.line(
        f"  {count(report.num_tensors, 'tensor')} of {size(report.num_bytes)} in "
        f"{count(report.num_chunks, 'chunk')}, {count(report.num_values, 'value')}; "
        f"{size(report.stored_bytes)} stored"
    )


def _print_totals(out: Output, report: InspectReport) -> None:
    for title, totals in (("GROUP", report.by_group), ("DTYPE", report.by_dtype)):
        if not totals:
            continue
        out.line()
        rows = [[t.name, t.num_entries, t.num_elements, size(t.num_bytes)] for t in totals]
        for line in table([title, "ENTRIES", "ELEMENTS", "SIZE"], rows):
            out.line(line)


def _entry_row(entry: EntryReport) -> list[object]:
    where = entry.files[0] if len(entry.files) == 1 else count(len(entry.files), "file")
    shape = "-" if entry.shape is None else str(list(entry.shape))
    num_bytes = entry.stored_bytes if entry.num_bytes is None else entry.num_bytes
    wrapped = f" ({', '.join(entry.transforms)})" if entry.transforms else ""
    return [
        entry.key,
        entry.kind,
        entry.dtype or "-",
        shape,
        size(num_bytes),
        entry.num_chunks,
        where + wrapped,
    ]


def _print_notes(out: Output, report: InspectReport) -> None:
    roles = [(f.role, f.name) for f in report.files]
    for role, what in (
        ("missing", "missing: the index names it"),
        ("orphan", "orphan: nothing refers to it"),
    ):
        names = [name for r, name in roles if r == role]
        if names:
            some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            out.line(f"{what.partition(':')[0]} {count(len(names), 'file')}: {some}")
    for note in report.notes:
        out.line(f"note: {note}")
