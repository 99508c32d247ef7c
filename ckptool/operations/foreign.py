"""Names of files -> what a folder is, when it is no sharded (DCP) checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Foreign", "describe_foreign"]


@dataclass(frozen=True, slots=True)
class Foreign:
    """``what`` completes "it holds ..."; ``hint`` says what to do about it."""

    what: str
    hint: str


_TORCH_FILE = re.compile(r"\.(pt|pth|bin|ckpt)$")
_WORLD = re.compile(r"world_size_(\d+)_rank_(\d+)\.(pt|pth|bin)$")
_RANK = re.compile(r"(^|[^a-z])rank[_.-]?\d+|(^|/)\d+\.(pt|pth|bin)$", re.IGNORECASE)
_DEEPSPEED = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt$")
_MEGATRON = re.compile(r"(^|/)mp_rank_\d+(_\d+)*/|(^|/)latest_checkpointed_iteration\.txt$")

_SAVE_SHARDED = (
    "load them on the same number of ranks with the code that wrote them, and save with "
    "torch.distributed.checkpoint"
)


def describe_foreign(keys: Sequence[str]) -> Foreign | None:
    """What a folder with these files is, None where the names tell nothing."""
    for recognise in (_per_rank_files, _deepspeed, _megatron, _safetensors, _torch_files):
        foreign = recognise(keys)
        if foreign is not None:
            return foreign
    return None


def _per_rank_files(keys: Sequence[str]) -> Foreign | None:
    matches = [(k, m) for k in keys if (m := _WORLD.search(k))]
    if not matches:
        return None
    example, match = matches[0]
    what = (
        f"{len(matches)} files that torch.save wrote, one per rank of {match[1]} "
        f"(such as {example}): "
        "ShardedTensors, DTensors or flat parameters, which only those ranks can put together"
    )
    return Foreign(what, _SAVE_SHARDED)


def _deepspeed(keys: Sequence[str]) -> Foreign | None:
    files = _matching(keys, _DEEPSPEED.search)
    if not files:
        return None
    hint = "DeepSpeed's own zero_to_fp32.py makes one file of them"
    return Foreign(f"a DeepSpeed checkpoint ({len(files)} files such as {files[0]})", hint)


def _megatron(keys: Sequence[str]) -> Foreign | None:
    files = _matching(keys, _MEGATRON.search)
    if not files:
        return None
    what = f"a Megatron checkpoint in its legacy form (such as {files[0]})"
    return Foreign(what, "Megatron saves DCP with --ckpt-format torch_dist; convert it there")


def _safetensors(keys: Sequence[str]) -> Foreign | None:
    files = [k for k in keys if k.endswith(".safetensors")]
    if not files:
        return None
    what = f"{_files(files, 'safetensors')}: whole tensors, as Hugging Face keeps a model"
    return Foreign(what, "it needs no conversion: safetensors and transformers open it as it is")


def _torch_files(keys: Sequence[str]) -> Foreign | None:
    files = _matching(keys, _TORCH_FILE.search)
    if not files:
        return None
    if len(files) > 1 and all(_RANK.search(f) for f in files):
        what = (
            f"{_files(files, 'torch.save')}, one per rank: each has only what its rank held, "
            "so each is incomplete where the model was sharded"
        )
        return Foreign(what, _SAVE_SHARDED)
    return Foreign(_files(files, "torch.save"), "torch.load opens them; they are not sharded")


def _files(files: Sequence[str], kind: str) -> str:
    noun = "file" if len(files) == 1 else "files"
    return f"{len(files)} {kind} {noun} (such as {files[0]})"


def _matching(keys: Sequence[str], test: Callable[[str], object]) -> list[str]:
    return [k for k in keys if test(k)]
