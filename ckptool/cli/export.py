"""``ckptool export``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from ckptool.cli.bar import progress_for
from ckptool.cli.options import (
    SIZE,
    common_options,
    dest_options,
    exit_statuses,
    plan_options,
    run_options,
)
from ckptool.cli.output import Output
from ckptool.cli.rename import read_renames
from ckptool.cli.report import print_dry_run, print_report, say_discarded
from ckptool.cli.text import count, size, some
from ckptool.operations.export import ExportResult, discard_export, export

__all__ = ["command"]


@click.command("export", epilog=exit_statuses(0, 1, 2, 3, 10, 11, 12, 130))
@click.argument("source")
@click.argument("dest")
@click.option("--all", "everything", is_flag=True, help="Every entry, optimizer state included.")
@click.option("--only", metavar="GLOB", multiple=True, help="Entries that match; repeatable.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Not these; repeatable.")
@click.option("--strip-prefix", metavar="TEXT", help="Take TEXT off the front of names.")
@click.option(
    "--rename",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help='New names: a JSON object of old to new, or lines of "old new".',
)
@click.option("--dtype", metavar="NAME", help="Cast floating tensors, such as to bfloat16.")
@click.option("--max-file-size", type=SIZE, metavar="SIZE", help="Split a folder's files (5GB).")
@click.option("--format", type=click.Choice(["safetensors", "torch"]), help="Of a folder's files.")
@click.option("--int-keys", is_flag=True, help="All-digit keys under state become ints (.pt).")
@click.option("--strict", is_flag=True, help="Refuse to leave out a value that cannot be carried.")
@plan_options
@dest_options
@run_options
@common_options
def command(
    out: Output,
    *,
    source: str,
    dest: str,
    rename: str | None,
    probe: bool,
    discard: bool,
    **options: Any,
) -> int:
    """Hand the model to inference: one file, or a Hugging Face folder.

    SOURCE is a step, or a run, whose newest committed step is taken. DEST that ends in
    .safetensors, .pt, .pth or .bin is one file; otherwise a folder, which must be empty or not
    there yet. Without --all and --only the model is taken, under its own names; what was left
    out is printed. Nothing is cast unless --dtype asks for it.
    """
    if discard:
        discard_export(dest, dest_options=options["dest_options"])
        return say_discarded(out, dest)
    result = export(
        source,
        dest,
        rename=read_renames(rename),
        probe_items=probe,
        progress=progress_for(out),
        **options,
    )
    out.document(result.to_json())
    _print(out, result)
    return 0


def _print(out: Output, result: ExportResult) -> None:
    layout, report = result.layout, result.report
    tensors = layout.tensors
    total = sum(t.num_bytes for t in tensors)
    out.line(f"{result.source_url} -> {result.dest_url}")
    out.line(f"  {count(len(tensors), 'tensor')} of {size(total)} in {_files(result)}")
    out.line(f"  first names: {some([t.name for t in tensors])}" if tensors else "  no tensors")
    _print_casts(out, result)
    for reason, number in Counter(layout.choice.left_out.values()).most_common():
        out.line(f"  left out: {number} ({reason})")
    for key, reason in result.values_left_out.items():
        out.line(f"note: value {key!r} left out: {reason}")
    if report is None:
        print_dry_run(out, result.parts)
        return
    print_report(out, report)


def _files(result: ExportResult) -> str:
    names = [file.name for file in result.layout.files]
    return f"{count(len(names), 'file')}: {some(names)}"


def _print_casts(out: Output, result: ExportResult) -> None:
    kinds = Counter(
        f"{t.source_dtype} to {t.dtype}" for t in result.layout.tensors if t.dtype != t.source_dtype
    )
    for kind, number in kinds.items():
        out.line(f"  cast: {count(number, 'tensor')} from {kind}")
    for key, lost in (result.report.casts if result.report else {}).items():
        if lost.overflows or lost.underflows:
            out.line(
                f"note: {key!r}: {lost.overflows} elements became infinite, "
                f"{lost.underflows} became zero"
            )
