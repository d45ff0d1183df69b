"""Speech Commands: where files are found, the features of their sound, and how bad files are refused."""

from __future__ import annotations

import math
import re
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("torch")
import torch

import threads
from paceline.workloads import data, files, networks, speech
from paceline.workloads.errors import DataError
from tries import tries
from workloads import making

STEP = (speech.MAX_LEVEL - speech.MIN_LEVEL) / 255
CLIP = "stop/00000000_nohash_0.wav"  # a training clip
WANTED = "1-channel 16-bit PCM at 16,000 Hz"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)


one_thread = pytest.fixture(autouse=True)(threads.one_thread)


def refused(folder: Path, sentence: str) -> None:
    """Check that loading raises a DataError with exactly this message."""
    with pytest.raises(DataError, match=f"^{re.escape(sentence)}$"):
        data.load("speech", folder)


def image(samples: making.Samples) -> torch.Tensor:
    """Return the image of a second of sound."""
    return speech.pixels(speech.log_mel(torch.from_numpy(samples[None])))


# Finding files


@pytest.mark.parametrize(
    "folder", ["", "speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02", "speech_commands", "speech"]
)
def test_words_are_found_and_split_by_the_lists(tmp_path: Path, folder: str) -> None:
    written = making.write_speech(tmp_path / folder)
    loaded = data.load("speech", tmp_path)
    assert (loaded.name, loaded.classes, loaded.is_images) == ("speech", 10, True)
    for inputs, labels, speakers in (
        (loaded.inputs, loaded.labels, ["00000000", "00000001"]),  # not the third speaker, who is for validation
        (loaded.test_inputs, loaded.test_labels, ["00000003"]),
    ):
        # sorted by speaker, and then by word
        expected = [f"{word}/{speaker}_nohash_0.wav" for speaker in speakers for word in sorted(making.WORDS)]
        assert inputs.shape == (len(expected), 1, 98, 40) and inputs.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert [making.WORDS[label] for label in labels.tolist()] == [name.split("/")[0] for name in expected]
        for ours, name in zip(inputs, expected, strict=True):
            assert torch.equal(ours, image(written[name])), name
    seen = loaded.prepared(loaded.inputs)
    assert seen.mean().abs() < 1e-4 and (seen.std(correction=0) - 1).abs() < 1e-4


def test_other_words_hidden_files_and_line_endings_are_ignored(tmp_path: Path) -> None:
    making.write_speech(tmp_path)
    plain = data.load("speech", tmp_path)
    for name in ("bed", "_background_noise_"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000000_nohash_0.wav").write_bytes(b"not read")
    for name in ("README.md", "._00000000_nohash_0.wav"):
        (tmp_path / "yes" / name).write_bytes(b"not read")
    path = tmp_path / "testing_list.txt"
    path.write_text("bed/0000000f_nohash_0.wav\n\n" + path.read_text(), newline="\r\n")
    again = data.load("speech", tmp_path)
    assert torch.equal(again.inputs, plain.inputs) and torch.equal(again.test_inputs, plain.test_inputs)


def test_the_batch_size_of_the_transform_does_not_change_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write_speech(tmp_path)
    at_once = data.load("speech", tmp_path)
    for batch in (1, 7):
        monkeypatch.setattr(speech, "BATCH", batch)
        in_pieces = data.load("speech", tmp_path)
        assert torch.equal(in_pieces.inputs, at_once.inputs) and torch.equal(in_pieces.labels, at_once.labels)


# Sound


def test_a_short_clip_is_padded_and_a_long_one_is_cut(tmp_path: Path) -> None:
    samples = np.random.RandomState(0).randint(-(2**15), 2**15, size=20_000).astype(np.int16)
    for count in (1, 15_999, 16_000, 16_001, 20_000):
        path = tmp_path / f"{count}.wav"
        path.write_bytes(making.wav(samples[:count]))
        read = speech.clip(path)
        kept = min(count, 16_000)
        assert read.shape == (16_000,) and read.dtype == np.int16
        assert np.array_equal(read[:kept], samples[:kept]) and not read[kept:].any()


def reference(samples: making.Samples) -> NDArray[np.float64]:
    """Compute the features step by step from their definition."""

    def mel(frequency: float) -> float:
        return 2595 * math.log10(1 + frequency / 700)

    edges = [700 * (10 ** ((mel(20) + (mel(8000) - mel(20)) * each / 41) / 2595) - 1) for each in range(42)]
    place = np.arange(400)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * place / 400)
    waves = np.exp(-2j * np.pi * np.outer(np.arange(257), place) / 512)
    features = np.empty((98, 40))
    for frame in range(98):
        sound = samples[frame * 160 : frame * 160 + 400] / 32768
        power = np.abs(waves @ (sound * hann)) ** 2
        for band in range(40):
            low, middle, high = edges[band : band + 3]
            energy = 0.0
            for number in range(257):
                frequency = number * 16_000 / 512
                if low < frequency <= middle:
                    energy += power[number] * (frequency - low) / (middle - low)
                elif middle < frequency < high:
                    energy += power[number] * (high - frequency) / (high - middle)
            features[frame, band] = math.log(energy + 1e-6)
    return features


