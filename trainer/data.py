"""Turns text files into training samples in an order that no world size changes.

The corpus is one long array of tokens, cut into samples of ``seq_len`` tokens and the one that
follows. A sample's *position* counts from the start of the run: position p is the p-th sample
that the run sees, and which one that is depends on the seed and p alone (each epoch is a
seeded permutation, computed number by number, so nothing is kept). A step takes the next
``global_batch`` positions and each data rank a contiguous share of them, so the state of the
data is one number, and no sample is repeated or skipped when the number of ranks changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckptool.errors import RefusedError, UsageError
from trainer.config import DataConfig
from trainer.tokenizer import ByteTokenizer, PairTokenizer, Tokenizer, train_pairs

__all__ = ["Corpus", "DataStream", "load_corpus", "sample_at"]

_PAIR_SAMPLE_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """All tokens of the text; ``digest`` names their content."""

    tokens: NDArray[np.uint16]
    tokenizer: Tokenizer
    digest: str


class DataStream:
    """The samples of one data rank, step by step."""

    def __init__(
        self, corpus: Corpus, config: DataConfig, *, seed: int, rank: int, num_ranks: int
    ) -> None:
        if config.global_batch % num_ranks:
            raise UsageError(
                f"data.global_batch {config.global_batch} does not divide by {num_ranks} data ranks"
            )
        self._corpus = corpus
        self._config = config
        self._seed = seed
        self._rank = rank
        self._share = config.global_batch // num_ranks
        self.micro_batch = config.micro_batch or self._share
        if self._share % self.micro_batch:
            raise UsageError(
                f"data.micro_batch {self.micro_batch} does not divide a rank's share, {self._share}"
            )
        self.num_samples = (len(corpus.tokens) - 1) // config.seq_len
        if self.num_samples < 1:
            raise UsageError("the corpus has fewer tokens than data.seq_len + 1")
        self.position = 0

    @property
    def num_micro_batches(self) -> int:
        return self._share // self.micro_batch

    def samples(self) -> list[int]:
        """The numbers of the samples that this rank takes at the current position."""
        first = self.position + self._rank * self._share
        return [
            sample_at(position, num_samples=self.num_samples, seed=self._seed)
            for position in range(first, first + self._share)
        ]

    def next_batch(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets, (B, L) each, one pair a micro-batch; moves the position on."""
        length = self._config.seq_len
        starts = np.asarray(self.samples(), dtype=np.int64) * length
        rows = self._corpus.tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
        self.position += self._config.global_batch
        batch = torch.from_numpy(rows)
        return [(part[:, :-1], part[:, 1:]) for part in torch.split(batch, self.micro_batch)]

    def state(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "seq_len": self._config.seq_len,
            "seed": self._seed,
            "digest": self._corpus.digest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the stored position; another corpus or cut is refused, since it means nothing."""
        mine = self.state()
        changed = [key for key in ("seq_len", "seed", "digest") if state.get(key) != mine[key]]
        if changed and not self._config.allow_other_corpus:
            key = changed[0]
            raise RefusedError(
                f"the checkpoint's data has {key} {state.get(key)!r}, this run {mine[key]!r}, so "
                "samples would be repeated or skipped",
                hint="go on anyway with --set data.allow_other_corpus=true",
            )
        self.position = int(state["position"])


def sample_at(position: int, *, num_samples: int, seed: int) -> int:
    """Which sample the run sees at a position: every one once an epoch, in a seeded order.

    A four-round Feistel network over the next even power of two, walked until it lands inside.
    """
    epoch, value = divmod(position, num_samples)
    half = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for round_number in range(4):
            mixed = _mix((right << 8) ^ round_number, seed * 1_000_003 + epoch)
            left, right = right, left ^ (mixed & mask)
        value = (left << half) | right
        if value < num_samples:
            return value


def load_corpus(config: DataConfig) -> Corpus:
    """Read and tokenise the text, or map the tokens that an earlier run left in the cache."""
    files = _list_files(config)
    name = _cache_name(config, files)
    folder = Path(config.cache_dir or _default_cache_dir())
    cached = _read_cache(folder / name)
    if cached is None:
        cached = _tokenise(config, files)
        _write_cache(folder / name, cached)
    return cached


def _mix(value: int, key: int) -> int:
    """splitmix64's finaliser over value and key."""
    mixed = (value * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03 + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def _list_files(config: DataConfig) -> list[Path]:
    if not config.paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
        found = [path for path in root.rglob("*.py") if not skipped & set(path.parts)]
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())
    files: list[Path] = []
    for entry in map(Path, config.paths):
        if entry.is_dir():
            files += sorted(path for path in entry.rglob("*") if path.suffix in config.suffixes)
        elif entry.is_file():
            files.append(entry)
        else:
            raise UsageError(f"data.paths names {entry}, which is not there")
    if not files:
        raise UsageError(f"no {', '.join(config.suffixes)} file below {', '.join(config.paths)}")
    return files


def _tokenise(config: DataConfig, files: list[Path]) -> Corpus:
    texts = [path.read_bytes() for path in files]
    whole = b"\0".join(texts)
    tokenizer: Tokenizer = ByteTokenizer()
    if config.tokenizer == "byte":
        tokens = np.frombuffer(whole, dtype=np.uint8).astype(np.uint16)
    else:
        stride = max(1, len(whole) // _PAIR_SAMPLE_BYTES)
        sample = b"\0".join(texts[::stride])[: 2 * _PAIR_SAMPLE_BYTES]
        tokenizer = train_pairs(sample, vocab_size=config.bpe_vocab_size)
        tokens = np.asarray(tokenizer.encode(whole), dtype=np.uint16)
    return Corpus(tokens, tokenizer, hashlib.sha256(tokens.tobytes()).hexdigest()[:16])


def _cache_name(config: DataConfig, files: list[Path]) -> str:
    facts = [
        config.tokenizer,
        config.bpe_vocab_size if config.tokenizer == "bpe" else 0,
        [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ckptool-train"


def _read_cache(base: Path) -> Corpus | None:
    try:
        facts = json.loads(base.with_suffix(".json").read_text())
        tokens = np.load(base.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    merges = tuple((left, right) for left, right in facts["merges"])
    tokenizer = PairTokenizer(merges) if merges else ByteTokenizer()
    return Corpus(tokens, tokenizer, facts["digest"])


def _write_cache(base: Path, corpus: Corpus) -> None:
    """Leave the tokens for the next process; a folder that cannot be written is no error."""
    merges = corpus.tokenizer.merges if isinstance(corpus.tokenizer, PairTokenizer) else ()
    facts = json.dumps({"digest": corpus.digest, "merges": merges}).encode()
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base.parent) as scratch:
            np.save(Path(scratch, "tokens.npy"), corpus.tokens)
            Path(scratch, "facts.json").write_bytes(facts)
            os.replace(Path(scratch, "tokens.npy"), base.with_suffix(".npy"))
            os.replace(Path(scratch, "facts.json"), base.with_suffix(".json"))
    except OSError:
        return
