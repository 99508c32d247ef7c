"""``ckptool validate``."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.bar import progress_for
from ckptool.cli.findings import FindingLines
from ckptool.cli.options import common_options, exit_statuses, work_options
from ckptool.cli.output import Output
from ckptool.cli.text import count, size
from ckptool.operations.validate import ValidateReport, validate

__all__ = ["command"]


class _Percent(click.ParamType[float]):
    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            percent = float(str(value).removesuffix("%"))
        except ValueError:
            percent = -1
        if not 0 < percent <= 100:
            self.fail(f"{value!r} is no share above 0% and up to 100%", param, ctx)
        return percent


@click.command(
    "validate",
    epilog=exit_statuses(
        0, 1, 2, 3, 10, 11, 12, 130,
        _0="no errors; warnings and notes there may be",
        _3="errors: the checkpoint is damaged, hostile or incomplete",
        _11="a dtype, class or form that is not known",
    ),
)  # fmt: skip
@click.argument("checkpoint")
@click.option("--read-data", is_flag=True, help="Read every item; check headers and CRC-32s.")
@click.option(
    "--read-data-subset",
    type=_Percent(),
    metavar="N%",
    help="The same for a share of the items, the same ones each time.",
)
@work_options
@common_options
def command(
    out: Output,
    *,
    checkpoint: str,
    read_data: bool,
    read_data_subset: float | None,
    source_options: dict[str, Any],
    **work: int,
) -> int:
    """Prove that a checkpoint is whole, as far as it is asked.

    First that the chunks tile every tensor, then that every item lies inside a file that is
    there; with --read-data also that every stored byte is the one that was written. All
    findings are printed, not only the first.
    """
    if read_data and read_data_subset is not None:
        raise click.UsageError("--read-data and --read-data-subset exclude each other")
    lines = FindingLines(out)
    report = validate(
        checkpoint,
        read_data=read_data or read_data_subset is not None,
        percent=100.0 if read_data_subset is None else read_data_subset,
        options=source_options,
        on_finding=lines.take,
        progress=progress_for(out),
        **work,
    )
    lines.finish()
    out.document(report.to_json())
    for note in report.notes:
        out.line(f"note: {note}")
    _print_verdict(out, report)
    return 0 if report.is_ok else 3


def _print_verdict(out: Output, report: ValidateReport) -> None:
    what = f"{report.url}: {count(report.num_entries, 'entry').replace('entrys', 'entries')}"
    out.line(f"{what}, {count(report.num_items, 'item')}")
    data = report.data
    if data is None:
        out.line("  structure and files checked; --read-data would check the stored bytes too")
    else:
        out.line(
            f"  {data.num_ok} items ok, {data.num_damaged} damaged, {data.num_unverifiable} "
            f"unverifiable (no CRC-32 stored), {data.num_skipped} not read; "
            f"{size(data.num_bytes_read)} read"
        )
    warnings = f", {count(report.num_warnings, 'warning')}" if report.num_warnings else ""
    out.line(f"  {count(report.num_errors, 'error')}{warnings}")
    if report.remedy is not None:
        out.line(f"next: {report.remedy}")
