"""The one sink of the command line: data on stdout, talk on stderr, one document for --json."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from ckptool.errors import CkptoolError, InterruptedByUser

__all__ = ["Output", "error_code", "printable"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Output:
    """Where a command prints. A reader that went away (``| head``) does not stop the work."""

    def __init__(self) -> None:
        self.command: str | None = None
        self.as_json = False
        self.is_quiet = False
        self.is_verbose = False

    def configure(
        self,
        *,
        command: str | None = None,
        as_json: bool = False,
        is_quiet: bool = False,
        is_verbose: bool = False,
    ) -> None:
        self.command = command or self.command
        self.as_json, self.is_quiet, self.is_verbose = as_json, is_quiet, is_verbose

    def line(self, text: str = "") -> None:
        """A line of data for people; --json prints its document instead."""
        if not self.as_json:
            _write(sys.stdout, printable(text) + "\n")

    def say(self, text: str) -> None:
        """A line of talk."""
        if not self.is_quiet:
            _write(sys.stderr, printable(text) + "\n")

    def trace(self, text: str) -> None:
        """A traceback, for -v."""
        if self.is_verbose:
            _write(sys.stderr, text)

    def document(self, body: Mapping[str, Any]) -> None:
        """The result, for --json: one document with its schema first."""
        if self.as_json:
            schema = f"ckptool.{self.command or 'error'}/1"
            document = {"schema": schema, "error": None, **body}
            _write(sys.stdout, json.dumps(document, indent=2, default=str) + "\n")

    def fail(self, error: CkptoolError) -> int:
        """Print an error as one sentence (and as the document); its exit status."""
        text = f"ckptool: {error.message}"
        if error.hint:
            text += f"\n  {error.hint}"
        _write(sys.stderr, printable(text) + "\n")
        told = {"code": error_code(error), "message": error.message, "hint": error.hint}
        facts = {k: v for k, v in error.facts.items() if k not in told}
        self.document({"error": {**told, "exit_code": error.exit_code, **facts}})
        return error.exit_code

    def close(self) -> None:
        """Flush, so that a reader that went away is met here and not at interpreter exit."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
                continue
            _silence(stream)


def error_code(error: CkptoolError) -> str:
    """A stable word for a kind of error: ``NoCheckpointError`` is ``no-checkpoint``."""
    if type(error) is CkptoolError:
        return "unexpected"
    if isinstance(error, InterruptedByUser):
        return "interrupted"
    name = type(error).__name__.removesuffix("Error")
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def printable(text: str) -> str:
    """Text that cannot steer a terminal: names in a checkpoint may hold anything."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m.group()):02x}", text)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Send what is still to come nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
