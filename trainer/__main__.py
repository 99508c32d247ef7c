"""Turns a command line into a training run, an estimate or an explanation.

torchrun --nproc-per-node 4 -m trainer --config FILE --set run.steps=200
python -m trainer estimate --config FILE --world-size 8
python -m trainer explain --lesson --world-size 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from ckptool.errors import CkptoolError
from trainer.config import Config
from trainer.config_file import load_config

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
        if options.command != "train":
            return _describe(config, options)
    except CkptoolError as error:
        if rank == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        from trainer.train import train

        code = train(config)
    except CkptoolError as error:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
        code = error.exit_code
    except Exception:  # whatever it was, the rank must leave at once: its peers wait for it
        traceback.print_exc()
        code = 1
    from trainer.process import leave_at_once

    leave_at_once(code)
    return code


def _describe(config: Config, options: argparse.Namespace) -> int:
    """``estimate`` and ``explain``: pure arithmetic, no rank is started."""
    from trainer.estimate import estimate, estimate_lines
    from trainer.explain import explain_lesson, explain_units
    from trainer.layout import resolve_parallel
    from trainer.model import complete_model_config
    from trainer.sizes import cut_model

    world_size = options.world_size
    vocab = 256 if config.data.tokenizer == "byte" else config.data.bpe_vocab_size
    model = complete_model_config(config.model, config.data, tokenizer_vocab_size=vocab)
    if options.command == "explain" and options.lesson:
        lines = explain_units(explain_lesson(world_size), rank=0, num_ranks=world_size)
        print("\n".join(lines))
        return 0
    parallel = resolve_parallel(config.parallel, world_size=world_size, model=model)
    if options.command == "explain":
        lines = explain_units(cut_model(model, parallel), rank=0, num_ranks=world_size)
        print("\n".join(lines))
        return 0
    result = estimate(config, model, parallel)
    if options.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        title = f"{parallel.strategy} on {world_size} ranks, {config.precision.mode}"
        print("\n".join(estimate_lines(result, title=title)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckptool-train",
        description="Train a sharded model, save it to any storage, resume it at any world size.",
        epilog="exit statuses of a rank: 0 done, 1 failed, 2 wrong configuration, 11 refused, "
        "75 preempted and saved, 76 preempted and not saved, 77 stopped by NaN or Inf; torchrun "
        "itself exits with 1, so the outcome also stands in exit.json in the run",
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("train", "estimate", "explain"),
        default="train",
        help="train (default); estimate: memory, collectives and checkpoint sizes; explain: "
        "what is sharded how",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file; every key has a default")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override one key"
    )
    parser.add_argument(
        "--world-size", metavar="N", type=int, default=1, help="ranks to estimate or explain for"
    )
    parser.add_argument(
        "--lesson", action="store_true", help="explain Linear(64,64), ReLU, Linear(64,64)"
    )
    parser.add_argument("--json", action="store_true", help="estimate as one JSON document")
    return parser


if __name__ == "__main__":
    sys.exit(main())
