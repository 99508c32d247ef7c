"""Turns a rank's random number generators into uint8 tensors of fixed size, and back.

Fixed sizes let a reader ask for them without knowing what they hold. No pickle is involved:
the states are packed as little-endian numbers.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "derive_rng", "restore_rng", "seed_rng"]

_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<624II?d")


def capture_rng(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch on CPU, Python, numpy, and of this rank's GPU where it has one."""
    states = {
        "cpu": torch.get_rng_state(),
        "python": _to_tensor(_pack_python()),
        "numpy": _to_tensor(_pack_numpy()),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    _unpack_python(states["python"].numpy().tobytes())
    _unpack_numpy(states["numpy"].numpy().tobytes())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_rng(seed: int) -> None:
    """Seed every generator of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def derive_rng(*, seed: int, rank: int, step: int) -> None:
    """What a rank that has no stored state starts from."""
    digest = hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()
    seed_rng(int.from_bytes(digest[:8], "little") >> 1)


def _to_tensor(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _pack_python() -> bytes:
    _, words, gauss = random.getstate()
    return _PYTHON.pack(*words, gauss is not None, gauss or 0.0)


def _unpack_python(packed: bytes) -> None:
    *words, has_gauss, gauss = _PYTHON.unpack(packed)
    random.setstate((3, tuple(words), gauss if has_gauss else None))


def _pack_numpy() -> bytes:
    state: Any = np.random.get_state(legacy=True)
    _, words, position, has_gauss, gauss = state
    return _NUMPY.pack(*map(int, words), position, bool(has_gauss), gauss)


def _unpack_numpy(packed: bytes) -> None:
    *words, position, has_gauss, gauss = _NUMPY.unpack(packed)
    keys = np.asarray(words, dtype=np.uint32)
    np.random.set_state(("MT19937", keys, position, int(has_gauss), gauss))
