"""Uses a trained model in one plain process: its loss on a batch, and text that it writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainer.config import Config
from trainer.data import Corpus, DataStream, load_corpus
from trainer.init import reset_buffers
from trainer.model import Transformer, complete_model_config

__all__ = ["PlainModel", "plain_model"]


class PlainModel:
    """An unsharded model on the CPU and the text that it was trained on."""

    def __init__(self, config: Config, model: nn.Module, corpus: Corpus) -> None:
        self._config, self.model, self._corpus = config, model, corpus

    @torch.no_grad()
    def loss(self, step: int) -> float:
        """The mean loss on the batch that the run saw at ``step`` (from 1), one sample each."""
        config = self._config
        data = DataStream(self._corpus, config.data, seed=config.run.seed, rank=0, num_ranks=1)
        data.position = (step - 1) * config.data.global_batch
        total, count = 0.0, 0
        for tokens_BL, targets_BL in data.next_batch():
            logits_BLV = self.model(tokens_BL).float()
            loss = F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum")
            total, count = total + float(loss), count + targets_BL.numel()
        return total / count

    @torch.no_grad()
    def continue_text(self, prompt: str, *, num_tokens: int) -> str:
        """The prompt and the most likely tokens after it."""
        tokenizer = self._corpus.tokenizer
        ids = tokenizer.encode(prompt.encode())
        window = self._config.data.seq_len
        for _ in range(num_tokens):
            logits_V = self.model(torch.tensor([ids[-window:]]))[0, -1]
            ids.append(int(logits_V[: tokenizer.vocab_size].argmax()))
        return tokenizer.decode(ids).decode(errors="replace")


def plain_model(config: Config) -> PlainModel:
    """The model of a configuration with undefined weights, for ``load_state_dict``."""
    corpus = load_corpus(config.data)
    sizes = complete_model_config(
        config.model, config.data, tokenizer_vocab_size=corpus.tokenizer.vocab_size
    )
    model = Transformer(sizes).eval()
    reset_buffers(model, device=torch.device("cpu"))
    return PlainModel(config, model, corpus)
