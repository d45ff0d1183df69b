"""Cutting a saved model again changes no bit of it, whichever shards wrote it and whichever shards read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from paceline.model import checkpoint
from paceline.model.checkpoint import DamagedError
from paceline.model.checkpoint_pieces import load_pieces
from paceline.model.correction import PREDICTED
from paceline.model.description import Description
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer import spec_of
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise
from paceline.model.parts import optimizer_parts
from paceline.model.recut import IncompleteError, SavedPiece, cut_again
from paceline.model.slice import NEWEST, Slice
from tries import tries

Range = tuple[int, int]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.5, "nesterov": True}],
    "Adam": [{"betas": (0.8, 0.9)}, {"weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}, {"amsgrad": True, "betas": (0.5, 0.7)}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{"momentum_decay": 0.1}, {}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adagrad": [{"initial_accumulator_value": 0.1}, {"lr_decay": 0.1}],
    "Adadelta": [{"rho": 0.5}, {}],
    "RMSprop": [{"centered": True}, {"momentum": 0.5}],
    "Rprop": [{}, {"etas": (0.4, 1.3)}],
    "ASGD": [{"t0": 1.0}, {"weight_decay": 0.1}],
    "Adafactor": [{}, {"weight_decay": 0.1}],
}
RATES = (0.05, 0.02)
#: torch's fused kernels round the last few elements of a buffer differently, so their steps depend on where it is cut.
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def spec_for(name: str) -> OptimizerSpec:
    """The specification of a live optimizer, as a worker would send it."""
    groups = [{"params": [torch.zeros(1)], "lr": rate, **own} for rate, own in zip(RATES, SETTINGS[name], strict=True)]
    return spec_of(getattr(torch.optim, name)(groups))


def sizes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any few tensors of two parameter groups and of running statistics, in any order."""
    drawn = draw(st.lists(st.tuples(sizes(), st.sampled_from((0, 0, 1, STATISTICS))), min_size=1, max_size=7))
    return Layout(tuple(Tensor(f"t{index}", shape, group=group) for index, (shape, group) in enumerate(drawn)))


def cuts(layout: Layout, anywhere: bool) -> st.SearchStrategy[list[Range]]:
    """Any way to cut a model into pieces without gaps, in any order."""
    inside = range(1, layout.size) if anywhere else [each for each in layout.offsets if 0 < each < layout.size]
    places = st.lists(st.sampled_from(list(inside)), unique=True, max_size=6) if inside else st.just([])
    return places.map(lambda ends: list(pairwise([0, *sorted(ends), layout.size]))).flatmap(st.permutations)


def random(layout: Layout, seed: int) -> Any:
    return torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))


def trained(layout: Layout, spec: OptimizerSpec, ranges: Sequence[Range], steps: int, correct: Any) -> list[Slice]:
    made = []
    for start, stop in ranges:
        one = Slice(layout, start, stop, spec)
        one.weights.copy_(random(layout, 0)[start:stop])
        made.append(one)
    for step in range(steps):
        step_all(made, layout, step, correct)
    return made


def step_all(slices: Sequence[Slice], layout: Layout, step: int, correct: Any = "none") -> None:
    for one in slices:
        gradients = [random(layout, 10 * step + each)[one.start : one.stop] for each in (1, 2)]
        one.step(gradients, (0.25, 0.5), RATES, correct, turns=3)


def saved(one: Slice) -> SavedPiece:
    tensors, meta = one.state()
    copies = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    return SavedPiece.of(copies, json.loads(json.dumps(meta)))


def again(layout: Layout, spec: OptimizerSpec, ranges: Sequence[Range], pieces: Sequence[SavedPiece]) -> list[Slice]:
    """Slices of another cut, each loaded by a shard of its own."""
    made = []
    for start, stop in ranges:
        arrays, meta = cut_again(layout, spec, [(start, stop)], pieces)
        one = Slice(layout, start, stop, spec)
        tensors = {name.removeprefix("0/"): torch.from_numpy(array) for name, array in arrays.items()}
        one.load(tensors, json.loads(json.dumps(meta["pieces"][0])))
        made.append(one)
    return made


def joined(slices: Sequence[Slice]) -> Any:
    return torch.cat([one.weights for one in sorted(slices, key=lambda one: one.start)])


def of_elements(layout: Layout, spec: OptimizerSpec, slices: Sequence[Slice]) -> dict[str, dict[int, bytes]]:
    """Every value of the model and of its optimizer, bit for bit: name → first element → value."""
    found: dict[str, dict[int, bytes]] = {}
    for one in slices:
        tensors, meta = one.state()
        last = repr(meta.get("last", {"rates": list(RATES), "turns": 1, "decay": 1.0})).encode()
        found.setdefault("last", {}).update(dict.fromkeys(range(one.start, one.stop), last))
        parts = optimizer_parts(layout, one.start, one.stop, spec)
        for name, value in (*tensors.items(), *meta["others"].items()):  # type: ignore[attr-defined]
            if name in ("weights", NEWEST):
                start, stop, key = one.start, one.stop, name
            else:
                index, _, key = name.partition(".")
                start, stop = parts[int(index)].start, parts[int(index)].stop
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == stop - start:
                values = [each.tobytes() for each in value.numpy().reshape(-1)]
                found.setdefault(key, {}).update(zip(range(start, stop), values, strict=True))
            elif is_elementwise(spec.name):  # a number that all elements share
                shared = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
                found.setdefault(key, {}).update(dict.fromkeys(range(start, stop), shared))
            else:
                found.setdefault(key, {})[start] = repr(value.tolist()).encode()
    return found


