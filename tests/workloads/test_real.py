"""The real data sets, if PACELINE_DATA says where they are."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from paceline.workloads import cifar, data, files, idx, speech
from paceline.workloads.errors import DataError

#: Training samples, published mean and deviation, the first labels, and the samples per class.
KNOWN: dict[str, tuple[int, list[float], list[float], list[int], int | None]] = {
    "mnist": (60_000, [0.1307], [0.3081], [5, 0, 4, 1, 9], None),
    "fashion-mnist": (60_000, [0.2860], [0.3530], [9, 0, 0, 3, 0], 6000),
    "cifar10": (50_000, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616], [6, 9, 9, 4, 1], 5000),
    "cifar100": (50_000, [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762], [19, 29, 0, 11, 1], 500),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_real_data_set_has_its_published_numbers(name: str) -> None:
    if not os.environ.get(files.VARIABLE):
        pytest.skip(f"{files.VARIABLE} is not set; it names the folder of the real data sets")
    try:
        files.find((idx.FILE_SETS | cifar.FILE_SETS)[name], None)
    except DataError as missing:
        pytest.skip(str(missing))
    samples, mean, deviation, first, per_class = KNOWN[name]
    loaded = data.load(name)
    assert (len(loaded.inputs), len(loaded.labels)) == (samples, samples)
    assert (len(loaded.test_inputs), len(loaded.test_labels)) == (10_000, 10_000)
    assert loaded.mean == pytest.approx(mean, abs=1e-4) and loaded.deviation == pytest.approx(deviation, abs=1e-4)
    assert loaded.labels[:5].tolist() == first
    if per_class:
        assert set(loaded.labels.bincount().tolist()) == {per_class}


def test_real_speech_commands_have_their_published_numbers() -> None:
    if not os.environ.get(files.VARIABLE):
        pytest.skip(f"{files.VARIABLE} is not set; it names the folder of the real data sets")
    try:
        testing, _ = files.find(speech.FILE_SET, None)
    except DataError as missing:
        pytest.skip(str(missing))
    if testing.parent.name != "speech_commands_v0.02":
        pytest.skip(
            f"{testing.parent} is not named speech_commands_v0.02, and only the numbers of that version are known here"
        )
    loaded = data.load("speech")
    assert (len(loaded.labels), len(loaded.test_labels)) == (30_769, 4074)
    assert loaded.inputs.shape == (30_769, 1, 98, 40)
    assert loaded.labels.bincount(minlength=10).min() > 2500 and set(loaded.labels[:1000].tolist()) == set(range(10))
