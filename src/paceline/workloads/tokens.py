"""Two made-up tasks on sequences of tokens, for networks that read text. Small, and the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

TRAINING = 8192
TEST = 2048

#: Begins what a network reads, in both tasks.
START = 0

#: Of `topics`.
CLASSES = 4
WORDS = 8  # of each class
TOPICS_VOCABULARY = 64
TOPICS_LENGTH = 16
FITTING = 0.3  # share of words that are of the sequence's class
MISLEADING = 0.15  # share of words that are of any class

#: Of `translation`.
TRANSLATION_VOCABULARY = 32
TRANSLATION_LENGTH = 12


def topics() -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """Sequences (N, 16) and their classes (N,), to train with and to test with: of which topic is this text?

    There are 64 tokens. 0 begins every sequence. Each of the 4 classes has 8 words of its own, 1 to 32, and the other
    31 belong to none. A sequence is of a random class, and each of its 15 words is, with probability 0.3, one of that
    class's; with probability 0.15, one of any class's, which may mislead; else one of nobody's. A reader that counts
    is right about 19 times in 20, and one that guesses, once in 4.
    """
    # RandomState, because numpy promises its numbers for good; those of newer generators may change.
    random = np.random.RandomState(1)
    count = TRAINING + TEST
    labels = random.randint(CLASSES, size=count)
    shape = (count, TOPICS_LENGTH - 1)
    own = 1 + labels[:, None] * WORDS + random.randint(WORDS, size=shape)
    anyones = 1 + random.randint(CLASSES * WORDS, size=shape)
    nobodys = random.randint(1 + CLASSES * WORDS, TOPICS_VOCABULARY, size=shape)
    chance = random.random_sample(shape)
    words = np.where(chance < FITTING, own, np.where(chance < FITTING + MISLEADING, anyones, nobodys))
    inputs = np.concatenate([np.full((count, 1), START), words], axis=1).astype(np.int64)
    labels = labels.astype(np.int64)
    return inputs[:TRAINING], labels[:TRAINING], inputs[TRAINING:], labels[TRAINING:]


def translation() -> tuple[Tokens, Tokens, Tokens, Tokens]:
    """What to read (N, 24) and what to write (N, 12), to train with and to test with: word by word, and backwards.

    A source is 12 random tokens of 1 to 31. Its target is the source from its end to its beginning, each token replaced
    by another one that is always the same for it. The inputs are two halves side by side: the source, and then the
    target moved on by one place with 0 before it, which is what a decoder has read when it is to write the next token.
    """
    random = np.random.RandomState(2)
    count = TRAINING + TEST
    dictionary = 1 + random.permutation(TRANSLATION_VOCABULARY - 1)  # of token t at t - 1
    source = random.randint(1, TRANSLATION_VOCABULARY, size=(count, TRANSLATION_LENGTH))
    target = dictionary[source[:, ::-1] - 1].astype(np.int64)
    moved = np.concatenate([np.full((count, 1), START), target[:, :-1]], axis=1)
    inputs = np.concatenate([source, moved], axis=1).astype(np.int64)
    return inputs[:TRAINING], target[:TRAINING], inputs[TRAINING:], target[TRAINING:]