def test_features_match_their_definition() -> None:
    samples = making.spoken(6, np.random.RandomState(1))
    samples[9000:] = 0  # as after a short clip
    ours, expected = speech.log_mel(torch.from_numpy(samples[None]))[0].numpy(), reference(samples)
    assert ours.shape == (98, 40)
    np.testing.assert_allclose(ours, expected, atol=1e-9)
    assert expected.max() > 5 and np.all(ours[57:] == math.log(1e-6))  # a whistle, and then silence


def test_a_tone_is_in_the_band_of_its_frequency_while_it_lasts() -> None:
    seconds = np.arange(16_000) / 16_000
    for band in (0, 7, 20, 39):
        mels = 31.748 + (2840.023 - 31.748) * (band + 1) / 41
        frequency = 700 * (10 ** (mels / 2595) - 1)
        sound = np.where(seconds < 0.5, 0.5 * np.sin(2 * np.pi * frequency * seconds), 0)
        seen = image((sound * 2**15).astype(np.int16))[0]
        assert (seen[:48].argmax(1) == band).all() and (seen[:48, band] > 180).all()
        assert not seen[50:].any()


def test_bands_are_not_empty_and_their_weights_add_up_to_at_most_1() -> None:
    weights = speech.bands()
    assert weights.shape == (257, 40)
    assert weights.sum(0).min() > 1 and (weights > 0).sum(0).min() >= 2
    assert weights.min() == 0 and weights.sum(1).max() < 1 + 1e-9
    assert weights[0].max() == 0 and weights[-1].max() < 1e-9  # 0 Hz, and 8 kHz, where the last band ends


def test_a_pixel_is_off_by_half_a_step_at_most() -> None:
    assert STEP / 2 < 0.048
    some = torch.from_numpy(np.stack([making.spoken(word, np.random.RandomState(word)) for word in range(10)]))
    for features in (
        torch.linspace(speech.MIN_LEVEL, speech.MAX_LEVEL, 10_001, dtype=torch.float64),
        speech.log_mel(some),
    ):
        meant = speech.MIN_LEVEL + STEP * speech.pixels(features).to(torch.float64)
        assert (meant - features).abs().max() <= STEP / 2 + 1e-9


def test_the_loudest_sound_is_not_clipped() -> None:
    """The loudest sounds come close to the largest pixel value and are not clipped."""
    place = np.arange(16_000)
    sounds = [np.where(np.sin(2 * np.pi * pitch * place / 16_000) < 0, -1.0, 1) for pitch in (100, 1000, 5000, 7000)]
    sounds += [np.ones(16_000), (-1.0) ** place, np.random.RandomState(0).choice([-1.0, 1.0], 16_000)]
    clips = np.stack([(sound * 2**15).clip(-(2**15), 2**15 - 1).astype(np.int16) for sound in sounds])
    features = speech.log_mel(torch.from_numpy(clips))
    assert speech.MIN_LEVEL <= features.min() and speech.MAX_LEVEL - 1 < features.max() <= speech.MAX_LEVEL
    assert image(np.zeros(16_000, np.int16)).max() == 0


