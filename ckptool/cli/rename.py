"""The file of ``--rename`` -> old names to new ones."""

from __future__ import annotations

import json

import click

__all__ = ["read_renames"]


def read_renames(path: str | None) -> dict[str, str] | None:
    """A JSON object of strings, or lines of ``old new``; ``#`` starts a comment."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--rename {path}: cannot be read: {error}") from error
    return _from_json(path, text) if text.lstrip().startswith("{") else _from_lines(path, text)


def _from_json(path: str, text: str) -> dict[str, str]:
    try:
        renames = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--rename {path}: not JSON: {error}") from error
    if not all(isinstance(new, str) for new in renames.values()):
        raise click.UsageError(f"--rename {path}: every new name must be a string")
    return dict(renames)


def _from_lines(path: str, text: str) -> dict[str, str]:
    renames: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise click.UsageError(f'--rename {path}: line {number} is not "old new"')
        if words[0] in renames:
            raise click.UsageError(f"--rename {path}: line {number} names {words[0]!r} again")
        renames[words[0]] = words[1]
    return renames
