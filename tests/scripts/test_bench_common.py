"""The benchmarks' ruler: what it says of a process is what the process did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench_common import (
    Case,
    Run,
    interleave,
    measure,
    parse_size,
    ratio,
    summarise,
    text_size,
    write_json,
)
from bench_plot import Panel, draw

MIB = 2**20
HOLD = """
data = bytearray(b"x") * (48 << 20)
print("held", flush=True)
input()
"""
HOLD_TWICE = """
import subprocess, sys, time
pipe = subprocess.PIPE
command = [sys.executable, "-c", sys.argv[1]]
children = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(2)]
for child in children:
    child.stdout.readline()
time.sleep(0.5)
for child in children:
    child.communicate(b"enough\\n")
"""
MARKED = """
import sys, time
sys.path.insert(0, "scripts")
time.sleep(0.2)
from bench_common import mark_ready
mark_ready()
time.sleep(0.1)
"""


def run_of(seconds: float, *, startup: float = 0.0, peak: int = 0) -> Run:
    return Run(
        seconds=seconds,
        startup_seconds=startup,
        startup_rss_bytes=0,
        cpu_seconds=0.0,
        peak_rss_bytes=peak,
        read_bytes=0,
        written_bytes=0,
        output_bytes=10,
        stdout="",
    )


def test_memory_is_summed_over_the_process_tree() -> None:
    """Two children that hold 48 MiB each count as more than one of them."""
    run = measure([sys.executable, "-c", HOLD_TWICE, HOLD])
    assert 96 * MIB < run.peak_rss_bytes < 200 * MIB


def test_reads_and_writes_of_children_count(tmp_path: Path) -> None:
    """What a grandchild wrote stands in the sum, and its file in the output."""
    place = tmp_path / "out"
    inner = f"open({str(place)!r}, 'wb').write(bytes(5 << 20))"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    run = measure([sys.executable, "-c", command], outputs=[place])
    assert run.output_bytes == 5 * MIB
    assert 5 * MIB <= run.written_bytes < 6 * MIB


def test_start_up_ends_at_the_mark() -> None:
    """A child says when its imports are done; before that is start-up."""
    run = measure([sys.executable, "-c", MARKED])
    assert 0.2 <= run.startup_seconds <= run.seconds - 0.1
    assert run.startup_rss_bytes > 0


def test_a_command_that_fails_is_no_measurement() -> None:
    """Its last words are in the error."""
    with pytest.raises(RuntimeError, match=r"ended with 3:\n(.|\n)*no such luck"):
        measure([sys.executable, "-c", "import sys; print('no such luck'); sys.exit(3)"])


def test_rounds_alternate_and_clean_up(tmp_path: Path) -> None:
    """Each case runs once a round, the next one first, and cleans up even where it fails."""
    order: list[str] = []

    def case(name: str, code: str = "pass") -> Case:
        return Case(
            name,
            lambda: [sys.executable, "-c", code],
            prepare=lambda: order.append(name),
            clean=lambda: order.append(f"{name} cleaned"),
        )

    runs = interleave([case("a"), case("b")], num_rounds=2)
    assert order[::2] == ["a", "b", "b", "a"]
    assert {name: len(some) for name, some in runs.items()} == {"a": 2, "b": 2}
    with pytest.raises(RuntimeError):
        interleave([case("bad", "raise SystemExit(1)")], num_rounds=1)
    assert order[-1] == "bad cleaned"


def test_start_up_is_taken_off_both_sides() -> None:
    """Ours by a run that only starts, theirs by their own mark; above 1 is faster."""
    ours = summarise("ours", [run_of(1.5), run_of(9.0), run_of(1.4)], startup=run_of(0.5))
    theirs = summarise("theirs", [run_of(7.0, startup=3.0), run_of(5.0, startup=1.0)])
    assert ours.work_seconds == 1.0
    assert theirs.work_seconds == 4.0
    assert ratio(ours, theirs) == 4.0
    assert ratio(ours, None) is None


def test_the_peak_is_the_largest_of_all_runs() -> None:
    """A median would hide a run that went over its bound."""
    runs = [run_of(1, peak=3), run_of(1, peak=9), run_of(1, peak=4)]
    assert summarise("ours", runs).peak_rss_bytes == 9


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2GiB", 2**31), ("256M", 2**28), ("1.5k", 1536), ("77", 77)]
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    """In powers of 1024, whatever the ending."""
    assert parse_size(text) == num_bytes


def test_sizes_are_told() -> None:
    """Bytes that are not known are a dash."""
    assert [text_size(n) for n in (None, 12, 96 * MIB, 9 * 2**28)] == [
        "-",
        "12 B",
        "96 MiB",
        "2.25 GiB",
    ]


def test_the_document_replaces_an_older_one(tmp_path: Path) -> None:
    """In a folder that may not be there yet."""
    place = tmp_path / "new" / "figures.json"
    write_json(place, {"ratios": {"a": None}})
    write_json(place, {"ratios": {"a": 2.0}})
    assert json.loads(place.read_text()) == {"ratios": {"a": 2.0}}
    assert [path.name for path in place.parent.iterdir()] == ["figures.json"]


def test_a_picture_has_a_line_for_each_contender() -> None:
    """And a point for each size; names are escaped."""
    panel = Panel("seconds", {"ours": [1.0, 2.0], "a < b": [3.0, 0.0]})
    picture = draw([panel, panel], labels=["1x", "2x"], title="growth")
    assert picture.count("<polyline") == 4
    assert picture.count("<circle") == 8
    assert "a &lt; b" in picture
