"""Turns text into token ids and back: single bytes, or byte pairs merged by frequency.

Both are lossless over any bytes. Token 0-255 are the bytes themselves; a byte-pair vocabulary
adds one token a merge. Training is deterministic: ties go to the smaller pair.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["ByteTokenizer", "PairTokenizer", "Tokenizer", "train_pairs"]

_WORDS = re.compile(rb" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+")


class Tokenizer(Protocol):
    """Bytes to ids and back."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: bytes) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> bytes: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte."""

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, ids: Sequence[int]) -> bytes:
        return bytes(ids)


@dataclass(frozen=True)
class PairTokenizer:
    """Byte pairs: ``merges[i]`` is the pair that token ``256 + i`` stands for."""

    merges: tuple[tuple[int, int], ...]
    _ranks: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    _words: dict[bytes, list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        ranks = {pair: index for index, pair in enumerate(self.merges)}
        object.__setattr__(self, "_ranks", ranks)

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.merges)

    def encode(self, text: bytes) -> list[int]:
        ids: list[int] = []
        for word in _WORDS.findall(text):
            known = self._words.get(word)
            if known is None:
                known = self._words[word] = self._encode_word(word)
            ids.extend(known)
        return ids

    def decode(self, ids: Sequence[int]) -> bytes:
        table = [bytes([byte]) for byte in range(256)]
        for left, right in self.merges:
            table.append(table[left] + table[right])
        return b"".join(table[token] for token in ids)

    def _encode_word(self, word: bytes) -> list[int]:
        ids = list(word)
        while len(ids) > 1:
            pairs = list(itertools.pairwise(ids))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            ids = _merge(ids, best, 256 + self._ranks[best])
        return ids


def train_pairs(text: bytes, *, vocab_size: int) -> PairTokenizer:
    """The most frequent pairs of ``text``, merged until the vocabulary has ``vocab_size``."""
    counts = Counter(_WORDS.findall(text))
    words = [(list(word), count) for word, count in sorted(counts.items())]
    totals: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], set[int]] = defaultdict(set)
    for index, (ids, count) in enumerate(words):
        for pair in itertools.pairwise(ids):
            totals[pair] += count
            places[pair].add(index)
    merges: list[tuple[int, int]] = []
    while len(merges) < vocab_size - 256 and totals:
        best = min(totals, key=lambda pair: (-totals[pair], pair))
        if totals[best] < 2:
            break
        merges.append(best)
        for index in places.pop(best):
            _replace(words, index, best, 255 + len(merges), totals, places)
        totals.pop(best, None)
    return PairTokenizer(tuple(merges))


def _replace(
    words: list[tuple[list[int], int]],
    index: int,
    pair: tuple[int, int],
    token: int,
    totals: Counter[tuple[int, int]],
    places: dict[tuple[int, int], set[int]],
) -> None:
    ids, count = words[index]
    merged = _merge(ids, pair, token)
    for old in itertools.pairwise(ids):
        totals[old] -= count
        if totals[old] <= 0:
            del totals[old]
    for new in itertools.pairwise(merged):
        totals[new] += count
        places[new].add(index)
    words[index] = (merged, count)


def _merge(ids: list[int], pair: tuple[int, int], token: int) -> list[int]:
    merged: list[int] = []
    position = 0
    while position < len(ids):
        if tuple(ids[position : position + 2]) == pair:
            merged.append(token)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged
