"""``ckptool reshard``."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.bar import progress_for
from ckptool.cli.options import (
    common_options,
    dest_options,
    exit_statuses,
    plan_options,
    run_options,
)
from ckptool.cli.output import Output
from ckptool.cli.report import print_dry_run, print_report, say_discarded
from ckptool.cli.text import count, size, some
from ckptool.operations.reshard import ReshardResult, discard_reshard, reshard

__all__ = ["command"]


@click.command("reshard", epilog=exit_statuses(0, 1, 2, 3, 10, 11, 12, 130))
@click.argument("source")
@click.argument("dest")
@click.option(
    "--to", type=click.IntRange(min=1), required=True, metavar="N", help="For how many ranks."
)
@click.option("--merge", is_flag=True, help="One chunk per tensor and target.")
@click.option(
    "--compress", type=click.Choice(["zstd"]), help="Compress the items that are written anew."
)
@plan_options
@dest_options
@run_options
@common_options
def command(
    out: Output,
    *,
    source: str,
    dest: str,
    to: int,
    merge: bool,
    compress: str | None,
    dry_run: bool,
    probe: bool,
    discard: bool,
    **work: Any,
) -> int:
    """Lay a checkpoint out for another number of ranks.

    SOURCE is a step, or a run, whose newest committed step is taken; DEST must be empty or not
    there yet. All values stay as they are, every byte is checked on the way, and nothing
    committed is at DEST before all of it is.
    """
    if discard:
        discard_reshard(dest, dest_options=work["dest_options"])
        return say_discarded(out, dest)
    result = reshard(
        source,
        dest,
        to=to,
        merge=merge,
        compress=compress,
        dry_run=dry_run,
        probe_items=probe,
        progress=progress_for(out),
        **work,
    )
    out.document(result.to_json())
    _print(out, result)
    return 0


def _print(out: Output, result: ReshardResult) -> None:
    layout = result.layout
    sizes = layout.rank_num_bytes()
    out.line(f"{result.source_url} -> {result.dest_url}")
    out.line(
        f"  {count(layout.num_ranks, 'rank')} of {size(min(sizes))} to {size(max(sizes))}; "
        f"{count(layout.num_kept, 'item')} kept as they are, "
        f"{len(layout.chunks) - layout.num_kept} new, {count(len(layout.values), 'value')}"
    )
    if layout.rank_bound:
        out.line(f"note: {some(layout.rank_bound)} hold a rank number of the old world size")
    report = result.report
    if report is None:
        print_dry_run(out, result.parts)
        return
    print_report(out, report)
    out.say(f"next: ckptool validate {result.dest_url} --read-data")
