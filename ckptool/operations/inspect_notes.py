"""Entries -> their group, and what is odd about them in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ckptool.model import Entry, TensorEntry

__all__ = ["group_of", "notes_on"]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_OPTIMIZER = ("optim", "optimizer", "optimizers", "optim_state")
_FLAT_ELEMENTS = 1 << 20


def group_of(entry: Entry) -> str:
    """``model``, ``optimizer``, ``rng`` or ``other`` for a tensor or a value, by its key."""
    names = _segments(entry)
    first = names[0] if names else ""
    if any(n in _OPTIMIZER for n in names[:2]) or "param_groups" in names or first == "state":
        return "optimizer"
    if first.startswith("rng") or "rng_state" in names:
        return "rng"
    return "model" if isinstance(entry, TensorEntry) else "other"


def notes_on(entries: Sequence[Entry]) -> Iterator[str]:
    """What a person should know of these entries before using them."""
    tensors = [e for e in entries if isinstance(e, TensorEntry)]
    for wrapper in WRAPPERS:
        keys = [e.key for e in entries if wrapper in e.key.split(".")]
        if keys:
            yield f"{_some(keys)} with the wrapper's name {wrapper} in the key"
    yield from _oversized(tensors)
    yield from _flat(tensors)
    ids = [e.key for e in entries if _has_int_id(e)]
    if ids:
        yield (
            f"{_some(ids)} with a number for a parameter: such an id is its place in one "
            "program's list, not a name"
        )


def _oversized(tensors: Sequence[TensorEntry]) -> Iterator[str]:
    """Items that are much larger than their chunk: a slice that dragged its storage along."""
    keys, extra = [], 0
    for tensor in tensors:
        chunks = tensor.chunks
        need = chunks.sizes.prod(axis=1) * tensor.dtype.itemsize
        over = np.where(chunks.file >= 0, chunks.lengths - need, 0)
        large = over > np.maximum(need, 64 << 10)
        if large.any():
            keys.append(tensor.key)
            extra += int(over[large].sum())
    if keys:
        yield f"{_some(keys)} stored with {extra} bytes more than the tensor has"


def _flat(tensors: Sequence[TensorEntry]) -> Iterator[str]:
    """Weights that FSDP1 flattened: their names and shapes are lost."""
    weights = [t for t in tensors if group_of(t) == "model"]
    keys = [t.key for t in weights if _is_flat(t)]
    if not keys and weights and all(len(t.shape) < 2 for t in weights):
        keys = [t.key for t in weights if t.shape and t.num_elements > 1]
    if keys:
        yield (
            f"{_some(keys)} of one dim where a weight is expected: flattened by FSDP without "
            "use_orig_params=True? Then shapes and names are lost"
        )


def _is_flat(tensor: TensorEntry) -> bool:
    if len(tensor.shape) != 1:
        return False
    return "flat_param" in tensor.key or tensor.num_elements >= _FLAT_ELEMENTS


def _has_int_id(entry: Entry) -> bool:
    names = _segments(entry)
    follows = any(a == "state" and b.isdigit() for a, b in pairwise(names))
    return follows and group_of(entry) == "optimizer"


def _segments(entry: Entry) -> list[str]:
    return entry.key.split(".") if entry.path is None else [str(p) for p in entry.path]


def _some(keys: Sequence[str]) -> str:
    noun = "entry" if len(keys) == 1 else "entries"
    return f"{len(keys)} {noun} (such as {keys[0]!r})"
