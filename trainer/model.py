"""Turns token ids into logits: a decoder-only transformer named like Hugging Face's Llama.

The parameter names are those of ``LlamaForCausalLM``, so an exported checkpoint loads there.
The rotary tables are non-persistent buffers: computed, never stored and never loaded.

Shape suffixes: B batch, L sequence, D model width, H heads, K key/value heads, E width of a
head, F hidden width, V vocabulary. Under tensor parallelism H, K, F are this rank's share.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ckptool.errors import UsageError
from trainer.config import DataConfig, ModelConfig

__all__ = [
    "Attention",
    "Block",
    "FeedForward",
    "Rotary",
    "Transformer",
    "complete_model_config",
    "hf_config",
]


def complete_model_config(
    model: ModelConfig, data: DataConfig, *, tokenizer_vocab_size: int
) -> ModelConfig:
    """Fill the sizes that say 0."""
    ffn_dim = model.ffn_dim or (8 * model.dim // 3 + 63) // 64 * 64
    vocab_size = model.vocab_size or tokenizer_vocab_size
    if vocab_size < tokenizer_vocab_size:
        raise UsageError(
            f"model.vocab_size {vocab_size} is less than the tokenizer's {tokenizer_vocab_size}"
        )
    num_kv_heads = model.num_kv_heads or model.num_heads
    if model.num_heads % num_kv_heads:
        raise UsageError("model.num_heads must be a multiple of model.num_kv_heads")
    max_seq_len = model.max_seq_len or data.seq_len
    if max_seq_len < data.seq_len:
        raise UsageError(
            f"model.max_seq_len {max_seq_len} is less than data.seq_len {data.seq_len}"
        )
    return ModelConfig(
        vocab_size=vocab_size,
        dim=model.dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=num_kv_heads,
        ffn_dim=ffn_dim,
        max_seq_len=max_seq_len,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        tied=model.tied,
    )


def hf_config(config: ModelConfig) -> dict[str, object]:
    """The ``config.json`` that ``transformers`` needs beside an exported checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_seq_len,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
    }


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self, x_BLD: torch.Tensor, cos_LE: torch.Tensor, sin_LE: torch.Tensor
    ) -> torch.Tensor:
        batch, length, _ = x_BLD.shape
        shape = (batch, length, -1, self.head_dim)
        q_BHLE = self.q_proj(x_BLD).view(shape).transpose(1, 2)
        k_BKLE = self.k_proj(x_BLD).view(shape).transpose(1, 2)
        v_BKLE = self.v_proj(x_BLD).view(shape).transpose(1, 2)
        q_BHLE, k_BKLE = _rotate(q_BHLE, cos_LE, sin_LE), _rotate(k_BKLE, cos_LE, sin_LE)
        groups = q_BHLE.shape[1] // k_BKLE.shape[1]
        if groups > 1:
            k_BKLE = k_BKLE.repeat_interleave(groups, dim=1)
            v_BKLE = v_BKLE.repeat_interleave(groups, dim=1)
        out_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=True)
        return self.o_proj(out_BHLE.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        hidden_BLF = F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD)
        return self.down_proj(hidden_BLF)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then the feed-forward network, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_BLD: torch.Tensor, cos_LE: torch.Tensor, sin_LE: torch.Tensor
    ) -> torch.Tensor:
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), cos_LE, sin_LE)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD))  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """Tables of rotary angles, computed from the configuration alone."""

    cos_LE: torch.Tensor
    sin_LE: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.max_seq_len = config.max_seq_len
        self.theta = config.rope_theta
        shape = (config.max_seq_len, self.head_dim)
        self.register_buffer("cos_LE", torch.empty(shape), persistent=False)
        self.register_buffer("sin_LE", torch.empty(shape), persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the tables on ``device``; needed after a start on the meta device."""
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        positions = torch.arange(self.max_seq_len, dtype=torch.float64)
        angles = torch.outer(positions, self.theta**-powers)
        angles = torch.cat([angles, angles], dim=1)
        self.cos_LE = angles.cos().float().to(device)
        self.sin_LE = angles.sin().float().to(device)

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos_LE[:length], self.sin_LE[:length]


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: everything but the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.rotary = Rotary(config)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        cos_LE, sin_LE = self.rotary(tokens_BL.shape[1])
        x_BLD = self.embed_tokens(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos_LE, sin_LE)
        return self.norm(x_BLD)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Token ids in, logits out. With a tied head there is no ``lm_head`` parameter at all."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        x_BLD = self.model(tokens_BL)
        if self.lm_head is not None:
            return self.lm_head(x_BLD)  # type: ignore[no-any-return]
        return _tied_head(x_BLD, self.model.embed_tokens.weight)


def _tied_head(x_BLD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    if not isinstance(weight_VD, DTensor):
        return F.linear(x_BLD, weight_VD)
    mesh = weight_VD.device_mesh
    whole = DTensor.from_local(x_BLD, mesh, [Replicate()])
    logits: Any = F.linear(whole, weight_VD)
    return cast("torch.Tensor", logits.redistribute(mesh, [Replicate()]).to_local())


def _rotate(x_BHLE: torch.Tensor, cos_LE: torch.Tensor, sin_LE: torch.Tensor) -> torch.Tensor:
    first, second = x_BHLE.chunk(2, dim=-1)
    cos_LE, sin_LE = cos_LE.to(x_BHLE.dtype), sin_LE.to(x_BHLE.dtype)
    return x_BHLE * cos_LE + torch.cat([-second, first], dim=-1) * sin_LE
