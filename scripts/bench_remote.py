"""The comparisons on one S3 server: export and reshard from bucket to bucket.

Time is taken without anything between client and server; requests and bytes are counted in a
run of their own, through a forwarder that sees all that passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench_common import (
    Case,
    Run,
    Summary,
    interleave,
    interleave_with_start,
    measure,
    python,
    ratio,
    remove,
    summarise,
)
from bench_servers import Server, running, s3_tool
from bench_settings import Checkpoint, Settings, ckptool, table_row, torch_tool
from bench_wire import WireMeter

__all__ = ["RemoteFigures", "measure_remote"]

EXPORT = "ckptool export --all"
RESHARD = "ckptool reshard"
CLIENT = "bare client's copy"
SERVER_SIDE = "bare server-side copy"
TORCH_SAVE = "torch.save through fsspec"
LOAD_SAVE = "dcp.load + dcp.save"
VOCAB = 50_257

_START = "start-up"
_MIB = 2**20
_STORE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class RemoteFigures:
    """Summaries by comparison and contender; ``shares`` are those of ckptool's client."""

    server: str
    groups: Mapping[str, Mapping[str, Summary]]
    shares: Mapping[str, float]
    vocab_shares: Mapping[str, float]

    @property
    def export_vs_client(self) -> float:
        found = ratio(self.groups["export"][EXPORT], self.groups["export"][CLIENT])
        assert found is not None
        return found

    @property
    def export_read_amplification(self) -> float:
        ours = self.groups["export"][EXPORT]
        return (ours.read_bytes or 0) / ours.output_bytes

    def tables(self) -> dict[str, Sequence[Mapping[str, str]]]:
        tables: dict[str, Sequence[Mapping[str, str]]] = {
            f"{title}, S3 to S3 on {self.server}": [table_row(s) for s in rows.values()]
            for title, rows in self.groups.items()
        }
        shares = {"dims that 16 divides": self.shares, f"vocabulary of {VOCAB}": self.vocab_shares}
        tables[f"ckptool's share of the bytes on {self.server}"] = [
            {"tensors": kind, **{name: f"{share:.2%}" for name, share in some.items()}}
            for kind, some in shares.items()
            if some
        ]
        return tables

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": {
                title: [s.to_json() for s in rows.values()] for title, rows in self.groups.items()
            },
            "shares": dict(self.shares),
            "vocab_shares": dict(self.vocab_shares),
        }


def measure_remote(settings: Settings, name: str) -> RemoteFigures:
    """Everything on a server that is started for it."""
    groups: dict[str, dict[str, Summary]] = {}
    shares: dict[str, float] = {}
    vocab_shares: dict[str, float] = {}
    settings.say(f"starting {name}")
    with running(
        name, scratch=settings.scratch, store_bytes=max(_STORE_BYTES, 8 * settings.size_bytes)
    ) as server:
        for title, to, made in _jobs(settings, vocab=None):
            with _Place(settings, server, made) as place:
                groups[title] = place.export() if to is None else place.reshard(to)
            shares[title] = _share(groups[title][EXPORT if to is None else RESHARD])
        for title, to, made in () if settings.is_quick else _jobs(settings, vocab=VOCAB):
            with _Place(settings, server, made) as place:
                vocab_shares[title] = _share(place.counted(place.ours(to)))
    return RemoteFigures(name, groups, shares, vocab_shares)


def _jobs(settings: Settings, *, vocab: int | None) -> list[tuple[str, int | None, Checkpoint]]:
    """Title, target of a reshard (None: export), and the checkpoint."""

    def made(num_ranks: int, mib: int) -> Checkpoint:
        moments = 0 if settings.is_quick and mib == 64 else 2
        if vocab:
            return Checkpoint(num_ranks, mib * _MIB, num_params=1, num_moments=0, vocab=vocab)
        return Checkpoint.of_size(
            settings.size_bytes, num_ranks=num_ranks, chunk_bytes=mib * _MIB, num_moments=moments
        )

    jobs = [("export", None, made(8, 4 if settings.is_quick else 16))]
    jobs += [("reshard 8 to 16", 16, made(8, 64))]
    return jobs if settings.is_quick else [*jobs, ("reshard 16 to 4", 4, made(16, 16))]


def _share(summary: Summary) -> float:
    return max(summary.read_bytes or 0, summary.written_bytes or 0) / summary.output_bytes


