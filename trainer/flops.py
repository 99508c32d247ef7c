"""Turns a model's sizes and a device's name into floating-point work per token and per second."""

from __future__ import annotations

import torch

from trainer.config import ModelConfig

__all__ = ["flops_per_token", "peak_flops"]

# Dense bf16 products a second, from the vendors' data sheets.
_PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def flops_per_token(config: ModelConfig, *, num_parameters: int, seq_len: int) -> float:
    """6 a parameter that multiplies (an untied embedding only looks up), and attention's own
    12 * layers * width * length, halved because it is causal; recomputation is not counted."""
    lookup = 0 if config.tied else config.vocab_size * config.dim
    attention = 6 * config.num_layers * config.dim * seq_len
    return 6.0 * (num_parameters - lookup) + attention


def peak_flops(device: torch.device) -> float | None:
    """Of one device, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAKS.items() if key in name), None)
