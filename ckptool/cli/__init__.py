"""The command line: parses and prints; what a command does lives in operations."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and leave with its exit status."""
    import sys

    from ckptool.cli.app import run

    sys.exit(run(sys.argv[1:]))