class _Place:
    """A checkpoint in a bucket of its own, and the contenders that read it."""

    _numbers = itertools.count()

    def __init__(self, settings: Settings, server: Server, made: Checkpoint) -> None:
        self._settings = settings
        self._server = server
        self._folder = settings.scratch / "remote"
        self._local = settings.made(made)
        settings.say("uploading it")
        self._bucket = f"bench-source-{next(self._numbers)}"
        self._source = f"{server.make_bucket(self._bucket)}/run/step-00000012"
        self._target = ""
        s3_tool(server, "upload", str(self._local), self._source)

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.remove_bucket(self._bucket)
        remove(self._folder)

    def export(self) -> dict[str, Summary]:
        cases = [self.ours(None), self._bare(CLIENT, "copy")]
        if not self._settings.is_quick:
            cases.append(self._bare(SERVER_SIDE, "server-copy"))
        idle, runs = self._interleave(cases, self._settings.num_rounds)
        if not self._settings.is_quick:
            cases.append(self._torch(TORCH_SAVE, "to-torch-save", "all.pt"))
            runs |= interleave(cases[-1:], num_rounds=1, say=self._settings.say)
        return self._summaries(cases, idle, runs)

    def reshard(self, to: int) -> dict[str, Summary]:
        """The share is what counts here, so each contender runs once."""
        cases = [self.ours(to)]
        if not self._settings.is_quick:
            stock = self._torch(LOAD_SAVE, "reshard", "resharded", "--ranks", str(to))
            cases += [self._bare(CLIENT, "copy"), self._bare(SERVER_SIDE, "server-copy"), stock]
        idle, runs = self._interleave([] if self._settings.is_quick else cases, 1)
        return self._summaries(cases, idle, runs)

    def ours(self, to: int | None) -> Case:
        if to is None:
            return self._case(
                EXPORT,
                lambda dest: ckptool("export", self._source, f"{dest}/all.safetensors", "--all"),
            )
        return self._case(
            RESHARD,
            lambda dest: ckptool("reshard", self._source, f"{dest}/resharded", "--to", str(to)),
        )

    def counted(self, case: Case, *, start: Run | None = None, runs: Sequence[Run] = ()) -> Summary:
        """A case with what passed on the wire; its times are those of ``runs``, where given."""
        case.prepare()
        try:
            with WireMeter(self._server.endpoint_url) as wire:
                env = self._server.env(endpoint_url=wire.endpoint_url)
                run = measure(case.command(), env=env)
            output_bytes = self._server.num_bytes(self._target)
            if not self._settings.is_quick and case.name in (EXPORT, RESHARD):
                self._check()
        finally:
            case.clean()
        self._settings.say(f"counted: {case.name}")
        summary = summarise(case.name, runs or [run], startup=start, output_bytes=output_bytes)
        return replace(
            summary,
            read_bytes=wire.fetched_bytes,
            written_bytes=wire.sent_bytes,
            requests=dict(wire.requests),
        )

    def _summaries(
        self, cases: Sequence[Case], idle: Run, runs: Mapping[str, Sequence[Run]]
    ) -> dict[str, Summary]:
        return {
            case.name: self.counted(
                case,
                start=idle if case.name.startswith("ckptool") else None,
                runs=runs.get(case.name, ()),
            )
            for case in cases
        }

    def _interleave(
        self, cases: Sequence[Case], num_rounds: int
    ) -> tuple[Run, dict[str, list[Run]]]:
        command = python("scripts/bench_s3.py", "start-up")
        start = Case(_START, lambda: command, env=self._server.env())
        return interleave_with_start(start, cases, num_rounds=num_rounds, say=self._settings.say)

    def _bare(self, name: str, action: str) -> Case:
        def command(dest: str) -> list[str]:
            return python("scripts/bench_s3.py", action, self._source, f"{dest}/copy")

        return self._case(name, command)

    def _torch(self, name: str, action: str, dest_name: str, *more: str) -> Case:
        def command(dest: str) -> list[str]:
            place = f"{dest}/{dest_name}"
            return python("scripts/bench_torch.py", action, self._source, place, *more)

        return self._case(name, command)

    def _case(self, name: str, command: Callable[[str], Sequence[str]]) -> Case:
        return Case(
            name,
            lambda: command(f"s3://{self._target}"),
            env=self._server.env(),
            prepare=self._new_target,
            clean=lambda: self._server.remove_bucket(self._target),
        )

    def _new_target(self) -> None:
        self._target = f"bench-target-{next(self._numbers)}"
        self._server.make_bucket(self._target)

    def _check(self) -> None:
        """What was written holds the same bits as the source, by torch's own readers."""
        result = self._folder / "result"
        try:
            s3_tool(self._server, "download", f"s3://{self._target}", str(result))
            written = next(iter(result.iterdir()))
            torch_tool("same", str(self._local), str(written))
        finally:
            remove(result)
