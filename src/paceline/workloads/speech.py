"""Speech Commands: ten spoken words, a folder of WAV files each, as pictures of their sound (log-mel features)."""

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
from paceline.workloads.files import Bytes, Home, find, opened, rest

Clip = NDArray[np.int16]

#: The words that are told apart, in the order of their labels. The set has others too, which are left alone.
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
HOME = Home(
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

#: Samples a second, and in a clip.
RATE = 16_000
#: Samples in a window of 25 ms, and from one to the next, 10 ms on.
WINDOW, HOP = 400, 160
#: A window is transformed with zeros around it: with 512 points the lowest bands, 90 Hz wide, have two or three each.
POINTS = 512
FRAMES = 1 + (RATE - WINDOW) // HOP
BANDS = 40
LOWEST, HIGHEST = 20.0, 8000.0
#: Added to an energy, so that silence has a logarithm.
SILENCE = 1e-6
#: Between these lies every feature. A Hann window's squares add up to 3/8 of its length, samples reach to 1, and so, by
#: Parseval, the powers of one frame at all frequencies that a band takes in add up to no more than that * POINTS / 2.
MIN_LEVEL, MAX_LEVEL = math.log(SILENCE), math.log(SILENCE + 3 / 8 * WINDOW * POINTS / 2)
#: Clips that are transformed at once: some 250 MB while it lasts, however many there are in all.
BATCH = 128


def load(folder: Path | None) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Images (N, 1, 98, 40) and labels (N,) to train with, and the same to test with: a row is 10 ms, a column a band.

    They come by file name and then by word. A name begins with its speaker, so words are mixed from the first on.
    """
    testing, validation = find(HOME, folder)
    place = testing.parent
    clips = {f"{word}/{name}" for word in WORDS for name in _names(place / word)}
    tests, others = (_listed(path, clips) for path in (testing, validation))
    if not tests:
        raise DataError(f"{testing} names no clip of {', '.join(WORDS)}: fetch it again")
    # What there is to validate with is left out: published results are of networks that were not trained with it.
    training = clips - tests - others
    if not training:
        raise DataError(f"{place} has no clips to train with, only those that its lists name: unpack the set again")
    return (*_read(place, training), *_read(place, tests))


def clip(path: Path) -> Clip:
    """The second of sound in a WAV file: with zeros behind it if it is shorter, and cut if it is longer."""
    wanted = f"1-channel 16-bit PCM at {RATE:,} Hz"
    with opened(path) as (stream, size):
        assert size is not None, "these are never packed"
        content = rest(path, stream, 0, size).tobytes()
    try:
        with wave.open(io.BytesIO(content)) as sound:
            channels, width, rate, count, *_ = sound.getparams()
            frames = sound.readframes(count)
    except (wave.Error, EOFError, RuntimeError) as error:  # The last two, with nothing to say, are for sizes that lie.
        why = str(error) or "it ends too early"
        raise DataError(f"{path} is no WAV file of {wanted} ({why}): fetch it again") from None
    if (channels, width, rate) != (1, 2, RATE):
        raise DataError(
            f"{path} is {channels}-channel {8 * width}-bit PCM at {rate:,} Hz and should be {wanted}: fetch it again"
        )
    if len(frames) != 2 * count or not count:
        raise DataError(f"{path} has {len(frames) // 2:,} samples and should have {count or RATE:,}: fetch it again")
    samples = np.zeros(RATE, np.int16)
    samples[:count] = np.frombuffer(frames, np.int16)[:RATE]
    return samples


def log_mel(clips: torch.Tensor) -> torch.Tensor:
    """The features (N, 98, 40) of clips (N, 16000) of int16: the logarithm of the energy in each band, by window.

    Windows are Hann's, from the first sample to the last, with nothing made up beyond them. Bands are triangles over
    frequency, as high as 1, each from the middle of the one below to the middle of the one above; middles are evenly
    spaced in mels as HTK has them, 2595 log10(1 + f / 700), from 20 Hz to 8 kHz.

    In float64, because then a feature is hardly ever so near to the border of two pixel values that it could be one on
    this machine and the other on that.
    """
    sound = clips.to(torch.float64) / 2**15
    around = (POINTS - WINDOW) // 2  # torch has a short window in the middle of its points, so that many are before it.
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
    """How much of each frequency (257,) each band (40,) takes in."""
    lowest, highest = (2595 * math.log10(1 + frequency / 700) for frequency in (LOWEST, HIGHEST))
    edges = 700 * (10 ** (torch.linspace(lowest, highest, BANDS + 2, dtype=torch.float64) / 2595) - 1)
    frequencies = torch.arange(POINTS // 2 + 1, dtype=torch.float64)[:, None] * RATE / POINTS
    below, middle, above = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequencies - below) / (middle - below), (above - frequencies) / (above - middle)
    return torch.minimum(rising, falling).clamp(min=0)


def pixels(features: torch.Tensor) -> torch.Tensor:
    """Features as uint8, evenly from the least that there can be to the most.

    So sound is one more set of images to whatever takes those, in a quarter of the room that float32 would need. A
    pixel is off by half a step at most: by 0.048, which is 0.2 dB, where features go from -13.8 to 10.6.
    """
    return ((features - MIN_LEVEL) * (255 / (MAX_LEVEL - MIN_LEVEL))).round().to(torch.uint8)


def _names(folder: Path) -> list[str]:
    """The WAV files in a word's folder: at least one."""
    try:
        # Some systems leave a file of notes beside each one, with a dot before its name.
        found = [each for each in os.listdir(folder) if each.endswith(".wav") and not each.startswith(".")]
    except OSError:
        found = []
    if not found:
        raise DataError(
            f"{folder} should be a folder with WAV files, as there is one for each of {', '.join(WORDS)}: unpack the "
            "set again"
        )
    return found


def _listed(path: Path, clips: set[str]) -> set[str]:
    """Those of the clips that a list names. One of the words that is not there is refused: the set is not whole."""
    with opened(path) as (stream, size):
        assert size is not None, "these are never packed"
        lines = rest(path, stream, 0, size).tobytes().decode(errors="replace").splitlines()
    named = {line for line in lines if line.split("/")[0] in WORDS}
    if missing := named - clips:
        raise DataError(f"{path} names {min(missing)!r:.80}, which is not beside it: unpack the set again")
    return named


def _read(place: Path, names: set[str]) -> tuple[Bytes, Bytes]:
    clips = sorted((name, word) for word, name in (each.split("/", 1) for each in names))
    images = np.empty((len(clips), 1, FRAMES, BANDS), np.uint8)
    for start in range(0, len(clips), BATCH):  # in pieces, because their sound and spectra need far more room
        some = np.stack([clip(place / word / name) for name, word in clips[start : start + BATCH]])
        images[start : start + BATCH, 0] = pixels(log_mel(torch.from_numpy(some))).numpy()
    return images, np.array([WORDS.index(word) for _, word in clips], np.uint8)
