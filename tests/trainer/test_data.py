"""The data: lossless tokens, and an order that no world size changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool.errors import RefusedError, UsageError
from trainer.config import DataConfig
from trainer.data import Corpus, DataStream, load_corpus, sample_at
from trainer.tokenizer import ByteTokenizer, train_pairs

CORPUS = Corpus(np.arange(1000, dtype=np.uint16), ByteTokenizer(), "digest")
CONFIG = DataConfig(seq_len=8, global_batch=12)


def _stream(rank: int, num_ranks: int, *, position: int = 0) -> DataStream:
    stream = DataStream(CORPUS, CONFIG, seed=3, rank=rank, num_ranks=num_ranks)
    stream.position = position
    return stream


@given(num_samples=st.integers(1, 300), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_an_epoch_is_a_permutation(num_samples: int, seed: int) -> None:
    """Every sample comes once in each epoch, and the second epoch has another order."""
    first, second = (
        [
            sample_at(epoch * num_samples + index, num_samples=num_samples, seed=seed)
            for index in range(num_samples)
        ]
        for epoch in range(2)
    )
    assert sorted(first) == sorted(second) == list(range(num_samples))
    assert num_samples < 50 or first != second


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 12])
def test_order_does_not_depend_on_the_ranks(num_ranks: int) -> None:
    """Any number of data ranks together takes the same samples in the same order."""
    together = [
        sample for rank in range(num_ranks) for sample in _stream(rank, num_ranks).samples()
    ]
    assert together == _stream(0, 1).samples()


def test_no_sample_is_repeated_or_skipped_when_ranks_change() -> None:
    """Steps on 4, then 2, then 3 ranks see what one rank would have seen."""
    seen: list[int] = []
    position = 0
    for num_ranks in (4, 2, 3):
        streams = [_stream(rank, num_ranks, position=position) for rank in range(num_ranks)]
        for stream in streams:
            seen += stream.samples()
            stream.next_batch()
        states = {tuple(stream.state().items()) for stream in streams}
        assert len(states) == 1  # what all ranks store together is equal
        position = streams[0].position
    alone = _stream(0, 1)
    expected: list[int] = []
    for _ in range(3):
        expected += alone.samples()
        alone.next_batch()
    assert seen == expected


def test_targets_are_the_tokens_that_follow() -> None:
    """Inputs and targets are one apart, and micro-batches tile the rank's share."""
    stream = DataStream(
        CORPUS,
        DataConfig(seq_len=8, global_batch=12, micro_batch=2),
        seed=3,
        rank=1,
        num_ranks=2,
    )
    parts = stream.next_batch()
    assert [tuple(inputs.shape) for inputs, _ in parts] == [(2, 8)] * 3
    for inputs, targets in parts:
        assert (targets == inputs + 1).all()


def test_another_corpus_is_refused() -> None:
    """A position in another text means nothing, unless one insists."""
    stream = _stream(0, 1)
    state = {**stream.state(), "digest": "other"}
    with pytest.raises(RefusedError, match="allow_other_corpus"):
        stream.restore(state)


@pytest.mark.parametrize(
    ("config", "num_ranks", "words"),
    [
        (DataConfig(seq_len=8, global_batch=10), 4, "does not divide by 4 data ranks"),
        (DataConfig(seq_len=8, global_batch=12, micro_batch=5), 1, "does not divide"),
        (DataConfig(seq_len=2000, global_batch=12), 1, "fewer tokens"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    config: DataConfig, num_ranks: int, words: str
) -> None:
    """A share that is no whole number is named before anything starts."""
    with pytest.raises(UsageError, match=words):
        DataStream(CORPUS, config, seed=0, rank=0, num_ranks=num_ranks)


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_byte_pairs_are_lossless(text: bytes) -> None:
    """Any bytes come back, whatever the pairs were trained on."""
    pairs = train_pairs(b"def main(argument): return argument\n" * 20, vocab_size=300)
    assert pairs.decode(pairs.encode(text)) == text
    assert len(pairs.encode(text)) <= len(text)


def test_byte_pairs_shorten_what_they_know() -> None:
    """Training is deterministic, and frequent words become one token."""
    text = b"import numpy as np\nimport numpy\n" * 50
    pairs = train_pairs(text, vocab_size=290)
    assert pairs == train_pairs(text, vocab_size=290)
    assert pairs.vocab_size <= 290
    assert len(pairs.encode(b"import numpy")) <= 3


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_corpus_comes_back_from_the_cache(tmp_path: Path, tokenizer: str) -> None:
    """The second load maps what the first one left, with the same tokens and digest."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.py").write_text("b = 1\n" * 30)
    (tmp_path / "text" / "a.py").write_text("a = 'é'\n" * 30)
    (tmp_path / "text" / "c.bin").write_text("not text")
    config = DataConfig(
        paths=(str(tmp_path / "text"),),
        tokenizer=tokenizer,
        bpe_vocab_size=270,
        cache_dir=str(tmp_path / "cache"),
    )
    first, second = load_corpus(config), load_corpus(config)
    assert isinstance(second.tokens, np.memmap)
    assert (first.tokens == second.tokens).all()
    assert first.tokenizer == second.tokenizer
    text = ("a = 'é'\n" * 30 + "\0" + "b = 1\n" * 30).encode()
    assert second.tokenizer.decode([int(token) for token in second.tokens]) == text
    digest = hashlib.sha256(np.ascontiguousarray(first.tokens).tobytes()).hexdigest()
    assert first.digest == second.digest == digest[:16]


def test_missing_text_is_named(tmp_path: Path) -> None:
    """A path that is not there, or a folder without text, is one sentence."""
    with pytest.raises(UsageError, match="not there"):
        load_corpus(DataConfig(paths=(str(tmp_path / "none"),)))
    with pytest.raises(UsageError, match="no "):
        load_corpus(DataConfig(paths=(str(tmp_path),)))