@tries(15, 100, derandomize=False)
@given(st.data())
def test_no_bit_changes_when_a_model_is_cut_again(data: st.DataObject) -> None:
    spec = spec_for(data.draw(st.sampled_from(sorted(SETTINGS)), "optimizer"))
    layout = data.draw(layouts(), "layout")
    anywhere = is_elementwise(spec.name)
    old, new = (data.draw(cuts(layout, anywhere), which) for which in ("old", "new"))
    corrections = ("none", "full") if spec.name in PREDICTED else ("none",)
    correct = data.draw(st.sampled_from(corrections), "correct")
    before = trained(layout, spec, old, data.draw(st.integers(0, 3), "steps"), correct)
    after = again(layout, spec, new, [saved(one) for one in before])
    assert of_elements(layout, spec, after) == of_elements(layout, spec, before)
    back = again(layout, spec, old, [saved(one) for one in after])
    for one, first in zip(back, before, strict=True):
        tensors, expected = one.state(), first.state()
        assert tensors[1] | expected[1] == tensors[1] and tensors[0].keys() == expected[0].keys()
        assert all(torch.equal(value, expected[0][name]) for name, value in tensors[0].items())
    for each in (before, after, back):
        step_all(each, layout, 7, correct)
    assert of_elements(layout, spec, back) == of_elements(layout, spec, before), (
        "the job goes on as if nothing had been"
    )
    if spec.name in FUSED:
        torch.testing.assert_close(joined(after), joined(before), rtol=1e-5, atol=1e-6)
    else:
        assert of_elements(layout, spec, after) == of_elements(layout, spec, before)


def test_a_piece_that_has_made_more_steps_gives_the_shared_numbers() -> None:
    """Pieces differ in their steps if a streamed push was cut off."""
    layout = Layout((Tensor("a", (10,)),))
    spec = OptimizerSpec("Adam", ({"lr": 0.1},))
    first, second = (Slice(layout, *ends, spec) for ends in ((0, 4), (4, 10)))
    for one, steps in ((first, 2), (second, 3)):
        for _ in range(steps):
            one.step([torch.ones(len(one.weights))], [1.0], [0.1 * steps])
    (one,) = again(layout, spec, [(0, 10)], [saved(second), saved(first)])
    tensors, meta = one.state()
    assert tensors["0.step"] == 3 and meta["last"]["rates"] == [0.1 * 3]  # type: ignore[index]
    assert torch.equal(tensors["0.exp_avg"], torch.cat([each.state()[0]["0.exp_avg"] for each in (first, second)]))


def test_a_piece_without_a_step_has_the_state_of_a_step_without_a_gradient() -> None:
    layout = Layout((Tensor("a", (6,)),))
    spec = OptimizerSpec("Adagrad", ({"lr": 0.1, "initial_accumulator_value": 0.5},))
    first, second = (Slice(layout, *ends, spec) for ends in ((0, 2), (2, 6)))
    second.step([torch.ones(4)], [1.0], [0.1])
    pieces = [saved(first), saved(second)]
    arrays, _ = cut_again(layout, spec, [(0, 6)], pieces)
    assert arrays["0/0.sum"].tolist() == [0.5, 0.5, 1.5, 1.5, 1.5, 1.5]


def test_the_newest_gradient_is_left_out_if_a_piece_lacks_it() -> None:
    layout = Layout((Tensor("a", (6,)),))
    spec = OptimizerSpec("SGD", ({"lr": 0.1, "momentum": 0.9},))
    first, second = (Slice(layout, *ends, spec) for ends in ((0, 2), (2, 6)))
    first.step([torch.ones(2)], [1.0], [0.1], "full", turns=2)
    second.step([torch.ones(4)], [1.0], [0.1], "none")
    pieces = [saved(first), saved(second)]
    assert "0/newest" in cut_again(layout, spec, [(0, 2)], pieces)[0]
    assert "0/newest" not in cut_again(layout, spec, [(0, 6)], pieces)[0]


def test_pieces_of_another_model_or_optimizer_are_refused() -> None:
    layout, other = Layout((Tensor("a", (6,)),)), Layout((Tensor("b", (6,)),))
    adam, sgd = (OptimizerSpec(name, ({"lr": 0.1},)) for name in ("Adam", "SGD"))
    pieces = [saved(Slice(layout, 0, 6, adam))]
    with pytest.raises(ValueError, match="of another model"):
        cut_again(other, adam, [(0, 6)], pieces)
    with pytest.raises(ValueError, match="of Adam, and this run uses SGD"):
        cut_again(layout, sgd, [(0, 6)], pieces)


