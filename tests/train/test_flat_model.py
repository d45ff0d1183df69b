"""A model as one flat buffer: every kind of parameter, and what is sent of it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model.half_precision import widen
from paceline.model.layout import STATISTICS
from paceline.train.flat_model import FlatModel


def sgd(*parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def flat_of(model: Any, **options: Any) -> FlatModel:
    return FlatModel(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def sent(flat: FlatModel) -> Any:
    """Return the values that the server reads from the pushed bytes."""
    into = torch.empty(flat.layout.size)
    widen(flat.gradient_bytes(), flat.wire, into.numpy())
    return into


def pull(flat: FlatModel, values: Any) -> None:
    flat.weights_bytes()[:] = torch.as_tensor(values, dtype=torch.float32).numpy().data.cast("B")
    flat.scatter()


def test_pulled_weights_are_in_the_parameters_without_a_copy() -> None:
    model = torch.nn.Linear(3, 2)
    flat = flat_of(model)
    assert model.weight.data_ptr() == flat.weights.data_ptr()
    assert model.bias.data_ptr() == flat.weights[6:].data_ptr()
    pull(flat, range(8))
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]] and model.bias.tolist() == [6, 7]


def test_parameters_do_not_look_tied_to_libraries_that_save_them() -> None:
    """They find tied tensors by their storage, and leave out all but the first."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    flat_of(model)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == 4
    assert [each.untyped_storage().nbytes() for each in model.parameters()] == [24, 8, 24, 12]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_types_are_copied(dtype: str) -> None:
    model = torch.nn.Linear(3, 2).to(getattr(torch, dtype))
    before = model.weight.detach().clone()
    flat = flat_of(model)
    torch.testing.assert_close(flat.weights[:6].view(2, 3), before.float())
    model(torch.ones(4, 3, dtype=model.weight.dtype)).sum().backward()
    flat.gather()
    assert sent(flat).tolist() == [4.0] * 8
    pull(flat, range(8))
    assert model.weight.dtype == getattr(torch, dtype)
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]] and model.bias.tolist() == [6, 7]


def test_a_parameter_in_another_memory_format_keeps_it() -> None:
    model = torch.nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    flat = flat_of(model)
    pull(flat, range(flat.layout.size))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.weight.flatten().tolist() == list(range(48))
    model.weight.grad = torch.arange(48.0).view(3, 4, 2, 2).to(memory_format=torch.channels_last)
    flat.gather()
    assert sent(flat)[:48].tolist() == list(range(48))


def test_a_model_that_is_converted_after_joining_still_gets_pulled_weights() -> None:
    model = torch.nn.Linear(3, 2)
    flat = flat_of(model)
    model.double()
    pull(flat, range(8))
    assert model.weight.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tied_frozen_unused_empty_and_foreign_parameters() -> None:
    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.out = torch.nn.Linear(3, 4, bias=False)
            self.out.weight = self.embed.weight  # tied
            self.frozen = torch.nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.unused = torch.nn.Parameter(torch.ones(2))
            self.empty = torch.nn.Parameter(torch.ones(0, 5))

        def forward(self, x: Any) -> Any:
            return self.out(self.frozen(self.embed(x)))

    model = Model()
    temperature = torch.nn.Parameter(torch.tensor(2.0))  # part of the loss, not of the model
    groups = [{"params": model.parameters()}, {"params": [temperature], "lr": 0.5}]
    flat = FlatModel(model, torch.optim.SGD(groups, lr=0.1))
    assert [(each.name, each.shape, each.group) for each in flat.layout.tensors] == [
        ("unused", (2,), 0),
        ("empty", (0, 5), 0),
        ("embed.weight", (4, 3), 0),
        ("group 1, parameter 3", (), 1),
    ]
    (model(torch.tensor([1, 2])).sum() / temperature).backward()
    assert model.embed.weight.grad is not None and temperature.grad is not None
    flat.gather()
    expected = [torch.zeros(2), model.embed.weight.grad.flatten(), temperature.grad.flatten()]
    assert torch.equal(sent(flat), torch.cat(expected))
    pull(flat, range(15))
    assert model.out.weight.flatten().tolist() == list(range(2, 14)) and temperature.item() == 14