def test_an_lstm_learns_words_row_by_row(tmp_path: Path) -> None:
    making.write_speech(tmp_path, speakers=32)
    words = data.load("speech", tmp_path)
    torch.manual_seed(0)
    model = networks.make("lstm", words)
    descent = torch.optim.Adam(model.parameters(), 0.02)
    order = torch.randperm(len(words.labels))
    for step in range(24):
        batch = order[torch.arange(step * 50, step * 50 + 50) % len(order)]
        descent.zero_grad()
        torch.autograd.backward(networks.loss(model(words.prepared(words.inputs[batch])), words.labels[batch]))
        descent.step()
    unheard = torch.from_numpy(np.stack([making.spoken(word % 10, np.random.RandomState(word)) for word in range(100)]))
    with torch.no_grad():
        output = model(words.prepared(speech.pixels(speech.log_mel(unheard))[:, None]))
    # Chance is 0.1. A model that knows only the pitch reaches 0.5.
    assert networks.accuracy(output, torch.arange(100) % 10) > 0.6


# Missing files


def test_a_missing_data_set_is_reported_with_the_searched_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^speech is read from files \(testing_list.txt, validation_list.txt\)"):
        data.load("speech")
    with pytest.raises(DataError, match=r"^speech is not in .*testing_list.txt, validation_list.txt") as it:
        data.load("speech", tmp_path)
    assert all(str(tmp_path / folder) in str(it.value) for folder in ("speech_commands_v0.02", "SpeechCommands"))
    making.write_speech(tmp_path)
    (tmp_path / "validation_list.txt").unlink()
    with pytest.raises(DataError, match="speech is not in "):
        data.load("speech", tmp_path)


def test_a_word_without_clips_is_refused(tmp_path: Path) -> None:
    making.write_speech(tmp_path)
    for path in (tmp_path / "go").iterdir():
        path.unlink()
    sentence = (
        f"{tmp_path / 'go'} must be a folder with WAV files, like those of yes, no, up, down, left, right, on, off, "
        "stop, go. Extract the data set again."
    )
    refused(tmp_path, sentence)
    (tmp_path / "go").rmdir()
    refused(tmp_path, sentence)
    (tmp_path / "go").write_bytes(b"")
    refused(tmp_path, sentence)


@pytest.mark.parametrize("file", speech.FILE_SET.files)
def test_a_listed_clip_that_does_not_exist_is_refused(tmp_path: Path, file: str) -> None:
    making.write_speech(tmp_path)
    path = tmp_path / file
    path.write_text(path.read_text() + "no/0000000a_nohash_0.wav\n")
    refused(tmp_path, f"{path} names 'no/0000000a_nohash_0.wav', which does not exist. Extract the data set again.")


@pytest.mark.parametrize("content", [b"", b"<html>\nnot found\n</html>", b"\xff\xfe\0", b"bed/00000000_nohash_0.wav\n"])
def test_a_list_without_test_clips_is_refused(tmp_path: Path, content: bytes) -> None:
    making.write_speech(tmp_path)
    path = tmp_path / "testing_list.txt"
    path.write_bytes(content)
    refused(tmp_path, f"{path} names no clip of yes, no, up, down, left, right, on, off, stop, go. Download it again.")


def test_lists_that_leave_no_training_clips_are_refused(tmp_path: Path) -> None:
    making.write_speech(tmp_path, speakers=2)
    refused(tmp_path, f"{tmp_path} has no training clips, only those in its lists. Extract the data set again.")


# Bad files

SOUND = np.arange(16_000, dtype=np.int16)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (making.wav(SOUND, rate=8000), "1-channel 16-bit PCM at 8,000 Hz"),
        (making.wav(SOUND, rate=44_100, channels=2), "2-channel 16-bit PCM at 44,100 Hz"),
        (making.wav(SOUND, width=1), "1-channel 8-bit PCM at 16,000 Hz"),
        (making.wav(SOUND[:15_999], width=3), "1-channel 24-bit PCM at 16,000 Hz"),
    ],
    ids=["rate", "stereo", "8 bits", "24 bits"],
)
def test_sound_of_another_format_is_refused(tmp_path: Path, content: bytes, kind: str) -> None:
    making.write_speech(tmp_path)
    (tmp_path / CLIP).write_bytes(content)
    refused(tmp_path, f"{tmp_path / CLIP} is {kind} and should be {WANTED}. Download it again.")


