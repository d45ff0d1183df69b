"""Random crops and mirror images of CIFAR-10."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paceline.workloads.augmentation import OFFSETS, PADDING, VARIANTS, Crops, draw, samples_of
from paceline.workloads.data import Data, load
from paceline.workloads.errors import DataError


def images(count: int = 5, size: int = 6) -> Data:
    pixels = torch.randint(1, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count)
    inputs = pixels.to(torch.uint8)
    return Data("made", inputs, labels, inputs, labels, count, (0.5,) * 3, (0.2,) * 3)


def test_every_variant_is_the_crop_that_its_number_says() -> None:
    data = images()
    crops = Crops(data)
    padded = torch.nn.functional.pad(data.inputs, (PADDING,) * 4)
    for crop in range(VARIANTS):
        variants = torch.tensor([4, 0, 2]) * VARIANTS + crop
        down, right, mirrored = crop % OFFSETS, crop // OFFSETS % OFFSETS, crop >= OFFSETS**2
        expected = padded[[4, 0, 2], :, down : down + 6, right : right + 6]
        assert torch.equal(crops.images(variants), expected.flip(-1) if mirrored else expected)
        assert samples_of(variants).tolist() == [4, 0, 2]


def test_the_middle_crop_is_the_image() -> None:
    data = images()
    middle = PADDING + PADDING * OFFSETS
    assert torch.equal(Crops(data).images(torch.arange(5) * VARIANTS + middle), data.inputs)


def test_all_variants_are_drawn_about_equally_often() -> None:
    drawn = draw(torch.zeros(VARIANTS * 200, dtype=torch.int64), torch.Generator().manual_seed(1))
    counts = torch.bincount(drawn, minlength=VARIANTS)
    assert len(counts) == VARIANTS and 120 < counts.min() and counts.max() < 280


def test_tokens_cannot_be_cropped() -> None:
    with pytest.raises(DataError, match="Only images"):
        Crops(load("tokens"))
