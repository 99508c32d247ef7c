"""Arguments -> exit status: finds the command, runs it, and turns what it raises into words."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import click

from ckptool import __version__
from ckptool.cli.output import Output
from ckptool.errors import CkptoolError, InterruptedByUser, UsageError

__all__ = ["COMMANDS", "cli", "run"]

COMMANDS = ("ls", "inspect", "validate", "reshard", "export")


class _LazyGroup(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ckptool.cli.{cmd_name}")
        command: click.Command = module.command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckptool", message="%(prog)s %(version)s")
def cli() -> None:
    """See what is in a sharded training checkpoint, prove that it is whole, lay it out for
    another number of ranks, or hand it to inference.

    Checkpoints are those of torch.distributed.checkpoint ("DCP"), on a local disk or at any
    URL that fsspec knows, such as s3://bucket/run/step-00012000.
    """


def run(args: Sequence[str], *, output: Output | None = None) -> int:
    """Run one command line; the exit status, never an exception."""
    out = output or Output()
    command = next((a for a in args if a in COMMANDS), None)
    out.configure(command=command, as_json="--json" in args)
    try:
        with _terminated_like_ctrl_c():
            status = cli.main(list(args), prog_name="ckptool", standalone_mode=False, obj=out)
            return status if isinstance(status, int) else 0
    except click.UsageError as error:
        return out.fail(_usage(error))
    except click.ClickException as error:
        return out.fail(UsageError(error.format_message()))
    except (click.Abort, KeyboardInterrupt):
        return out.fail(InterruptedByUser("interrupted"))
    except CkptoolError as error:
        out.trace(traceback.format_exc())
        return out.fail(error)
    except Exception as error:
        out.trace(traceback.format_exc())
        return out.fail(_unexpected(error, is_verbose=out.is_verbose))
    finally:
        out.close()


def _usage(error: click.UsageError) -> UsageError:
    command = error.ctx.command_path if error.ctx else "ckptool"
    message = error.format_message().rstrip(".") or "no command given"
    return UsageError(message, hint=f"{command} --help tells what it takes")


def _unexpected(error: Exception, *, is_verbose: bool) -> CkptoolError:
    detail = " ".join(str(error).split()) or "no message"
    hint = None if is_verbose else "this is a fault in ckptool; run again with -v to see where"
    return CkptoolError(f"unexpected {type(error).__name__}: {detail}", hint=hint)


@contextlib.contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM stops the work the way Ctrl-C does; only the main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
