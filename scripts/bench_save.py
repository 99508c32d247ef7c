"""Saves and loads of a sharded state: ours, torch's own, and the raw limits, in one run.

Each job is a group of ranks (bench_save_ranks.py) in which all contenders take turns, so that
they see the same machine and the same server. What a contender is compared with stands in
``ratios``: speeds are ours / theirs, shares and amplifications fractions of 1, null where this
machine cannot measure one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_common import machine, measure, parse_size, print_table, python, text_size, write_json
from bench_ranks import rank_parser, say
from bench_servers import KEY, REGION, SECRET, Server, installed, running

SCHEMA = "ckptool.bench_save/1"
STOCK = ["dcp.save", "dcp.async_save, thread", "dcp.async_save, process"]
COLLECTION_S = {"rgw": 5.0}  # where what was deleted takes memory until it is collected
RATIOS = (
    "stall_share",
    "staging_vs_pinned_copy",
    "upload_vs_client",
    "upload_vs_fsspec_writer",
    "load_vs_fsspec_reader",
    "read_amplification_same_world",
    "read_amplification_reshard",
)


def main() -> None:
    arguments = _parse()
    num_bytes = parse_size(arguments.size or ("192MiB" if arguments.quick else "1GiB"))
    num_rounds = 2 if arguments.quick else 6  # each contender twice in each place
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine(),
        "device": arguments.device,
        "num_ranks": arguments.ranks,
        "num_server_ranks": arguments.server_ranks,
        "state_bytes": num_bytes,
        "servers": {},
        "ratios": dict.fromkeys(RATIOS),
    }
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        names = installed()[:1] if arguments.quick else installed()
        for name in names if arguments.device == "cpu" else []:
            say(f"saving to and loading from {name}")
            with running(name, scratch=Path(scratch), store_bytes=10 * num_bytes) as server:
                found = _on_server(server, arguments, num_bytes, num_rounds)
            document["servers"][name] = found
            _print_server(name, found, num_bytes, num_ranks=arguments.server_ranks)
        say(f"training on {arguments.device} while saves go on")
        document["steps"] = _run_job(
            {
                "job": "steps",
                "num_ranks": arguments.ranks,
                "device": arguments.device,
                "state_bytes": num_bytes,
                "num_steps": 8 if arguments.quick else 30,
                "url": str(Path(scratch, "steps")),
                "stock": [] if arguments.quick else STOCK,
            }
        )
        document["amplification"] = _run_job(
            {"job": "amplification", "num_ranks": 1, "device": "cpu", "url": scratch}
        )
    document["ratios"].update(_ratios(document))
    _print(document)
    if arguments.json:
        write_json(arguments.json, document)


def _parse() -> argparse.Namespace:
    parser = rank_parser("scripts/bench_save", measured="state")
    parser.add_argument(
        "--server-ranks",
        type=int,
        default=1,
        help="ranks that save to and load from the S3 servers, which share this machine: with "
        "several, a server on few cores is everybody's limit",
    )
    return parser.parse_args()


def _on_server(
    server: Server, arguments: argparse.Namespace, num_bytes: int, num_rounds: int
) -> dict[str, Any]:
    bucket = server.make_bucket(f"bench-{uuid.uuid4().hex[:8]}")
    options = {
        "endpoint_url": server.endpoint_url,
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"region_name": REGION},
    }
    cases = ["ckptool", "client", "dcp.save + FsspecWriter"]
    once = [] if arguments.quick else ["dcp.async_save, thread", "dcp.async_save, process"]
    return _run_job(
        {
            "job": "server",
            "num_ranks": arguments.server_ranks,
            "device": "cpu",
            "state_bytes": num_bytes,
            "num_rounds": num_rounds,
            "url": bucket,
            "options": options,
            "cases": cases,
            "once": once,
            "collection_s": COLLECTION_S.get(server.name, 0.0),
        }
    )


def _run_job(spec: Mapping[str, Any]) -> dict[str, Any]:
    run = measure(python("scripts/bench_save_ranks.py", json.dumps(spec)))
    answers = [line for line in run.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(answers[-1])
    return {**result, "peak_rss_bytes": run.peak_rss_bytes}


def _ratios(document: Mapping[str, Any]) -> dict[str, float | None]:
    """The worst over the servers; medians of the rounds.

    Beside FsspecWriter only RGW counts, where there is one: SeaweedFS takes bytes no faster than
    any client sends them.
    """
    servers = document["servers"].values()
    fast_servers = [document["servers"]["rgw"]] if "rgw" in document["servers"] else servers
    steps, amplification = document["steps"], document["amplification"]
    same = [server["amplification"] for server in servers] or [amplification["same_world"]]
    return {
        "stall_share": steps["stall_share"],
        "staging_vs_pinned_copy": steps["staging_vs_pinned_copy"],
        "upload_vs_client": _worst(servers, "save", "client"),
        "upload_vs_fsspec_writer": _worst(fast_servers, "save", "dcp.save + FsspecWriter"),
        "load_vs_fsspec_reader": _worst(servers, "load", "dcp.load + FsspecReader"),
        "read_amplification_same_world": max(*same, amplification["same_world"]),
        "read_amplification_reshard": amplification["reshard"],
    }


def _worst(servers: Any, what: str, case: str) -> float | None:
    found = [
        statistics.median(server[what][case]) / statistics.median(server[what]["ckptool"])
        for server in servers
        if case in server[what]
    ]
    return min(found, default=None)


def _print_server(name: str, server: Mapping[str, Any], num_bytes: int, *, num_ranks: int) -> None:
    for what in ("save", "load"):
        rows = [_row(case, seconds, num_bytes) for case, seconds in server[what].items()]
        print_table(f"{what}, {text_size(num_bytes)} of {num_ranks} rank(s) on {name}", rows)


def _print(document: Mapping[str, Any]) -> None:
    steps = document["steps"]
    rows = [
        {
            "steps with": name,
            "mean ms": f"{1000 * row['mean_s']:.1f}",
            "spread ms": f"{1000 * row['spread_s']:.1f}",
            "slowest ms": f"{1000 * row['slowest_s']:.1f}",
            "stood still s": f"{row['blocked_s']:.3f}",
        }
        for name, row in steps["phases"].items()
    ]
    print_table(f"training on {document['device']}", rows)
    rows = [
        {"ratio": name, "value": "-" if value is None else f"{value:.3f}"}
        for name, value in document["ratios"].items()
    ]
    print_table("ratios", rows)


def _row(case: str, seconds: Sequence[float], num_bytes: int) -> dict[str, str]:
    middle = statistics.median(seconds)
    return {
        "contender": case,
        "seconds": f"{middle:.2f}",
        "MiB/s": f"{num_bytes / middle / 2**20:.0f}",
        "spread": f"{min(seconds):.2f}-{max(seconds):.2f}",
    }


if __name__ == "__main__":
    main()
