"""Which entries an export takes, and under which names. Pure.

By default the model: what is left when optimizer state, RNG, schedules, counters and values
are taken away, without the one parent that the rest has in common. Where the rest has several
parents the choice is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptool.errors import RefusedError, UsageError
from ckptool.model import Entry, Index, Path, TensorEntry

__all__ = ["Choice", "choose", "is_optimizer_key", "matches", "without_wrappers"]

_MOMENTS = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "grad_avg", "acc_delta", "sum", "step", "step_size", "prev", "mu_product", "ax", "eta", "mu",
    "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "previous_grad",
}  # fmt: skip
_COUNTERS = {
    "step", "steps", "global_step", "it", "iter", "iteration", "epoch", "tokens", "tokens_seen",
    "num_tokens", "ntokens_seen", "data", "dataloader", "train_state",
}  # fmt: skip
_SCHEDULES = {
    "sched",
    "scheduler",
    "schedulers",
    "lr_scheduler",
    "lr_schedulers",
    "scaler",
    "grad_scaler",
}
_MODELS = {"model", "module", "models", "model_state", "model_state_dict", "state_dict", "net"}
_RNG = re.compile(r"^(.*_)?rng(_states?)?$")
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What is exported: ``names`` maps source keys to names in the output, in index order.

    ``paths`` places an entry in a nested file. ``left_out`` maps the keys that are not taken to
    the reason; ``prefix`` is what was stripped by default, ``renamed`` counts wrapper names.
    """

    names: Mapping[str, str]
    paths: Mapping[str, Path]
    left_out: Mapping[str, str]
    prefix: str = ""
    renamed: int = 0


def choose(
    index: Index,
    *,
    everything: bool,
    only: Sequence[str],
    exclude: Sequence[str],
    strip_prefix: str | None,
    rename: Mapping[str, str] | None,
) -> Choice:
    """Choose entries and names; raises RefusedError where the choice is ambiguous.

    Also raises UsageError for a pattern or an old name that matches nothing, and for two
    entries that would get one name.
    """
    left_out: dict[str, str] = {}
    keys = _selected(index, only, left_out) if only else list(index.entries)
    by_default = not (everything or only)
    if by_default:
        keys = _model_keys(index, keys, left_out)
    keys = _excluded(keys, exclude, left_out)
    depth, prefix = (0, "")
    if by_default:
        keys, depth, prefix = _parent(index, keys, left_out)
    names, paths, renamed = {}, {}, 0
    for key in keys:
        entry = index.entries[key]
        path = entry.path if entry.path is not None else (key,)
        name, path = (
            key[len(prefix) :],
            path[depth:] if entry.path is not None else (key[len(prefix) :],),
        )
        if by_default and without_wrappers(name) != name:
            name, renamed = without_wrappers(name), renamed + 1
            path = (name,)
        if strip_prefix and name.startswith(strip_prefix):
            name = name[len(strip_prefix) :]
            path = (name,)
        names[key], paths[key] = name, path
    _rename(names, paths, rename or {})
    _refuse_collisions(names)
    if not names:
        raise RefusedError(
            "nothing is left to export",
            hint="ckptool inspect --tensors lists the entries; choose with --only or --all",
        )
    return Choice(names, paths, left_out, prefix, renamed)


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether a key matches one of the glob patterns; ``.`` is an ordinary character."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def without_wrappers(name: str) -> str:
    """A name without what torch.compile, checkpointing and FSDP wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_optimizer_key(entry: Entry) -> bool:
    """Whether a key is ``*.state.<fqn>.<moment>`` or belongs to ``param_groups``."""
    parts = _parts(entry)
    if "param_groups" in parts:
        return True
    return "state" in parts[:-2] and parts[-1] in _MOMENTS


def _parts(entry: Entry) -> list[str]:
    return entry.key.split(".")


def _selected(index: Index, only: Sequence[str], left_out: dict[str, str]) -> list[str]:
    for pattern in only:
        if not any(fnmatchcase(key, pattern) for key in index.entries):
            raise UsageError(
                f"--only {pattern}: no entry matches",
                hint="ckptool inspect --tensors lists the entries",
            )
    for key in index.entries:
        if not matches(key, only):
            left_out[key] = "not in --only"
    return [key for key in index.entries if matches(key, only)]


def _excluded(keys: list[str], exclude: Sequence[str], left_out: dict[str, str]) -> list[str]:
    for key in keys:
        if matches(key, exclude):
            left_out[key] = "excluded"
    return [key for key in keys if not matches(key, exclude)]


def _model_keys(index: Index, keys: list[str], left_out: dict[str, str]) -> list[str]:
    optimizers = _optimizer_roots(index)
    for key in keys:
        reason = _why_no_model(index.entries[key], optimizers)
        if reason is not None:
            left_out[key] = reason
    return [key for key in keys if key not in left_out]


def _optimizer_roots(index: Index) -> set[str]:
    """Parents that hold both ``state`` and ``param_groups``, whatever their moments' names."""
    groups = {k.split("param_groups")[0] for k in index.entries if "param_groups" in k.split(".")}
    return {root + "state." for root in groups}


