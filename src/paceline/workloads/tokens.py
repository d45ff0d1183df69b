"""Two synthetic tasks on sequences of tokens, for language models. They are small and the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

TRAINING = 8192
TEST = 2048

#: The token that begins a sequence, in both tasks.
START = 0

#: Sizes of `topics`.
CLASSES = 4
WORDS = 8  # words per class
TOPICS_VOCABULARY = 64
TOPICS_LENGTH = 16
OWN_CLASS = 0.3  # probability of a word of the sequence's own class
ANY_CLASS = 0.15  # probability of a word of any class

#: Sizes of `translation`.
TRANSLATION_VOCABULARY = 32
TRANSLATION_LENGTH = 12


def topics() -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """Return sequences (N, 16) and their classes (N,), for training and testing. The task: find the topic of a text.

    There are 64 tokens. Token 0 begins every sequence. Each of the 4 classes has 8 words of its own (1 to 32), and 31
    words are neutral. A sequence has a random class. Each of its 15 words is with probability 0.3 a word of that class,
    with probability 0.15 a word of any class, which may mislead, and otherwise neutral. Counting words gives the right
    class for about 19 of 20 sequences; guessing gives it for one of 4.
    """
    # RandomState, because numpy guarantees that its numbers never change. Those of newer generators may.
    random = np.random.RandomState(1)
    count = TRAINING + TEST
    labels = random.randint(CLASSES, size=count)
    shape = (count, TOPICS_LENGTH - 1)
    own = 1 + labels[:, None] * WORDS + random.randint(WORDS, size=shape)
    of_any_class = 1 + random.randint(CLASSES * WORDS, size=shape)
    neutral = random.randint(1 + CLASSES * WORDS, TOPICS_VOCABULARY, size=shape)
    chance = random.random_sample(shape)
    words = np.where(chance < OWN_CLASS, own, np.where(chance < OWN_CLASS + ANY_CLASS, of_any_class, neutral))
    inputs = np.concatenate([np.full((count, 1), START), words], axis=1).astype(np.int64)
    labels = labels.astype(np.int64)
    return inputs[:TRAINING], labels[:TRAINING], inputs[TRAINING:], labels[TRAINING:]


def translation() -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """Return inputs (N, 24) and targets (N, 12), for training and testing. The task: translate a sequence backwards.

    A source has 12 random tokens from 1 to 31. Its target is the reversed source with every token replaced by a fixed
    translation. An input is the source followed by the target shifted by one place, with 0 before it: what a decoder
    has read when it writes the next token.
    """
    random = np.random.RandomState(2)
    count = TRAINING + TEST
    dictionary = 1 + random.permutation(TRANSLATION_VOCABULARY - 1)  # the translation of token t is at t - 1
    source = random.randint(1, TRANSLATION_VOCABULARY, size=(count, TRANSLATION_LENGTH))
    target = dictionary[source[:, ::-1] - 1].astype(np.int64)
    moved = np.concatenate([np.full((count, 1), START), target[:, :-1]], axis=1)
    inputs = np.concatenate([source, moved], axis=1).astype(np.int64)
    return inputs[:TRAINING], target[:TRAINING], inputs[TRAINING:], target[TRAINING:]
