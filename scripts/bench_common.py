"""Commands -> what they took: time to fsync, CPU, peak memory of the process tree, I/O.

What the benchmarks share. The benchmark's own process stays small: everything that is measured,
and everything that needs torch, runs in a child.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT",
    "Case",
    "Run",
    "Summary",
    "fsync_tree",
    "interleave",
    "interleave_with_start",
    "machine",
    "mark_ready",
    "measure",
    "parse_size",
    "print_table",
    "python",
    "quickest",
    "ratio",
    "remove",
    "summarise",
    "text_size",
    "tree_num_bytes",
    "write_json",
]

ROOT = Path(__file__).resolve().parents[1]

_READY = "BENCH_READY"
_SAMPLE_S = 0.01
_RESCAN_S = 0.1
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class Run:
    """One child process, from its start to the fsync of what it wrote.

    ``startup_seconds`` and ``startup_rss_bytes`` are where the child called ``mark_ready``, 0
    where it never did. ``read_bytes`` and ``written_bytes`` are those of read and write calls,
    modules that were imported included; sockets do not count there.
    """

    seconds: float
    startup_seconds: float
    startup_rss_bytes: int
    cpu_seconds: float
    peak_rss_bytes: int
    read_bytes: int
    written_bytes: int
    output_bytes: int
    stdout: str


@dataclass(frozen=True)
class Case:
    """One contender of a comparison: ``prepare`` and ``clean`` are not timed.

    ``command`` is made for each run, since it may name a fresh destination.
    """

    name: str
    command: Callable[[], Sequence[str]]
    outputs: Callable[[], Sequence[Path]] = lambda: ()
    env: Mapping[str, str] | None = None
    prepare: Callable[[], None] = lambda: None
    clean: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Summary:
    """The medians of a case's runs; ``work_seconds`` is without the start-up."""

    name: str
    work_seconds: float
    startup_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    read_bytes: int | None
    written_bytes: int | None
    output_bytes: int
    each_seconds: Sequence[float]
    requests: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def python(*arguments: str) -> list[str]:
    """A command line of this interpreter."""
    return [sys.executable, *arguments]


def mark_ready() -> None:
    """Called by a child: imports are done, here the work begins."""
    place = os.environ.get(_READY)
    if place:
        facts = {"time": time.monotonic(), "rss_bytes": _memory(os.getpid())[0]}
        Path(place).write_text(json.dumps(facts))


