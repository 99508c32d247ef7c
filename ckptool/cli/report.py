"""What reshard and export say of a run in the same words."""

from __future__ import annotations

from ckptool.cli.output import Output
from ckptool.cli.text import count, size, some
from ckptool.engine.run import RunReport
from ckptool.planning.copies import PartsSummary

__all__ = ["print_dry_run", "print_report", "say_discarded"]


def print_dry_run(out: Output, parts: PartsSummary | None) -> None:
    """The end of ``--dry-run``; with ``--probe``, who would move how many bytes."""
    if parts is not None:
        out.line(
            f"  {count(parts.num_parts, 'part')}: {size(parts.num_bytes_copied)} copied by the "
            f"server itself, {size(parts.num_bytes_sent)} through this machine"
        )
        if parts.num_intermediates:
            out.line(
                f"  too many parts for one object: {parts.num_intermediates} intermediate objects "
                "are assembled first and copied together by the server"
            )
    out.line("  dry run: nothing was written")


def print_report(out: Output, report: RunReport) -> None:
    """Bytes moved, and what was verified how."""
    out.line(
        f"  {size(report.num_bytes_read)} read, {size(report.num_bytes_written)} written; "
        f"{count(report.payloads_proved, 'payload')} verified"
    )
    if report.num_bytes_copied:
        out.line(f"  {size(report.num_bytes_copied)} of it copied by the server itself")
    if report.num_parts_kept:
        out.line(f"  {count(report.num_parts_kept, 'part')} kept from the interrupted run")
    for checks, what in (
        (report.unverifiable, "have no CRC-32 stored and could not be verified"),
        (report.trusted, "were copied by the server and not verified (--trust-server)"),
    ):
        if checks:
            out.line(f"note: {some(sorted({check.entry for check in checks}))} {what}")


def say_discarded(out: Output, dest: str) -> int:
    """The end of ``--discard``."""
    out.document({"destination": dest, "discarded": True})
    out.line(f"removed what an interrupted run left at {dest}")
    return 0
