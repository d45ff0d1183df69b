"""Speech Commands: ten spoken words, each a folder of WAV files, as images of their log-mel features."""

from __future__ import annotations

import io
import math
import os
import wave
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from paceline.workloads.errors import DataError
from paceline.workloads.files import Bytes, FileSet, find, opened, read_rest

Clip = NDArray[np.int16]

#: The words to distinguish, in the order of their labels. Other words of the data set are ignored.
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
FILE_SET = FileSet(
    "speech",
    ("testing_list.txt", "validation_list.txt"),
    (
        "speech_commands_v0.02",
        "SpeechCommands/speech_commands_v0.02",
        "speech_commands_v0.01",
        "SpeechCommands/speech_commands_v0.01",
        "speech_commands",
        "SpeechCommands",
        "speech-commands",
        "speech",
    ),
)

#: Samples per second, which is also the length of a clip.
RATE = 16_000
#: Samples in a window of 25 ms, and between the starts of two windows, 10 ms.
WINDOW, HOP = 400, 160
#: A window is padded with zeros to this length, so that the lowest bands, 90 Hz wide, have two or three points each.
POINTS = 512
FRAMES = 1 + (RATE - WINDOW) // HOP
BANDS = 40
LOWEST, HIGHEST = 20.0, 8000.0
#: Added to every energy, so that silence has a logarithm.
SILENCE = 1e-6
#: The range of features. The squares of a Hann window add up to 3/8 of its length, and samples are at most 1. So, by
#: Parseval's theorem, the powers of a frame over all frequencies of a band add up to at most that · POINTS / 2.
MIN_LEVEL, MAX_LEVEL = math.log(SILENCE), math.log(SILENCE + 3 / 8 * WINDOW * POINTS / 2)
#: Clips that are transformed at once. This takes about 250 MB, independent of the number of clips.
BATCH = 128