LAYOUT = Layout((Tensor("a", (20,)), Tensor("mean", (3,), group=STATISTICS), Tensor("b", (4, 5), group=1)))


def write(folder: Path, spec: OptimizerSpec, shards: Sequence[Sequence[Range]]) -> tuple[Path, list[str], list[Slice]]:
    """Write the parts of a checkpoint, and return its folder, its digests and the slices that it holds."""
    part, digests, slices = checkpoint.begin(folder, 3), [], list[Slice]()
    for number, ranges in enumerate(shards):
        own = trained(LAYOUT, spec, ranges, 3, "none")
        states = [one.state() for one in own]
        tensors = {f"{at}/{name}": each.numpy() for at, (its, _) in enumerate(states) for name, each in its.items()}
        digests.append(checkpoint.save_shard(part, number, tensors, {"pieces": [meta for _, meta in states]}).digest)
        slices += own
    return part, digests, slices


def load(folder: Path, digests: Sequence[str], spec: OptimizerSpec, ranges: Sequence[Range]) -> list[Slice]:
    arrays, meta = load_pieces(folder, digests, Description(LAYOUT, spec), ranges)
    made = []
    for number, (start, stop) in enumerate(ranges):
        prefix, one = f"{number}/", Slice(LAYOUT, start, stop, spec)
        mine = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        one.load({name: torch.from_numpy(array) for name, array in mine.items()}, meta["pieces"][number])
        made.append(one)
    return made


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adafactor"])
def test_files_of_three_shards_are_read_by_one_two_and_five(name: str, tmp_path: Path) -> None:
    spec, anywhere = spec_for(name), is_elementwise(name)
    described = Description(LAYOUT, spec)
    folder, digests, slices = write(tmp_path, spec, described.deal(3, 1))
    for shards in (1, 2, 5 if anywhere else 3):
        dealt = described.deal(shards, 1)
        read = [one for ranges in dealt for one in load(folder, digests, spec, ranges)]
        assert of_elements(LAYOUT, spec, read) == of_elements(LAYOUT, spec, slices)


def test_a_shard_reads_no_more_of_a_file_than_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_for("Adam")
    folder, digests, _ = write(tmp_path, spec, [[(0, 7), (30, 43)], [(7, 30)]])
    read = list[Any]()

    def note(tensors: dict[str, Any]) -> str:
        read.extend(tensors.values())
        return ""

    monkeypatch.setattr("paceline.model.checkpoint_pieces.not_finite", note)
    load(folder, ["", digests[1]], spec, [(8, 12)])
    assert max(array.size for array in read) == 4
    digests[0] = "of another file"  # which this shard does not need
    load(folder, digests, spec, [(8, 12)])


def test_a_damaged_or_incomplete_set_of_files_is_refused_in_one_sentence(tmp_path: Path) -> None:
    spec = spec_for("SGD")
    folder, digests, _ = write(tmp_path, spec, [[(0, 20)], [(20, 43)]])
    first, second = (checkpoint.shard_file(folder, number) for number in (0, 1))
    with pytest.raises(
        DamagedError, match=r"is damaged: its parts do not hold .* elements 0 to 43 of the model once\.$"
    ):
        load(folder, digests[:1], spec, [(0, 43)])
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(DamagedError, match=r"the content of shard-1.safetensors does not match its digest\.$"):
        load(folder, digests, spec, [(0, 43)])
    with pytest.raises(DamagedError, match="do not hold each of the elements 10 to 43"):
        load(folder, ["", ""], spec, [(10, 43)])
    second.write_bytes(content[:100])
    with pytest.raises(DamagedError, match=r"shard-1\.safetensors cannot be read"):
        load(folder, digests, spec, [(0, 43)])
    checkpoint.save_shard(folder, 1, {"0/weights": np.zeros(23, np.float32)}, {})
    with pytest.raises(DamagedError, match=r"shard-1\.safetensors does not say which pieces it holds"):
        load(folder, ["", ""], spec, [(0, 43)])
    second.unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"shard-1.safetensors cannot be read: No such file"):
        load(folder, digests, spec, [(0, 43)])


def test_a_piece_that_lacks_what_its_optimizer_needs_is_refused() -> None:
    layout, spec = Layout((Tensor("a", (6,)),)), OptimizerSpec("Adam", ({"lr": 0.1},))
    one = Slice(layout, 0, 6, spec)
    one.step([torch.ones(6)], [1.0], [0.1])
    tensors, meta = one.state()
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for broken, changed, sentence in (
        ({**arrays, "weights": arrays["weights"][1:]}, meta, "the piece from 0 to 6 has no weights of that size"),
        ({**arrays, "0.exp_avg": arrays["0.exp_avg"][1:]}, meta, "the piece from 0 to 6 has no 'exp_avg' of its size"),
        (arrays, {**meta, "others": None}, "the piece from 0 to 6 does not say what it holds"),
    ):
        with pytest.raises(IncompleteError, match=sentence):
            cut_again(layout, spec, [(0, 6)], [SavedPiece.of(broken, changed)])
