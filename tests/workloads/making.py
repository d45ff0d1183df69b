"""Synthetic data sets and their files, for tests."""

from __future__ import annotations

import gzip
import io
import struct
import wave
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.workloads.data import Data

Bytes = NDArray[np.uint8]
Samples = NDArray[np.int16]
#: The words of `speech`, in the order of their labels.
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")


def idx(content: Bytes) -> bytes:
    """Return the bytes of an IDX file."""
    return bytes((0, 0, 8, content.ndim)) + struct.pack(f">{content.ndim}I", *content.shape) + content.tobytes()


def write_idx(folder: Path, seed: int = 0, packed: bool = False, count: int = 12) -> dict[str, Bytes]:
    """Write the four files of a data set like MNIST, with half as many test samples. Return their contents."""
    random = np.random.RandomState(seed)
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Bytes] = {}
    for part, samples in (("train", count), ("t10k", count // 2)):
        written[f"{part}-images-idx3-ubyte"] = random.randint(256, size=(samples, 28, 28)).astype(np.uint8)
        written[f"{part}-labels-idx1-ubyte"] = random.randint(10, size=samples).astype(np.uint8)
    for name, content in written.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(content), 1))
        else:
            (folder / name).write_bytes(idx(content))
    return written


CIFAR_FILES = {
    "cifar10": [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"],
    "cifar100": ["train.bin", "test.bin"],
}


def write_cifar(folder: Path, name: str, count: int = 3) -> dict[str, Bytes]:
    """Write the files of a CIFAR data set with `count` records each. Return the records of each file, one per row."""
    random = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for file in CIFAR_FILES[name]:
        labels = [random.randint(10, size=count)] if name == "cifar10" else []
        if name == "cifar100":
            labels = [random.randint(20, size=count), random.randint(20, 100, size=count)]  # coarse, fine
        records = np.column_stack([*labels, random.randint(256, size=(count, 3072))]).astype(np.uint8)
        (folder / file).write_bytes(records.tobytes())
        written[file] = records
    return written


def images(channels: int, side: int, samples: int = 8, classes: int = 10) -> Data:
    """Return a data set of random images."""
    random = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.randint(256, (count, channels, side, side), generator=random, dtype=torch.uint8)
        return pixels, torch.randint(classes, (count,), generator=random)

    half, deviation = (0.5,) * channels, (0.29,) * channels
    return Data("made", *some(samples), *some(4), classes, half, deviation)


def wav(samples: Samples, rate: int = 16_000, channels: int = 1, width: int = 2) -> bytes:
    """Return the bytes of a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((channels, width, rate, 0, "NONE", ""))
        sound.writeframes(samples.tobytes())
    return file.getvalue()


def spoken(word: int, random: np.random.RandomState) -> Samples:
    """Return a second of noise with a whistle of one of five pitches, which rises for one word and falls for another.

    So the words can be told apart only by the order of sounds in time.
    """
    length, lowest = 6400, 300 * 1.6 ** (word // 2)
    pitch = np.geomspace(lowest, 1.5 * lowest, length)[:: 1 if word % 2 == 0 else -1]
    whistle = np.sin(2 * np.pi * (np.cumsum(pitch) / 16_000 + random.random_sample())) * np.hanning(length)
    sound = 0.01 * random.standard_normal(16_000)
    start = random.randint(16_000 - length)
    sound[start : start + length] += random.uniform(0.1, 0.9) * whistle
    return (sound * 30_000).clip(-(2**15), 2**15 - 1).astype(np.int16)


def write_speech(folder: Path, speakers: int = 4) -> dict[str, Samples]:
    """Write a data set like Speech Commands, where every speaker says every word once. Return the sound in each file.

    The last speaker is for testing and the one before for validation, as the lists say.
    """
    random = np.random.RandomState(0)
    written = {}
    for speaker in range(speakers):
        for number, word in enumerate(WORDS):
            written[f"{word}/{speaker:08x}_nohash_0.wav"] = spoken(number, random)
    for name, samples in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(wav(samples))
    for file, speaker in (("testing_list.txt", speakers - 1), ("validation_list.txt", speakers - 2)):
        (folder / file).write_text("".join(f"{name}\n" for name in written if f"/{speaker:08x}_" in name))
    return written