FLOATS = b"RIFF" + struct.pack("<I4s4sIHHIIHH4sI", 40, b"WAVE", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32, b"data", 4)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (FLOATS + bytes(4), "unknown format: 3"),
        (b"fLaC" + bytes(100), "file does not start with RIFF id"),
        (b"", "it ends too early"),
        (making.wav(SOUND)[:30], "it ends too early"),
        (making.wav(SOUND)[:36], "fmt chunk and/or data chunk missing"),
    ],
    ids=["floats", "flac", "empty", "cut in its header", "cut before its samples"],
)
def test_a_file_that_is_not_wav_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    making.write_speech(tmp_path)
    (tmp_path / CLIP).write_bytes(content)
    refused(tmp_path, f"{tmp_path / CLIP} is not a WAV file of {WANTED} ({why}). Download it again.")


@pytest.mark.parametrize(("cut", "left"), [(44, 0), (45, 0), (1044, 500), (32_043, 15_999)])
def test_a_truncated_clip_is_refused(tmp_path: Path, cut: int, left: int) -> None:
    making.write_speech(tmp_path)
    (tmp_path / CLIP).write_bytes(making.wav(SOUND)[:cut])
    refused(tmp_path, f"{tmp_path / CLIP} has {left:,} samples and should have 16,000. Download it again.")


def test_a_clip_truncated_after_its_first_second_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(making.wav(np.resize(SOUND, 30_000))[:-2000])
    with pytest.raises(DataError, match=r"has 29,000 samples and should have 30,000\. Download it again\."):
        speech.clip(path)


def test_an_empty_clip_is_refused(tmp_path: Path) -> None:
    making.write_speech(tmp_path)
    (tmp_path / CLIP).write_bytes(making.wav(SOUND[:0]))
    refused(tmp_path, f"{tmp_path / CLIP} has 0 samples and should have 16,000. Download it again.")


def test_test_clips_are_checked_too(tmp_path: Path) -> None:
    making.write_speech(tmp_path)
    path = tmp_path / "go" / "00000003_nohash_0.wav"
    path.write_bytes(making.wav(SOUND, rate=8000))
    refused(tmp_path, f"{path} is 1-channel 16-bit PCM at 8,000 Hz and should be {WANTED}. Download it again.")


def test_a_folder_in_place_of_a_clip_is_refused(tmp_path: Path) -> None:
    making.write_speech(tmp_path)
    (tmp_path / CLIP).unlink()
    (tmp_path / CLIP).mkdir()
    refused(tmp_path, f"{tmp_path / CLIP} cannot be read (Is a directory). It must be a readable file.")


def test_a_wrong_size_in_a_header_allocates_no_memory(tmp_path: Path) -> None:
    content = bytearray(making.wav(SOUND))
    content[40:44] = struct.pack("<I", 2**32 - 2)  # bytes of sound
    path = tmp_path / "lie.wav"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"has 16,000 samples and should have 2,147,483,647\. Download it again\."):
            speech.clip(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * files.PIECE
    finally:
        tracemalloc.stop()


@tries(50, 200)
@given(st.data())
def test_any_content_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, chosen: st.DataObject) -> None:
    """A file with changed header bytes, cut anywhere, gives a second of sound or a DataError."""
    content = bytearray(making.wav(SOUND[:100]))
    for _ in range(chosen.draw(st.integers(0, 3))):
        content[chosen.draw(st.integers(0, 47))] = chosen.draw(st.integers(0, 255))
    content = content[: chosen.draw(st.integers(0, len(content)) | st.just(len(content)))]
    path = tmp_path_factory.getbasetemp() / "any.wav"
    path.write_bytes(content)
    try:
        found = speech.clip(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert found.shape == (16_000,) and found.dtype == np.int16
