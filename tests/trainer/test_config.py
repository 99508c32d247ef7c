"""A configuration is a file and overrides, and what is wrong in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptool.errors import UnsupportedError, UsageError
from trainer.config_file import load_config, make_config


def test_empty_is_valid() -> None:
    """Every key has a default."""
    assert make_config({}) == load_config(None)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    """``--set`` takes TOML values, and plain words as strings."""
    path = tmp_path / "a.toml"
    path.write_text('[run]\nsteps = 5\nroot = "x"\n[optim]\nlr = 1\n')
    config = load_config(
        str(path),
        overrides=["run.steps=7", "run.root=s3://b/r", "data.paths=['a','b']", "optim.eps=1"],
    )
    assert (config.run.steps, config.run.root) == (7, "s3://b/r")
    assert config.data.paths == ("a", "b")
    assert (config.optim.lr, config.optim.eps) == (1.0, 1.0)


def test_storage_options_take_dotted_keys() -> None:
    """Options of the storage are free, so they are not checked against known names."""
    config = load_config(None, overrides=["checkpoint.storage_options.key=abc"])
    assert config.checkpoint.storage_options == {"key": "abc"}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.step=5", ["unknown config key run.step", "did you mean run.steps?"]),
        ("modle.dim=5", ["unknown config key modle", "did you mean model?"]),
        ("run.steps=abc", ["run.steps takes int", "abc"]),
        ("run.steps=0", ["run.steps is at least 1"]),
        ("run.resume=1", ["run.resume takes bool"]),
        ("parallel.unit=blok", ["parallel.unit is one of block, layer, root"]),
        ("run=5", ["run is a table"]),
        ("run.steps", ["key=value"]),
        ("model.num_heads=7", ["multiple of model.num_heads"]),
    ],
)
def test_what_is_wrong_is_named(override: str, words: list[str]) -> None:
    """A wrong key or value says which, and what would be right."""
    with pytest.raises(UsageError) as caught:
        load_config(None, overrides=[override])
    for word in words:
        assert word in str(caught.value)


def test_pipeline_parallel_is_refused_by_name() -> None:
    """What is not implemented is not accepted."""
    with pytest.raises(UnsupportedError, match="pipeline parallel"):
        make_config({"parallel": {"pp": 2}})


def test_fsdp1_needs_original_parameters() -> None:
    """FSDP1 without use_orig_params loses the names, so it is an error that says so."""
    with pytest.raises(UsageError, match="use_orig_params=True"):
        make_config({"parallel": {"strategy": "fsdp1", "use_orig_params": False}})


def test_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    """A missing file or broken TOML names the file."""
    with pytest.raises(UsageError, match=r"none\.toml"):
        load_config(str(tmp_path / "none.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_config(str(broken))
