"""Data sets that need no files, and the operations of every data set."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from paceline.workloads import data, tokens
from paceline.workloads.data import Data
from paceline.workloads.errors import DataError
from workloads import making


def test_digits_are_scikit_learns() -> None:
    learn = pytest.importorskip("sklearn.datasets").load_digits()
    digits = data.load("digits")
    is_test = np.arange(1797) % 5 == 0
    for ours, our_labels, which in (
        (digits.inputs, digits.labels, ~is_test),
        (digits.test_inputs, digits.test_labels, is_test),
    ):
        assert torch.equal((ours[:, 0].double() * 16 / 255).round(), torch.from_numpy(learn.images[which]))
        assert torch.equal(our_labels, torch.from_numpy(learn.target[which]))


def test_digits_have_ten_classes_and_fill_the_range() -> None:
    digits = data.load("digits")
    assert digits.inputs.shape == (1437, 1, 8, 8) and digits.test_inputs.shape == (360, 1, 8, 8)
    assert digits.inputs.dtype == digits.test_inputs.dtype == torch.uint8
    assert digits.labels.dtype == digits.test_labels.dtype == torch.int64
    assert set(digits.labels.tolist()) == set(digits.test_labels.tolist()) == set(range(digits.classes))
    assert (int(digits.inputs.min()), int(digits.inputs.max())) == (0, 255)
    assert digits.is_images and digits.vocabulary == 0


def test_prepared_images_have_mean_0_and_deviation_1() -> None:
    digits = data.load("digits")
    seen = digits.prepared(digits.inputs)
    assert seen.dtype == torch.float32 and seen.shape == digits.inputs.shape
    assert seen.mean().abs() < 1e-5 and (seen.std(correction=0) - 1).abs() < 1e-5


def test_each_channel_is_normalized_by_itself_for_any_leading_dimensions() -> None:
    made = making.images(channels=2, side=1)
    made = Data("made", made.inputs, made.labels, made.test_inputs, made.test_labels, 10, (0.0, 0.5), (1.0, 0.25))
    pixels = torch.tensor([255, 0], dtype=torch.uint8).view(2, 1, 1)
    assert made.prepared(pixels).flatten().tolist() == [1.0, -2.0]
    assert made.prepared(pixels.expand(3, 4, 2, 1, 1)).shape == (3, 4, 2, 1, 1)


def test_moments_match_numpys_by_channel() -> None:
    pixels = np.random.RandomState(0).randint(256, size=(2500, 3, 2, 2)).astype(np.uint8)
    pixels[:, 1] //= 2
    mean, deviation = data.moments(pixels)
    assert mean == pytest.approx((pixels / 255).mean(axis=(0, 2, 3)), rel=1e-12)
    assert deviation == pytest.approx((pixels / 255).std(axis=(0, 2, 3)), rel=1e-9)


def test_a_constant_channel_has_deviation_1_to_avoid_division_by_0() -> None:
    assert data.moments(np.full((2, 1, 3, 3), 255, np.uint8)) == ((1.0,), (1.0,))


def test_limited_keeps_the_first_training_samples_and_all_test_samples() -> None:
    digits = data.load("digits")
    few = digits.limited(5)
    assert torch.equal(few.inputs, digits.inputs[:5]) and torch.equal(few.labels, digits.labels[:5])
    assert few.test_inputs is digits.test_inputs and few.test_labels is digits.test_labels
    assert (few.mean, few.deviation, few.classes) == (digits.mean, digits.deviation, 10)
    assert len(digits.limited(10**9).labels) == 1437
    for none in (0, -1):
        with pytest.raises(DataError, match=f"digits must keep at least 1 training sample; got {none}"):
            digits.limited(none)


def test_to_moves_all_four_tensors() -> None:
    there = data.load("digits").to("meta")
    assert {each.device.type for each in (there.inputs, there.labels, there.test_inputs, there.test_labels)} == {"meta"}


def test_counting_words_finds_the_class_of_most_token_sequences() -> None:
    topics = data.load("tokens")
    assert topics.inputs.shape == (8192, 16) and topics.test_inputs.shape == (2048, 16)
    assert topics.labels.shape == (8192,) and topics.labels.dtype == topics.inputs.dtype == torch.int64
    assert (topics.classes, topics.vocabulary) == (4, 64)
    assert (topics.inputs[:, 0] == tokens.START).all() and not (topics.inputs[:, 1:] == tokens.START).any()
    assert set(topics.inputs.flatten().tolist()) == set(range(64))
    counts = [((topics.inputs - 1) // 8 == each).sum(1) for each in range(4)]
    right = (torch.stack(counts).argmax(0) == topics.labels).double().mean()
    assert 0.94 < right < 0.99  # learnable, but not without mistakes
    assert topics.labels.bincount().min() > 1900
    assert not topics.is_images and topics.prepared(topics.inputs) is topics.inputs


def test_a_translation_is_word_by_word_and_backwards() -> None:
    pairs = data.load("translation")
    assert pairs.inputs.shape == (8192, 24) and pairs.labels.shape == (8192, 12)
    assert pairs.classes == pairs.vocabulary == 32
    for inputs, target in ((pairs.inputs, pairs.labels), (pairs.test_inputs, pairs.test_labels)):
        source, moved = inputs.chunk(2, dim=1)
        assert (moved[:, 0] == tokens.START).all() and torch.equal(moved[:, 1:], target[:, :-1])
        pairs_of_words = set(zip(source.flip(1).flatten().tolist(), target.flatten().tolist(), strict=True))
        ours, theirs = (sorted(words) for words in zip(*pairs_of_words, strict=True))
        assert ours == theirs == list(range(1, 32))  # each word has one translation, and no two words share one
        assert any(word != meant for word, meant in pairs_of_words)


@pytest.mark.parametrize("name", ["tokens", "translation"])
def test_synthetic_data_is_deterministic_and_test_samples_are_not_trained_on(name: str) -> None:
    first, second = data.load(name), data.load(name)
    assert torch.equal(first.inputs, second.inputs) and torch.equal(first.test_labels, second.test_labels)
    assert not {tuple(row) for row in first.inputs.tolist()} & {tuple(row) for row in first.test_inputs.tolist()}


def test_synthetic_data_does_not_change_between_releases() -> None:
    assert data.load("tokens").inputs[0, :6].tolist() == [0, 16, 63, 16, 57, 63]
    assert data.load("tokens").test_inputs[-1, -6:].tolist() == [47, 42, 44, 3, 7, 2]
    assert data.load("translation").inputs[0, :6].tolist() == [5, 15, 7, 20, 26, 3]
    assert data.load("translation").labels[-1, -6:].tolist() == [30, 9, 14, 13, 3, 12]


def test_an_unknown_name_is_answered_with_the_closest_and_all_names() -> None:
    with pytest.raises(
        DataError, match=re.escape("There is no data set 'cifar-10'. Did you mean 'cifar10'? Choose from")
    ) as it:
        data.load("cifar-10")
    assert all(name in str(it.value) for name in data.names())
    with pytest.raises(DataError, match=r"There is no data set 'zzz'\. Choose from digits, "):
        data.load("zzz")


def test_the_names_of_all_data_sets() -> None:
    images = ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "speech"]
    assert data.names() == [*images, "tokens", "translation"]
