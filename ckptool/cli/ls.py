"""``ckptool ls``."""

from __future__ import annotations

from typing import Any

import click

from ckptool.cli.options import common_options, exit_statuses
from ckptool.cli.output import Output
from ckptool.cli.text import size, table
from ckptool.operations.ls import LsResult, Step, list_steps, rfc3339

__all__ = ["command"]


@click.command(
    "ls", epilog=exit_statuses(0, 1, 2, 3, 10, 12, 130, _3="two steps have the same number")
)
@click.argument("root")
@common_options
def command(out: Output, *, root: str, source_options: dict[str, Any]) -> int:
    """List the steps of a run: which are committed, how large, how old.

    ROOT is a run such as s3://bucket/llama8b, or one checkpoint. Only names and sizes are
    looked at: whether a committed step is whole, validate tells.
    """
    result = list_steps(root, options=source_options)
    out.document(result.to_json())
    _print(out, result)
    for problem in result.problems:
        out.say(f"ckptool: {problem}\n  rename or remove one of them; until then name the step")
    return 3 if result.problems else 0


def _print(out: Output, result: LsResult) -> None:
    header = ["STEP", "NAME", "STATE", "SIZE", "FILES", "MODIFIED"]
    for line in table(header, [_row(s) for s in result.steps]):
        out.line(line)
    for step in result.steps:
        if step.state != "committed":
            out.say(f"{step.name}: {_WHY[step.state]}")


def _row(step: Step) -> list[object]:
    number = "-" if step.number is None else str(step.number)
    modified = "-" if step.modified is None else rfc3339(step.modified)
    return [number, step.name, step.state, size(step.num_bytes), step.num_files, modified]


_WHY = {
    "uncommitted": "no .metadata, or an empty one: the save did not finish, or still runs",
    "half-deleted": "no .metadata beside its manifest: a delete, or a save's end, was cut short",
    "rank-local": "a metadata file per rank and none for all; inspect and validate read it",
}