def _why_no_model(entry: Entry, optimizers: set[str]) -> str | None:
    parts = _parts(entry)
    if is_optimizer_key(entry) or any(entry.key.startswith(root) for root in optimizers):
        return "optimizer state"
    if any(_RNG.match(part) for part in parts):
        return "random state"
    top = str(entry.path[0]) if entry.path else parts[0]
    if top in _SCHEDULES:
        return "schedule"
    if top in _COUNTERS:
        return "counter"
    return None if isinstance(entry, TensorEntry) else "value"


def _parent(index: Index, keys: list[str], left_out: dict[str, str]) -> tuple[list[str], int, str]:
    """The one parent of what is left: (keys, its depth in a path, the prefix of its names)."""
    while True:
        parents = {_container(index.entries[key]): None for key in keys}
        named = [parent for parent in parents if parent is not None]
        if len(named) > 1:
            _refuse_ambiguity([str(parent) for parent in named])
        if not named:
            return keys, 0, ""
        if len(parents) == 1:
            return keys, *_common(index, keys)
        if named[0] not in _MODELS:
            _refuse_ambiguity([f"{named[0]}.*", *(k for k in keys if _is_stray(index, k))][:5])
        for key in keys:
            if _is_stray(index, key):
                left_out[key] = f"not in {named[0]}"
        keys = [key for key in keys if not _is_stray(index, key)]


def _container(entry: Entry) -> str | None:
    """The outermost mapping that an entry stood in; None for one that stood at the top."""
    if entry.path is not None:
        return str(entry.path[0]) if len(entry.path) > 1 else None
    first, _, rest = entry.key.partition(".")
    return first if rest and first in _MODELS else None


def _is_stray(index: Index, key: str) -> bool:
    return _container(index.entries[key]) is None


def _common(index: Index, keys: list[str]) -> tuple[int, str]:
    paths = [index.entries[key].path for key in keys]
    if any(path is None for path in paths):
        return 0, keys[0].partition(".")[0] + "."
    first = [path for path in paths if path is not None]
    depth = 1
    while all(len(path) > depth + 1 and path[depth] == first[0][depth] for path in first):
        if str(first[0][depth - 1]) in _MODELS:
            break
        depth += 1
    return depth, ".".join(str(part) for part in first[0][:depth]) + "."


def _refuse_ambiguity(parents: list[str]) -> None:
    raise RefusedError(
        f"what to export is ambiguous: besides training state there are {', '.join(parents)}",
        hint=f"choose with --only, for instance --only '{parents[0].rstrip('.*')}.*', or --all",
        parents=parents,
    )


def _rename(names: dict[str, str], paths: dict[str, Path], rename: Mapping[str, str]) -> None:
    """Apply old -> new, where old is a name in the output or the source key."""
    for old, new in rename.items():
        keys = [key for key, name in names.items() if name == old] or [
            key for key in names if key == old
        ]
        if not keys:
            raise UsageError(
                f"--rename: no entry has the name {old!r}",
                hint="names are those of the output; --dry-run prints them",
            )
        for key in keys:
            names[key], paths[key] = new, (new,)


def _refuse_collisions(names: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for key, name in names.items():
        if name in seen:
            raise UsageError(
                f"{seen[name]} and {key} would both be named {name!r}",
                hint="change --strip-prefix or --rename, or leave one out with --exclude",
            )
        seen[name] = key