def test_gathering_leaves_gradients_unchanged() -> None:
    model = torch.nn.Linear(3, 2)
    flat = flat_of(model)
    model(torch.ones(1, 3)).sum().backward()
    flat.gather()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize(("wire", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_gradients_can_be_sent_in_two_bytes(wire: str, bits: int) -> None:
    model = torch.nn.Linear(50, 20)
    flat = flat_of(model, gradients=wire)
    gradient = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    model.weight.grad = gradient.clone()
    flat.gather()
    assert len(flat.gradient_bytes()) == 2 * 1020
    torch.testing.assert_close(sent(flat)[:1000].view(20, 50), gradient, rtol=2.0**-bits, atol=1e-7)
    assert sent(flat)[1000:].tolist() == [0.0] * 20


def test_values_too_large_for_float16_become_its_largest_and_infinity_stays() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    flat = flat_of(model, gradients="float16")
    model.weight.grad = torch.tensor([[1e6, -1e6, 65504.0], [float("inf"), float("-inf"), float("nan")]])
    flat.gather()
    assert sent(flat)[:5].tolist() == [65504.0, -65504.0, 65504.0, float("inf"), float("-inf")]
    assert sent(flat)[5].isnan()


def test_an_unknown_type_for_gradients_is_refused() -> None:
    with pytest.raises(ValueError, match="Gradients can be sent as float32, bfloat16, float16; got 'int8'"):
        flat_of(torch.nn.Linear(3, 2), gradients="int8")


def test_a_sparse_gradient_is_refused() -> None:
    model = torch.nn.Embedding(5, 2, sparse=True)
    flat = flat_of(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"The gradient of 'weight' is sparse.*create its layer with sparse=False"):
        flat.gather()


def test_an_optimizer_without_parameters_to_train_is_refused() -> None:
    frozen = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        FlatModel(frozen, optimizer)
    with pytest.raises(ValueError, match="none of this model's parameters"):
        FlatModel(torch.nn.Linear(3, 2), torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1))


def test_a_lazy_model_is_refused_until_it_has_shapes() -> None:
    model = torch.nn.LazyLinear(2)
    with pytest.raises(ValueError, match="'weight' has no shape yet; run one batch"):
        flat_of(model)
    model(torch.ones(1, 3))
    assert flat_of(model).layout.size == 8


def test_a_complex_parameter_is_refused() -> None:
    model = torch.nn.Linear(3, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        flat_of(model)


# Statistics


class Normed(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.tensor([2**40 + 1, 5]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x))


def test_statistics_are_sent_as_values_and_pulled() -> None:
    model = Normed()
    flat = flat_of(model)
    statistics = [each.name for each in flat.layout.tensors if each.group == STATISTICS]
    assert statistics == ["table", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
    flat.gather()
    expected = torch.cat([model.norm.running_mean, model.norm.running_var, torch.tensor([1.0])])
    assert torch.equal(sent(flat)[-5:], expected)
    assert not torch.equal(sent(flat)[-5:-1], torch.tensor([0.0, 0.0, 1.0, 1.0]))
    values = torch.cat([flat.weights[:-5], torch.tensor([0.25, 0.5, 2.0, 3.0, 6.6])])
    pull(flat, values)
    assert model.norm.running_mean.tolist() == [0.25, 0.5] and model.norm.running_var.tolist() == [2.0, 3.0]
    assert model.norm.num_batches_tracked.item() == 7 and model.norm.num_batches_tracked.dtype == torch.int64
    assert model.table.tolist() == [2**40 + 1, 5]  # float32 cannot hold it, so it keeps its value


def test_a_statistic_that_was_replaced_is_found() -> None:
    model = Normed()
    flat = flat_of(model)
    model.norm.running_mean = torch.tensor([7.0, 8.0])
    flat.gather()
    assert sent(flat)[-5:-3].tolist() == [7.0, 8.0]
    pull(flat, flat.weights * 0 + 1)
    assert model.norm.running_mean.tolist() == [1.0, 1.0]


def test_statistics_that_overflowed_are_not_sent() -> None:
    model = Normed()
    flat = flat_of(model)
    model.norm.running_mean.copy_(torch.tensor([float("nan"), 0.5]))
    flat.gather()
    assert sent(flat)[-5:-3].tolist() == [0.0, 0.5]


def test_each_worker_can_keep_its_own_statistics() -> None:
    model = Normed()
    flat = flat_of(model, buffers=False)
    assert flat.layout.size == 10
    model.norm.running_mean.fill_(3.0)
    flat.gather()
    pull(flat, range(10))
    assert model.norm.running_mean.tolist() == [3.0, 3.0]


def test_the_digest_differs_if_a_tensor_that_is_not_sent_differs() -> None:
    def digest(change: str = "", buffers: bool = True) -> str:
        torch.manual_seed(0)
        model = Normed()
        model.linear.weight.requires_grad_(False)
        with torch.no_grad():
            if change == "frozen":
                model.linear.weight[1, 1] += 1
            elif change == "mask":
                model.mask.logical_not_()
            elif change == "sent":
                model.norm.running_mean += 1
                model.norm.weight += 1
        return flat_of(model, buffers=buffers).fixed

    assert digest() == digest() == digest("sent")
    assert len({digest(), digest("frozen"), digest("mask")}) == 3
    assert digest(buffers=False) == digest("mask", buffers=False) != digest("frozen", buffers=False)
