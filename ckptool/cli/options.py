"""The options that commands share, and how their texts are read."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import click

from ckptool.cli.output import Output
from ckptool.engine.run import How

__all__ = [
    "EXIT_STATUSES",
    "SIZE",
    "common_options",
    "dest_options",
    "exit_statuses",
    "parse_size",
    "parse_storage_options",
    "plan_options",
    "run_options",
    "work_options",
]

F = TypeVar("F", bound=Callable[..., Any])

EXIT_STATUSES = {
    0: "done",
    1: "unexpected failure",
    2: "usage",
    3: "the checkpoint is damaged, hostile or incomplete",
    10: "no checkpoint there: no .metadata, or one of 0 bytes",
    11: "refused before anything was written",
    12: "storage failed after retries",
    130: "interrupted",
}

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}{e}": 1024**n for n, p in enumerate("kmgt", 1) for e in ("", "i", "ib")}
_UNITS |= {f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}
_TEXT_OPTIONS = ("key", "secret", "token", "username", "password", "profile")


def exit_statuses(*codes: int, **meanings: str) -> str:
    """The epilog of a command's help; ``meanings`` (``_0="…"``) replace the general ones."""
    rows = [(c, meanings.get(f"_{c}", EXIT_STATUSES[c])) for c in codes]
    return "\b\nExit status:\n" + "\n".join(f"  {code:<4} {text}" for code, text in rows)


def common_options(function: Callable[..., int]) -> Callable[..., int]:
    """Every command's options; the command gets ``out`` and ``source_options``."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    @click.option("-q", "--quiet", is_flag=True, help="No talk on stderr, no progress bar.")
    @click.option("-v", "--verbose", is_flag=True, help="Say more; show where a failure came from.")
    @click.option(
        "--storage-option",
        metavar="KEY=VALUE",
        multiple=True,
        help="For fsspec, at every URL of the command; VALUE is JSON where it parses.",
    )
    @click.option(
        "--source-option", metavar="KEY=VALUE", multiple=True, help="The same, for the source only."
    )
    @click.pass_context
    @functools.wraps(function)
    def wrapper(
        ctx: click.Context,
        /,
        *args: Any,
        as_json: bool,
        quiet: bool,
        verbose: bool,
        storage_option: Sequence[str],
        source_option: Sequence[str],
        dest_option: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> int:
        out = ctx.ensure_object(Output)
        out.configure(command=ctx.info_name, as_json=as_json, is_quiet=quiet, is_verbose=verbose)
        shared = parse_storage_options(storage_option, name="--storage-option")
        source = parse_storage_options(source_option, name="--source-option")
        kwargs["source_options"] = shared | source
        if dest_option is not None:
            dest = parse_storage_options(dest_option, name="--dest-option")
            kwargs["dest_options"] = shared | dest
        return function(out, *args, **kwargs)

    return wrapper


def dest_options(function: F) -> F:
    """For commands that write; stands above ``common_options``."""
    return click.option(
        "--dest-option",
        metavar="KEY=VALUE",
        multiple=True,
        help="Like --storage-option, for the destination only.",
    )(function)


def plan_options(function: F) -> F:
    """For commands that show their plan on request."""

    @functools.wraps(function)
    def wrapper(*args: Any, dry_run: bool, probe: bool, **kwargs: Any) -> Any:
        if probe and not dry_run:
            raise click.UsageError("--probe goes with --dry-run")
        return function(*args, dry_run=dry_run, probe=probe, **kwargs)

    probe = click.option(
        "--probe", is_flag=True, help="With --dry-run: read the items' headers too."
    )
    dry = click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
    return cast("F", dry(probe(wrapper)))


def work_options(function: F) -> F:
    """For commands that move bytes; what is not given keeps the operation's default."""

    @functools.wraps(function)
    def wrapper(*args: Any, jobs: int | None, max_memory: int | None, **kwargs: Any) -> Any:
        given = {"jobs": jobs, "max_memory": max_memory}
        return function(*args, **kwargs, **{k: v for k, v in given.items() if v is not None})

    jobs = click.option(
        "--jobs", type=click.IntRange(min=1), metavar="N", help="How many threads work."
    )
    memory = click.option(
        "--max-memory", type=SIZE, metavar="SIZE", help="Bound of the buffers, such as 256MiB."
    )
    return cast("F", jobs(memory(wrapper)))


def run_options(function: F) -> F:
    """For commands that write from a plan: how it is run, and what of an earlier run is done.

    The command gets ``how``, ``resume`` and ``discard``.
    """

    @functools.wraps(function)
    def wrapper(
        *args: Any,
        executor: str,
        dask: str | None,
        dask_forward_credentials: bool,
        trust_server: bool,
        resume: bool,
        discard: bool,
        jobs: int | None = None,
        max_memory: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if resume and discard:
            raise click.UsageError("--resume and --discard exclude each other")
        if dask is not None and executor == "processes":
            raise click.UsageError("--dask and --executor processes exclude each other")
        how = How(
            jobs=jobs,
            executor=executor if dask is None else f"dask:{dask}",
            trust_server=trust_server,
            forward_credentials=dask_forward_credentials,
        )
        if max_memory is not None:
            how = replace(how, max_memory=max_memory)
        return function(*args, how=how, resume=resume, discard=discard, **kwargs)

    options = [
        click.option(
            "--executor",
            type=click.Choice(["threads", "processes"]),
            default="threads",
            show_default=True,
            help="What does the work on this machine.",
        ),
        click.option("--dask", metavar="ADDRESS", help="Work on the Dask cluster there instead."),
        click.option(
            "--dask-forward-credentials",
            is_flag=True,
            help="Send storage options with secrets to Dask workers; tls:// only.",
        ),
        click.option(
            "--trust-server",
            is_flag=True,
            help="Do not read again what a store copied without telling its CRC-32.",
        ),
        click.option("--resume", is_flag=True, help="Go on with an interrupted run."),
        click.option("--discard", is_flag=True, help="Remove what an interrupted run left."),
    ]
    decorated: Any = work_options(wrapper)
    for option in reversed(options):
        decorated = option(decorated)
    return cast("F", decorated)


def parse_size(text: str) -> int:
    """``256MiB``, ``1.5GB``, ``4096``: bytes. ``KB`` is 1000; ``KiB`` and ``K`` are 1024."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE | re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size: write bytes, or such as 256MiB, 5GB")
    number = match[1]
    num_bytes = int(float(number) * unit) if "." in number else int(number) * unit
    if num_bytes < 1:
        raise ValueError(f"{text!r} is less than a byte")
    return num_bytes


def parse_storage_options(pairs: Sequence[str], *, name: str) -> dict[str, Any]:
    """``KEY=VALUE`` pairs; a value is JSON where it parses, credentials stay text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise click.UsageError(f"{name} takes KEY=VALUE, not {key!r}")
        options[key] = text if key in _TEXT_OPTIONS else _json_or_text(text)
    return options


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text


def _no_constant(text: str) -> Any:
    raise ValueError(text)


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()
