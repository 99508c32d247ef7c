"""Turns a TOML file and ``--set a.b=value`` overrides into one frozen Config.

A key that is not known is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptool.errors import UnsupportedError, UsageError
from trainer.config import CHOICES, Config

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["load_config", "make_config"]


def load_config(path: str | None, *, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: only defaults) and apply ``key=value`` overrides on top."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read the config {path}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    return make_config(tree)


def make_config(tree: Mapping[str, Any]) -> Config:
    """A Config of nested mappings, checked; raises UsageError naming the key."""
    config = typing.cast("Config", _build(Config, tree, prefix=""))
    _check(config)
    return config


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set takes key=value, not {override!r}", hint="e.g. --set run.steps=50")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UsageError(f"--set {key}: {parent} is a value, not a table")
    tree[leaf] = value


def _build(kind: type, tree: Mapping[str, Any], *, prefix: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    unknown = [name for name in tree if name not in names]
    if unknown:
        raise UsageError(f"unknown config key {prefix}{unknown[0]}", hint=_nearest(unknown[0]))
    return kind(**{name: _value(hints[name], tree[name], key=prefix + name) for name in tree})


def _nearest(name: str) -> str:
    known = [
        f"{section.name}.{item.name}"
        for section in dataclasses.fields(Config)
        for item in dataclasses.fields(typing.get_type_hints(Config)[section.name])
    ]
    sections = [item.name for item in dataclasses.fields(Config)]
    close = difflib.get_close_matches(name, sections, 1, 0.75)
    leaves = {key.split(".")[1]: key for key in reversed(known)}
    close += [leaves[leaf] for leaf in difflib.get_close_matches(name, leaves, 1, 0.5)]
    return f"did you mean {close[0]}?" if close else f"the tables are {', '.join(sections)}"


def _value(kind: Any, value: Any, *, key: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise UsageError(f"config key {key} is a table, not {value!r}")
        return _build(typing.cast("type", kind), value, prefix=f"{key}.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UsageError(f"config key {key} takes a list of strings, not {value!r}")
    if typing.get_origin(kind) is not None:
        if isinstance(value, Mapping):
            return dict(value)
        raise UsageError(f"config key {key} is a table, not {value!r}")
    if type(value) is not kind:
        raise UsageError(f"config key {key} takes {kind.__name__}, not {value!r}")
    choices = CHOICES.get(key)
    if choices and value not in choices:
        raise UsageError(f"config key {key} is one of {', '.join(choices)}, not {value!r}")
    return value


def _check(config: Config) -> None:
    parallel = config.parallel
    if parallel.pp != 1:
        raise UnsupportedError(
            "pipeline parallel (parallel.pp) is not implemented in the trainer",
            hint="use parallel.tp and parallel.dp_shard; ckptool reads pipeline checkpoints",
        )
    if parallel.strategy == "fsdp1" and not parallel.use_orig_params:
        raise UsageError(
            "FSDP1 without use_orig_params=True flattens the parameters and loses their names",
            hint="leave parallel.use_orig_params at true",
        )
    for key, value, least in (
        ("run.steps", config.run.steps, 1),
        ("run.log_every", config.run.log_every, 1),
        ("data.seq_len", config.data.seq_len, 2),
        ("data.global_batch", config.data.global_batch, 1),
        ("data.bpe_vocab_size", config.data.bpe_vocab_size, 257),
        ("model.num_layers", config.model.num_layers, 1),
        ("checkpoint.every", config.checkpoint.every, 0),
        ("checkpoint.export_every", config.checkpoint.export_every, 0),
        ("parallel.tp", parallel.tp, 1),
        ("parallel.dp_replicate", parallel.dp_replicate, 1),
        ("parallel.dp_shard", parallel.dp_shard, 0),
    ):
        if value < least:
            raise UsageError(f"config key {key} is at least {least}, not {value}")
    if (
        config.model.dim % config.model.num_heads
        or (config.model.dim // config.model.num_heads) % 2
    ):
        raise UsageError("model.dim must be an even multiple of model.num_heads")
