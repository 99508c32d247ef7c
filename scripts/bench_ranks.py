"""Starts the ranks of a benchmark on this machine, each a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import warnings
from typing import Any

__all__ = ["join_ranks", "leave_ranks", "rank_parser", "say", "start_ranks"]


def rank_parser(prog: str, *, measured: str) -> argparse.ArgumentParser:
    """The command line of a benchmark on ranks; ``measured`` is what ``--size`` counts."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--quick", action="store_true", help="little of it, within a minute")
    parser.add_argument("--json", metavar="PATH", help="write one JSON document")
    parser.add_argument("--size", help=f"bytes of the {measured}, such as 2GiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--scratch", help="a folder for what is written")
    return parser


def say(text: str) -> None:
    """Tell whoever waits; stdout is for the tables."""
    print(text, file=sys.stderr, flush=True)


def start_ranks(script: str, spec: dict[str, Any]) -> None:
    """Run a script on ``spec["num_ranks"]`` ranks to its end; rank 0 prints the result."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, json.dumps(spec)],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(spec["num_ranks"]),
                "OMP_NUM_THREADS": "1",
            },
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(spec["num_ranks"])
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")


def join_ranks(device: str) -> None:
    """Make the process group of this rank."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    backend = "cpu:gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)


def leave_ranks() -> None:
    """End this rank; call it last.

    Not in the usual way: a gloo thread that still frees its last collective while the interpreter
    ends aborts the process.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
