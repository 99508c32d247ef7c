"""Findings -> lines for people; the same kind is not repeated without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptool.cli.output import Output
from ckptool.planning.findings import Finding

__all__ = ["FindingLines", "print_findings"]

MAX_PER_CODE = 50


class FindingLines:
    """Prints findings as they come."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._seen: Counter[str] = Counter()

    def take(self, finding: Finding) -> None:
        self._seen[finding.code] += 1
        if self._seen[finding.code] <= MAX_PER_CODE or self._out.is_verbose:
            self._out.line(f"{finding.severity}: {finding.message}")

    def finish(self) -> None:
        """Say how many were not printed."""
        for code, number in self._seen.items():
            if number > MAX_PER_CODE and not self._out.is_verbose:
                self._out.line(
                    f"... and {number - MAX_PER_CODE} more {code} findings; -v or --json has all"
                )


def print_findings(out: Output, findings: Iterable[Finding]) -> None:
    lines = FindingLines(out)
    for finding in findings:
        lines.take(finding)
    lines.finish()