def load(folder: Path | None) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return images (N, 1, 98, 40) and labels (N,) for training, and the same for testing.

    A row of an image is 10 ms and a column is a band. Images are sorted by file name and then by word. A file name
    begins with its speaker, so the words are mixed.
    """
    testing, validation = find(FILE_SET, folder)
    place = testing.parent
    clips = {f"{word}/{name}" for word in WORDS for name in _names(place / word)}
    tests, others = (_listed(path, clips) for path in (testing, validation))
    if not tests:
        raise DataError(f"{testing} names no clip of {', '.join(WORDS)}. Download it again.")
    # The validation clips are left out, because published results come from networks that did not train on them.
    training = clips - tests - others
    if not training:
        raise DataError(f"{place} has no training clips, only those in its lists. Extract the data set again.")
    return (*_read(place, training), *_read(place, tests))


def clip(path: Path) -> Clip:
    """Return one second of sound from a WAV file. A shorter clip is padded with zeros; a longer one is cut."""
    wanted = f"1-channel 16-bit PCM at {RATE:,} Hz"
    with opened(path) as (stream, size):
        assert size is not None, "Speech Commands is never packed"
        content = read_rest(path, stream, 0, size).tobytes()
    try:
        with wave.open(io.BytesIO(content)) as sound:
            channels, width, rate, count, *_ = sound.getparams()
            frames = sound.readframes(count)
    except (wave.Error, EOFError, RuntimeError) as error:  # the last two are raised for wrong sizes, without a text
        why = str(error) or "it ends too early"
        raise DataError(f"{path} is not a WAV file of {wanted} ({why}). Download it again.") from None
    if (channels, width, rate) != (1, 2, RATE):
        raise DataError(
            f"{path} is {channels}-channel {8 * width}-bit PCM at {rate:,} Hz and should be {wanted}. Download it "
            "again."
        )
    if len(frames) != 2 * count or not count:
        raise DataError(
            f"{path} has {len(frames) // 2:,} samples and should have {count or RATE:,}. Download it again."
        )
    samples = np.zeros(RATE, np.int16)
    samples[:count] = np.frombuffer(frames, np.int16)[:RATE]
    return samples


def log_mel(clips: torch.Tensor) -> torch.Tensor:
    """Return the features (N, 98, 40) of int16 clips (N, 16000): the logarithm of the energy in each band, by window.

    Hann windows cover the samples from the first to the last, without padding beyond them. Bands are triangles over
    frequency with a height of 1. Each reaches from the centre of the band below to the centre of the band above. The
    centres are evenly spaced in HTK's mels, 2595 log10(1 + f / 700), from 20 Hz to 8 kHz.

    The computation is in float64. A feature is then hardly ever so close to the boundary of two pixel values that
    machines could disagree about it.
    """
    sound = clips.to(torch.float64) / 2**15
    around = (POINTS - WINDOW) // 2  # torch centres a short window in its points, so this many are before it
    spectrum = torch.stft(
        F.pad(sound, (around, around)),
        POINTS,
        HOP,
        WINDOW,
        torch.hann_window(WINDOW, dtype=torch.float64),
        center=False,
        return_complex=True,
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return torch.log(power.transpose(1, 2) @ bands() + SILENCE)


def bands() -> torch.Tensor:
    """Return the weight of each frequency (257) in each band (40)."""
    lowest, highest = (2595 * math.log10(1 + frequency / 700) for frequency in (LOWEST, HIGHEST))
    edges = 700 * (10 ** (torch.linspace(lowest, highest, BANDS + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.arange(POINTS // 2 + 1, dtype=torch.float64)[:, None] * RATE / POINTS
    below, middle, above = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequencies - below) / (middle - below), (above - frequencies) / (above - middle)
    return torch.minimum(rising, falling).clamp(min=0)


def pixels(features: torch.Tensor) -> torch.Tensor:
    """Return features as uint8, spread evenly over their possible range.

    Sound can then be used like any data set of images, in a quarter of the memory of float32. A pixel is off by at most
    half a step: 0.048, or 0.2 dB, in a range from -13.8 to 10.6.
    """
    return ((features - MIN_LEVEL) * (255 / (MAX_LEVEL - MIN_LEVEL))).round().to(torch.uint8)


def _names(folder: Path) -> list[str]:
    """Return the names of the WAV files in a word's folder: at least one."""
    try:
        # Some systems add a hidden metadata file for each file.
        found = [each for each in os.listdir(folder) if each.endswith(".wav") and not each.startswith(".")]
    except OSError:
        found = []
    if not found:
        raise DataError(
            f"{folder} must be a folder with WAV files, like those of {', '.join(WORDS)}. Extract the data set again."
        )
    return found


def _listed(path: Path, clips: set[str]) -> set[str]:
    """Return the clips in a list. Raise DataError if one of them does not exist, because the data set is incomplete."""
    with opened(path) as (stream, size):
        assert size is not None, "Speech Commands is never packed"
        lines = read_rest(path, stream, 0, size).tobytes().decode(errors="replace").splitlines()
    named = {line for line in lines if line.split("/")[0] in WORDS}
    if missing := named - clips:
        raise DataError(f"{path} names {min(missing)!r:.80}, which does not exist. Extract the data set again.")
    return named


def _read(place: Path, names: set[str]) -> tuple[Bytes, Bytes]:
    clips = sorted((name, word) for word, name in (each.split("/", 1) for each in names))
    images = np.empty((len(clips), 1, FRAMES, BANDS), np.uint8)
    for start in range(0, len(clips), BATCH):  # in pieces, because sound and spectra need far more memory
        some = np.stack([clip(place / word / name) for name, word in clips[start : start + BATCH]])
        images[start : start + BATCH, 0] = pixels(log_mel(torch.from_numpy(some))).numpy()
    return images, np.array([WORDS.index(word) for _, word in clips], np.uint8)
