"""BERT and T5 from the package transformers, with new weights. Nothing is downloaded.

The vocabulary and the length are those of the data. There is no dropout, because a simulated run must be a function of
weights and samples alone. Attention is written out in tensor operations ("eager"), so that `torch.func.vmap` can run
many networks at once. Attention masks are buffers: a mask made in each pass would be copied from the host, which is not
possible in a CUDA graph.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from paceline.workloads.data import Data
from paceline.workloads.errors import NetworkError
from paceline.workloads.tokens import START

#: Sizes by name, in transformers' words. `bert` is BERT base (Devlin et al., 2019); `bert-tiny` is for tests.
BERT: dict[str, dict[str, int]] = {
    "bert": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert-tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
}
#: `t5-small` is that of Raffel et al. (2020); `t5-tiny` is for tests.
T5: dict[str, dict[str, int]] = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-tiny": {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4},
}


class TextClassifier(nn.Module):
    """BERT as a classifier of sequences (N, L). Its output is (N, classes)."""

    full_mask: torch.Tensor

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("full_mask", torch.zeros(1, 1, 1, length), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=inputs, attention_mask=self.full_mask).logits
        return logits


class Translator(nn.Module):
    """T5 with teacher forcing. Its output is (N, L, vocabulary).

    Networks are called with one tensor, so an input (N, 2L) holds two halves: the source, and the target shifted by one
    place with the start token before it. The data set `translation` has this form.
    """

    full_mask: torch.Tensor
    causal_mask: torch.Tensor

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__()
        self.model = model
        future = torch.full((length, length), torch.finfo(torch.float32).min).triu(diagonal=1)
        self.register_buffer("full_mask", torch.zeros(1, 1, 1, length), persistent=False)
        self.register_buffer("causal_mask", future[None, None], persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        source, moved = inputs.chunk(2, dim=1)
        logits: torch.Tensor = self.model(
            input_ids=source,
            attention_mask=self.full_mask,
            decoder_input_ids=moved,
            decoder_attention_mask=self.causal_mask,
            use_cache=False,
        ).logits
        return logits


def bert(name: str, data: Data) -> nn.Module:
    """Return the BERT of that name for a data set."""
    transformers = _transformers(name)
    config = transformers.BertConfig(
        **BERT[name],
        vocab_size=data.vocabulary,
        max_position_embeddings=data.inputs.shape[1],
        num_labels=data.classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout=0.0,
        pad_token_id=None,  # all sequences have the same length, and token 0 is learned like any other
        attn_implementation="eager",
    )
    return TextClassifier(transformers.BertForSequenceClassification(config), data.inputs.shape[1])


def t5(name: str, data: Data) -> nn.Module:
    """Return the T5 of that name for a data set."""
    transformers = _transformers(name)
    config = transformers.T5Config(
        **T5[name],
        vocab_size=data.vocabulary,
        dropout_rate=0.0,
        decoder_start_token_id=START,
        use_cache=False,
        attn_implementation="eager",
    )
    return Translator(transformers.T5ForConditionalGeneration(config), data.labels.shape[1])


def _transformers(name: str) -> Any:
    """Import the optional package transformers, when one of its networks is made."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise NetworkError(
            f'{name} needs the package transformers ({error}). Install it with pip install "paceline[transformers]".'
        ) from None
