"""Networks by name: their sizes, their outputs, and that many can run at once under vmap."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap

import threads
from paceline.workloads import data, language, networks
from paceline.workloads.data import Data
from paceline.workloads.errors import NetworkError
from paceline.workloads.resnet import Block, resnet
from paceline.workloads.weights import he_initialized
from workloads import making

TEXT = {**dict.fromkeys(language.BERT, "tokens"), **dict.fromkeys(language.T5, "translation")}
#: Networks with tens of millions of parameters, or with very many layers.
HEAVY = {"alexnet", "vgg16", "resnet56", "resnet110"}
IMAGE = [name for name in networks.names() if name not in TEXT]
WEIGHED = [pytest.param(name, marks=pytest.mark.matrix if name in HEAVY else ()) for name in IMAGE]
TINY = [("bert-tiny", "tokens"), ("t5-tiny", "translation")]


one_thread = pytest.fixture(autouse=True)(threads.one_thread)


def made_for(name: str) -> Data:
    """Return grey images that are as small as the network allows, and at least 8 by 8."""
    return making.images(1, max(8, networks.smallest_image(name)))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def fresh(name: str, made: Data, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return networks.make(name, made)


# Sizes


@pytest.mark.parametrize(
    ("name", "count", "millions"),
    [
        ("resnet20", 269_722, 0.27),
        ("resnet32", 464_154, 0.46),
        ("resnet56", 853_018, 0.85),
        ("resnet110", 1_727_962, 1.7),
    ],
)
def test_residual_networks_have_the_papers_sizes(name: str, count: int, millions: float) -> None:
    cifar = making.images(3, 32)
    assert networks.parameters_of(name, cifar) == count
    assert float(f"{count / 1e6:.2g}") == millions
    with torch.device("meta"):
        layers = [each for each in networks.make(name, cifar).modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    assert f"resnet{len(layers)}" == name


@pytest.mark.parametrize(
    ("name", "convolutions", "connected"),
    [("mlp", 0, 3), ("cnn", 2, 1), ("alexnet-small", 3, 2), ("alexnet", 5, 3), ("vgg16", 13, 3)],
)
def test_networks_have_the_papers_numbers_of_layers(name: str, convolutions: int, connected: int) -> None:
    with torch.device("meta"):
        layers = list(networks.make(name, making.images(3, 32)).modules())
    assert sum(isinstance(each, nn.Conv2d) for each in layers) == convolutions
    assert sum(isinstance(each, nn.Linear) for each in layers) == connected


def test_vgg16_has_its_originals_convolutions() -> None:
    """14,714,688 parameters in the convolutions of configuration D, whatever the image's size."""
    with torch.device("meta"):
        model = networks.make("vgg16", making.images(3, 32))
    kept = [each for each in model.modules() if isinstance(each, nn.Conv2d)]
    assert sum(parameter.numel() for each in kept for parameter in each.parameters()) == 14_714_688


def test_counting_draws_no_weights() -> None:
    before = torch.random.get_rng_state()
    assert networks.parameters_of("mlp", data.load("digits")) == 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
    assert torch.equal(torch.random.get_rng_state(), before)


# Inputs and outputs


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (1, 28), (3, 32)], ids=["digits", "mnist", "cifar"])
@pytest.mark.parametrize("name", WEIGHED)
def test_every_image_network_takes_every_usual_image(name: str, channels: int, side: int) -> None:
    made = making.images(channels, side, samples=2, classes=7)
    if side < networks.smallest_image(name):
        wanted = f"{name} needs images of at least 17 by 17, and those of made are {side} by {side}. Choose another"
        with pytest.raises(NetworkError, match=wanted):
            networks.make(name, made)
        return
    model = networks.make(name, made)
    output = model(made.prepared(made.inputs))
    assert output.shape == (2, 7) and output.dtype == torch.float32
    torch.autograd.backward(networks.loss(output, made.labels))
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{key} does not affect the output"
        assert parameter.grad.isfinite().all(), key
        assert parameter.ndim == 1 or parameter.grad.any(), key  # a bias before a norm has no effect


