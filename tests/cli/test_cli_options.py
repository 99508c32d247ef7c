"""How the texts of options are read."""

from __future__ import annotations

import click
import pytest

from ckptool.cli.options import parse_size, parse_storage_options
from ckptool.cli.output import error_code
from ckptool.cli.rename import read_renames
from ckptool.cli.text import size, table
from ckptool.errors import (
    AccessError,
    CkptoolError,
    DamagedError,
    InterruptedByUser,
    NoCheckpointError,
    NotEmptyError,
    OverBudgetError,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("256MiB", 256 << 20),
        ("256mib", 256 << 20),
        ("1GB", 10**9),
        ("5 GB", 5 * 10**9),
        ("1.5GiB", 3 << 29),
        ("64K", 64 << 10),
        ("2Gi", 2 << 30),
        ("1KB", 1000),
        ("3B", 3),
    ],
)
def test_sizes(text, num_bytes):
    """KB counts in thousands, KiB and K in 1024."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.2.3GB", "5 parsecs", "0", "1e6", "\u0663"])
def test_what_is_no_size(text):
    """Anything else is refused, never guessed."""
    with pytest.raises(ValueError):
        parse_size(text)


def test_storage_options():
    """Values are JSON where they parse; credentials stay text; = may stand in a value."""
    pairs = [
        "endpoint_url=http://127.0.0.1:9000", "anon=true", "max_pool_connections=4",
        'client_kwargs={"region_name": "x"}', "key=0123", "secret=123456", "token=a=b=", "x=NaN",
    ]  # fmt: skip
    assert parse_storage_options(pairs, name="--storage-option") == {
        "endpoint_url": "http://127.0.0.1:9000",
        "anon": True,
        "max_pool_connections": 4,
        "client_kwargs": {"region_name": "x"},
        "key": "0123",
        "secret": "123456",
        "token": "a=b=",
        "x": "NaN",
    }


def test_a_storage_option_without_value_shows_no_secret():
    """What is called wrong is named by its key alone."""
    with pytest.raises(click.UsageError, match="KEY=VALUE"):
        parse_storage_options(["=hunter2"], name="--storage-option")
    with pytest.raises(click.UsageError) as caught:
        parse_storage_options(["=hunter2"], name="--storage-option")
    assert "hunter2" not in caught.value.format_message()


@pytest.mark.parametrize(
    "text", ['{"a.b": "c", "d": "e"}', "a.b c\n# a comment\n\nd   e\n", ' \n{"a.b":"c","d":"e"}']
)
def test_renames(tmp_path, text):
    """A JSON object, or lines of old and new."""
    path = tmp_path / "names"
    path.write_text(text)
    assert read_renames(str(path)) == {"a.b": "c", "d": "e"}


@pytest.mark.parametrize("text", ['{"a": 1}', "{", "a b c", "a", "a b\na c"])
def test_broken_rename_files(tmp_path, text):
    """Each is a usage error that names the file."""
    path = tmp_path / "names"
    path.write_text(text)
    with pytest.raises(click.UsageError, match="names"):
        read_renames(str(path))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CkptoolError, "unexpected"),
        (DamagedError, "damaged"),
        (NoCheckpointError, "no-checkpoint"),
        (NotEmptyError, "not-empty"),
        (OverBudgetError, "over-budget"),
        (AccessError, "access"),
        (InterruptedByUser, "interrupted"),
    ],
)
def test_error_codes(error, code):
    """Each kind of error has a stable word in JSON."""
    assert error_code(error("x")) == code


def test_text():
    """Sizes in binary units; numbers in tables stand to the right."""
    assert [size(n) for n in (0, 1023, 1024, 5 << 30, None)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 GiB", "?",
    ]  # fmt: skip
    assert list(table(["A", "N"], [["x", 1], ["yy", 20]])) == ["A    N", "x    1", "yy  20"]