def measure(
    command: Sequence[str],
    *,
    outputs: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> Run:
    """Run a command to its end and to the fsync of ``outputs`` (files or folders).

    Raises RuntimeError with the end of its output when it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch, "ready")
        with open(Path(scratch, "out"), "wb") as out, open(Path(scratch, "err"), "wb") as err:
            start = time.monotonic()
            child = subprocess.Popen(
                command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, **_child_env(), **(env or {}), _READY: str(ready)},
            )  # fmt: skip
            try:
                watched = _Watched(child.pid)
                watched.until_end()
                read_bytes, written_bytes = _io(child.pid)
                _, status, usage = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
            finally:
                if child.returncode is None:
                    child.kill()
                    child.wait()
            for path in outputs:
                fsync_tree(path)
            seconds = time.monotonic() - start
        stdout = Path(scratch, "out").read_text(errors="replace")
        if child.returncode:
            said = (stdout + Path(scratch, "err").read_text(errors="replace"))[-4000:]
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{said}")
        mark = json.loads(ready.read_text()) if ready.exists() else None
    return Run(
        seconds=seconds,
        startup_seconds=mark["time"] - start if mark else 0.0,
        startup_rss_bytes=mark["rss_bytes"] if mark else 0,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=watched.peak_bytes,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        output_bytes=sum(map(tree_num_bytes, outputs)),
        stdout=stdout,
    )


def interleave(
    cases: Sequence[Case], *, num_rounds: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, list[Run]]:
    """Every case once, then every case again, so that all see the same weather.

    Each round begins with another case.
    """
    runs: dict[str, list[Run]] = {case.name: [] for case in cases}
    for number in range(num_rounds):
        shift = number % len(cases)
        for case in [*cases[shift:], *cases[:shift]]:
            case.prepare()
            try:
                run = measure(case.command(), outputs=case.outputs(), env=case.env)
            finally:
                case.clean()
            runs[case.name].append(run)
            say(f"round {number + 1} of {num_rounds}: {case.name}: {run.seconds:.2f} s")
    return runs


def summarise(
    name: str, runs: Sequence[Run], *, startup: Run | None = None, output_bytes: int | None = None
) -> Summary:
    """Medians; ``startup`` is a run that does nothing but start, for a command without a mark.

    The peak is the largest of all runs.
    """
    starts = [startup.seconds if startup else run.startup_seconds for run in runs]
    work = [run.seconds - start for run, start in zip(runs, starts, strict=True)]
    idle_bytes = startup.read_bytes if startup else 0
    middle = statistics.median
    return Summary(
        name=name,
        work_seconds=middle(work),
        startup_seconds=middle(starts),
        cpu_seconds=middle(run.cpu_seconds for run in runs),
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        read_bytes=int(middle(run.read_bytes - idle_bytes for run in runs)),
        written_bytes=int(middle(run.written_bytes for run in runs)),
        output_bytes=int(output_bytes or middle(run.output_bytes for run in runs)),
        each_seconds=work,
    )


def quickest(runs: Sequence[Run]) -> Run:
    """Of start-ups the one to take off: no more than starting takes at least."""
    return min(runs, key=lambda run: run.seconds)


def interleave_with_start(
    start: Case,
    cases: Sequence[Case],
    *,
    num_rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Run, dict[str, list[Run]]]:
    """The quickest of at least three runs of ``start``, and those of the other cases."""
    runs = interleave([start, *cases], num_rounds=num_rounds, say=say)
    starts = runs.pop(start.name)
    starts += interleave([start], num_rounds=max(0, 3 - num_rounds))[start.name]
    return quickest(starts), runs


def ratio(ours: Summary | None, theirs: Summary | None) -> float | None:
    """Our speed / theirs: above 1 when we are faster."""
    if ours is None or theirs is None:
        return None
    return theirs.work_seconds / ours.work_seconds


def fsync_tree(path: Path) -> None:
    """What lies at a path is on the disk when this returns."""
    for place in [path, *(path.rglob("*") if path.is_dir() else ())]:
        fd = os.open(place, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def tree_num_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    places = path.rglob("*") if path.is_dir() else [path]
    return sum(place.stat().st_size for place in places if place.is_file())


def remove(path: Path) -> None:
    """A file or a folder that may not be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    """Where and on what the figures were measured."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "commit": said.stdout.strip() or None,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """One document, replaced whole."""
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_name(place.name + ".new")
    new.write_text(json.dumps(document, indent=2) + "\n")
    new.replace(place)


def print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Columns as wide as they need; the first is left-aligned."""
    print(f"\n{title}")
    if not rows:
        print("  nothing was measured")
        return
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in [dict.fromkeys(names, ""), *rows]:
        cells = row if any(row.values()) else {name: name for name in names}
        first, *rest = names
        line = [cells[first].ljust(widths[first]), *(cells[n].rjust(widths[n]) for n in rest)]
        print("  " + "  ".join(line).rstrip())
    sys.stdout.flush()


def text_size(num_bytes: float | None) -> str:
    """Bytes for people."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit in ("B", "MiB") else f"{num_bytes:.2f} {unit}"


def parse_size(text: str) -> int:
    """``2GiB``, ``256M``, ``4096``: bytes, in powers of 1024."""
    digits = text.strip().rstrip("iIbB")
    number, unit = (digits[:-1], digits[-1]) if digits[-1:].isalpha() else (digits, "")
    return int(float(number) * _UNITS[unit.lower()])


class _Watched:
    """The memory of a child and its descendants, sampled until it ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pids = [pid]
        self.peak_bytes = 0

    def until_end(self) -> None:
        next_scan = 0.0
        while os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            now = time.monotonic()
            if now >= next_scan:
                self._pids = _descendants(self._pid)
                next_scan = now + _RESCAN_S
            sizes = [_memory(pid) for pid in self._pids]
            # A single process cannot hide its peak between two samples.
            seen = [sum(rss for rss, _ in sizes), *(peak for _, peak in sizes)]
            self.peak_bytes = max(self.peak_bytes, *seen)
            time.sleep(_SAMPLE_S)


def _child_env() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue
    return found


def _memory(pid: int) -> tuple[int, int]:
    """Resident bytes now, and at their highest since the program was started."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split() for line in file if line.startswith(("VmRSS:", "VmHWM:"))]
    except OSError:
        return 0, 0
    sizes = {line[0]: int(line[1]) * 1024 for line in lines}
    return sizes.get("VmRSS:", 0), sizes.get("VmHWM:", 0)


def _io(pid: int) -> tuple[int, int]:
    """Bytes of the read and write calls of a child that has ended and was not waited for."""
    with open(f"/proc/{pid}/io") as file:
        counts = {name: int(value) for name, value in (line.split(": ") for line in file)}
    return counts["rchar"], counts["wchar"]