@pytest.mark.parametrize("side", [1, 4, 9, 17, 30, 40])
@pytest.mark.parametrize("name", [name for name in IMAGE if name not in HEAVY] + ["alexnet", "vgg16"])
def test_an_image_is_large_enough_or_refused(name: str, side: int) -> None:
    """No image size fails inside a network."""
    with torch.device("meta"):
        made = making.images(1, 8).to("meta")
        made = Data(
            "made", torch.empty(2, 1, side, side + 1), made.labels, made.inputs, made.labels, 10, (0.5,), (1.0,)
        )
        if side >= networks.smallest_image(name):
            assert networks.make(name, made)(torch.empty(2, 1, side, side + 1)).shape == (2, 10)
        else:
            with pytest.raises(NetworkError, match=f"those of made are {side} by {side + 1}"):
                networks.make(name, made)


def test_the_smallest_images_that_networks_take() -> None:
    assert {name: networks.smallest_image(name) for name in ("mlp", "alexnet-small", "vgg16", "bert")} == {
        "mlp": 1,
        "alexnet-small": 8,
        "vgg16": 17,
        "bert": 0,
    }


@pytest.mark.parametrize("name", WEIGHED)
def test_the_seed_determines_the_weights(name: str) -> None:
    made = made_for(name)
    first, again, other = (weights(fresh(name, made, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", WEIGHED)
def test_a_network_is_a_function_of_weights_and_samples(name: str) -> None:
    """A network draws no random numbers, even in training mode."""
    made = made_for(name)
    model = fresh(name, made, 0).train()
    assert not [each for each in model.modules() if "Dropout" in type(each).__name__]
    inputs = made.prepared(made.inputs)
    before = torch.random.get_rng_state()
    with torch.no_grad():
        assert torch.equal(model(inputs), model(inputs))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", WEIGHED)
def test_gradients_under_vmap_equal_those_of_single_networks(name: str) -> None:
    """Gradients of two workers, each with its own weights and its own samples, under vmap and one by one."""
    made = made_for(name)
    # In double precision: rounding can select another pixel in a pool, and a batch norm of few samples amplifies it.
    base, *workers = (replace_all_batch_norm_modules_(fresh(name, made, seed)).double() for seed in range(3))
    compare(base, workers, halves(made.prepared(made.inputs).double()), halves(made.labels))


def halves(samples: torch.Tensor) -> torch.Tensor:
    """Return the samples as two halves, one for each of two workers."""
    return torch.stack(samples.chunk(2))


def compare(base: nn.Module, workers: list[nn.Module], inputs: torch.Tensor, labels: torch.Tensor) -> None:
    parameters = {
        key: torch.stack([dict(each.named_parameters())[key].detach() for each in workers])
        for key, _ in base.named_parameters()
    }

    def loss_of(some: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return networks.loss(functional_call(base, some, (x,)), y)

    together = vmap(grad(loss_of), in_dims=(0, 0, 0))(parameters, inputs, labels)
    for index, worker in enumerate(workers):
        torch.autograd.backward(networks.loss(worker(inputs[index]), labels[index]))
        alone = {key: parameter.grad for key, parameter in worker.named_parameters()}
        largest = max(float(each.abs().max()) for each in alone.values() if each is not None)
        assert largest > 1e-3
        for key, expected in alone.items():
            torch.testing.assert_close(together[key][index], expected, rtol=1e-6, atol=1e-9 * largest)


# Learning


@pytest.mark.parametrize(
    ("name", "rate", "steps"),
    [("mlp", 0.1, 30), ("cnn", 0.1, 30), ("lstm", 1.0, 50), ("alexnet-small", 0.01, 50), ("resnet20", 0.1, 20)],
)
def test_networks_learn_digits_with_plain_sgd(name: str, rate: float, steps: int) -> None:
    digits = data.load("digits")
    model = fresh(name, digits, 0)
    order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        batch = order[torch.arange(step * 64, step * 64 + 64) % len(order)]
        model.zero_grad()
        torch.autograd.backward(networks.loss(model(digits.prepared(digits.inputs[batch])), digits.labels[batch]))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(rate * parameter.grad)
    with torch.no_grad():
        right = networks.accuracy(model(digits.prepared(digits.test_inputs)), digits.test_labels)
    assert right > 0.6  # chance is 0.1


def test_a_signal_keeps_its_size_through_many_layers() -> None:
    """With torch's default weights, samples differ by 1e-8 after 20 layers, and nothing is learned."""
    torch.manual_seed(0)
    last = nn.Linear(128, 10)
    hidden = nn.Sequential(*(each for _ in range(20) for each in (nn.Linear(128, 128), nn.ReLU())))
    he_initialized(nn.Sequential(hidden, last), last)
    with torch.no_grad():
        seen = hidden(torch.randn(64, 128))
        assert 0.1 < seen.square().mean() < 10
        assert seen.std(0).mean() > 0.05  # from sample to sample
        assert 0 < last(seen).std() < 1  # the first predictions are nearly uniform
    assert not any(parameter.any() for key, parameter in hidden.named_parameters() if key.endswith("bias"))


def test_a_shortcut_has_no_parameters_and_pads_with_zeros() -> None:
    block = Block(2, 4)
    with torch.no_grad():
        block.conv2.weight.zero_()
    x = torch.rand(3, 2, 6, 6) + 0.1
    y = block(x)  # the convolutions add nothing now
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert y.shape == (3, 4, 3, 3) and not y[:, 0].any() and not y[:, 3].any()
    with pytest.raises(ValueError, match="6n \\+ 2 layers, such as 20, 32 or 56; got 18"):
        resnet(18, (3, 32, 32), 10)


def test_the_lstm_cell_matches_torchs() -> None:
    """The written-out LSTM gives the same outputs as torch's."""
    made = making.images(2, 5)
    model: Any = fresh("lstm", made, 0)
    own: Any = nn.LSTM(10, 64, batch_first=True)
    swapped = torch.cat([torch.arange(0, 128), torch.arange(192, 256), torch.arange(128, 192)])  # i, f, g, o
    with torch.no_grad():
        own.weight_ih_l0.copy_(model.read.weight[swapped])
        own.weight_hh_l0.copy_(model.recall.weight[swapped])
        own.bias_ih_l0.copy_(model.read.bias[swapped])
        own.bias_hh_l0.zero_()
        inputs = made.prepared(made.inputs)
        rows = torch.stack([torch.cat([inputs[:, 0, row], inputs[:, 1, row]], dim=1) for row in range(5)], dim=1)
        torch.testing.assert_close(model(inputs), model.answer(own(rows)[0][:, -1]))


def test_loss_and_accuracy_of_samples_and_of_tokens() -> None:
    output = torch.tensor([[0.0, 0.0], [0.0, 3.0], [5.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    by_hand = (torch.tensor(2.0).log() + (1 + torch.tensor(-3.0).exp()).log() + (1 + torch.tensor(5.0).exp()).log()) / 3
    assert networks.loss(output, labels) == pytest.approx(by_hand)
    right = networks.accuracy(output, labels)
    assert right.ndim == 0 and float(right) == pytest.approx(2 / 3)
    twice, both = torch.stack([output, -output]), torch.stack([labels, labels])
    assert networks.loss(twice, both) == pytest.approx(
        (networks.loss(output, labels) + networks.loss(-output, labels)) / 2
    )
    assert float(networks.accuracy(twice, both)) == pytest.approx((2 + 2) / 6)


# Refusals


def test_an_unknown_name_is_answered_with_the_closest_and_all_names() -> None:
    digits = data.load("digits")
    refusals: list[Callable[[], object]] = [
        lambda: networks.make("resnet-20", digits),
        lambda: networks.parameters_of("resnet-20", digits),
        lambda: networks.smallest_image("resnet-20"),
    ]
    for refused in refusals:
        with pytest.raises(
            NetworkError, match=re.escape("There is no network 'resnet-20'. Did you mean 'resnet20'? Choose from")
        ) as it:
            refused()
        assert all(name in str(it.value) for name in networks.names())


@pytest.mark.parametrize(
    ("name", "of", "words"),
    [
        ("mlp", "tokens", "mlp needs images, and tokens has none. Choose digits"),
        ("bert", "digits", "bert cannot be trained on digits. Choose the data set tokens"),
        ("bert-tiny", "translation", "bert-tiny cannot be trained on translation. Choose the data set tokens"),
        ("t5-small", "tokens", "t5-small cannot be trained on tokens. Choose the data set translation"),
    ],
)
def test_a_data_set_of_another_kind_is_refused(name: str, of: str, words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        networks.make(name, data.load(of))


def test_missing_transformers_are_reported_with_the_command_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, of in TEXT.items():
        with pytest.raises(NetworkError, match=re.escape(f"{name} needs the package transformers")) as refused:
            networks.make(name, data.load(of))
        assert 'pip install "paceline[transformers]"' in str(refused.value)


# Networks for text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of"), TINY)
def test_language_models_return_logits(name: str, of: str) -> None:
    pytest.importorskip("transformers")
    some = data.load(of).limited(8)
    model = fresh(name, some, 0).train()
    inputs = some.prepared(some.inputs)
    output = model(inputs)
    assert output.shape == (*some.labels.shape, some.classes)
    assert torch.equal(output, model(inputs))  # without dropout
    same, other = weights(fresh(name, some, 0)), weights(fresh(name, some, 1))
    assert all(torch.equal(value, same[key]) for key, value in weights(model).items())
    assert any(not torch.equal(value, same[key]) for key, value in other.items())
    torch.autograd.backward(networks.loss(output, some.labels))
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("name", "of"), TINY)
def test_gradients_of_language_models_under_vmap_equal_those_of_single_ones(name: str, of: str) -> None:
    pytest.importorskip("transformers")
    some = data.load(of).limited(8)
    base, *workers = (fresh(name, some, seed).double() for seed in range(3))
    compare(base, workers, halves(some.inputs), halves(some.labels))


def test_attention_masks_match_transformers_defaults() -> None:
    pytest.importorskip("transformers")
    topics, words = data.load("tokens").limited(4), data.load("translation").limited(4)
    reader, translator = fresh("bert-tiny", topics, 0), fresh("t5-tiny", words, 0)
    bert, t5 = reader.get_submodule("model"), translator.get_submodule("model")
    source, moved = words.inputs.chunk(2, dim=1)
    with torch.no_grad():
        plain = bert(input_ids=topics.inputs).logits
        written = t5(input_ids=source, decoder_input_ids=moved, use_cache=False).logits
        assert torch.equal(reader(topics.inputs), plain)
        assert torch.equal(translator(words.inputs), written)


def test_a_translator_sees_only_earlier_tokens_of_the_target() -> None:
    pytest.importorskip("transformers")
    some = data.load("translation").limited(2)
    model = fresh("t5-tiny", some, 0)
    changed = some.inputs.clone()
    changed[:, 12 + 6] = changed[:, 12 + 6] % 31 + 1  # the sixth token of the target
    with torch.no_grad():
        before, after = model(some.inputs), model(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-5)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)


def test_bert_learns_topics() -> None:
    pytest.importorskip("transformers")
    topics = data.load("tokens").limited(512)
    model = fresh("bert-tiny", topics, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(24):
        batch = torch.arange(step * 32, step * 32 + 32) % 512
        optimizer.zero_grad()
        torch.autograd.backward(networks.loss(model(topics.inputs[batch]), topics.labels[batch]))
        optimizer.step()
    with torch.no_grad():
        right = networks.accuracy(model(topics.test_inputs[:256]), topics.test_labels[:256])
    assert right > 0.5  # chance is 0.25


@pytest.mark.parametrize(("name", "of"), [("bert", "tokens"), ("t5-small", "translation")])
def test_large_language_models_have_the_papers_sizes(name: str, of: str) -> None:
    """Except for the embeddings of tokens and positions, whose sizes come from the data."""
    pytest.importorskip("transformers")
    some = data.load(of)
    published = {"bert": 109_482_240, "t5-small": 60_506_624}[name]
    width = {"bert": 768, "t5-small": 512}[name]
    missing = (30_522 - 64 + 512 - 16) if name == "bert" else 32_128 - 32
    answer = width * 4 + 4 if name == "bert" else 0
    assert networks.parameters_of(name, some) == published - missing * width + answer
