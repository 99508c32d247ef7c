"""What reshard and export say of a run in the same words."""

from __future__ import annotations

from ckptool.cli.output import Output
from ckptool.cli.text import count, size, some
from ckptool.engine.run import RunReport

__all__ = ["print_report", "say_discarded"]


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
