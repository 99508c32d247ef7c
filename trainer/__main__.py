"""Turns a command line into a training run: ``torchrun ... -m trainer --config FILE``."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from ckptool.errors import CkptoolError
from trainer.config import load_config

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run and return the exit code; errors are one sentence, not a traceback."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    if importlib.util.find_spec("torch") is None:
        print("training needs torch: pip install 'ckptool[torch]'", file=sys.stderr)
        return 1
    rank = os.environ.get("RANK", "0")
    try:
        config = load_config(options.config, overrides=options.set)
    except CkptoolError as error:
        if rank == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        from trainer.train import train

        return train(config)
    except CkptoolError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        return _end(error.exit_code)
    except Exception:
        traceback.print_exc()
        return _end(1)


def _end(code: int) -> int:
    """Leave at once where there are peers: an orderly end would wait for their collectives."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stderr.flush()
        os._exit(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckptool-train",
        description="Train a sharded model, save it to any storage, resume it at any world size.",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file; every key has a default")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override one key"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
