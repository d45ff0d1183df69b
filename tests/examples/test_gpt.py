"""The GPT example: its data and its model, and four processes that are killed and resumed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from examples.scripts import ROOT, Scripts
from launch.test_by_hand import Background, all_gone, started  # noqa: F401 (a fixture)
from launch.test_local import samples_applied
from paceline.model import checkpoint
from paceline.model.checkpoint_names import versions
from paceline.observe.trace import Arrived, Measured, from_line

PATH = ROOT / "examples/gpt.py"
TINY = ("--layers", "1", "--width", "32", "--context", "32", "--batch-size", "4", "--lr", "5e-3")
UNTRAINED = 5.4  # a little less than the loss of a model for which all 256 bytes are equally likely


def module() -> Any:
    spec = importlib.util.spec_from_file_location("gpt", PATH)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


gpt = module()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scripts:
    monkeypatch.chdir(tmp_path)
    return Scripts(monkeypatch)


def losses(printed: str) -> list[float]:
    """Return the validation losses that were printed."""
    return [float(found) for found in re.findall(r"validation loss ([0-9.]+)", printed)]


def test_no_module_is_in_both_texts() -> None:
    training, validation = (bytes(text.numpy()) for text in gpt.texts())
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    assert len(training) + len(validation) == sum(module.stat().st_size for module in modules)
    for number, each in enumerate(modules):
        ours, other = (training, validation) if number % 20 else (validation, training)
        source = each.read_bytes()
        assert source in ours
        assert len(source) < 1000 or source not in other


def test_the_target_of_a_byte_is_the_next_one() -> None:
    text = torch.arange(20, dtype=torch.uint8)
    windows = gpt.Windows(text, 4, torch.tensor([0, 15]))
    assert [[part.tolist() for part in windows[number]] for number in range(len(windows))] == [
        [[0, 1, 2, 3], [1, 2, 3, 4]],
        [[15, 16, 17, 18], [16, 17, 18, 19]],
    ]


def test_a_logit_depends_on_no_later_byte() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(layers=2, width=64, context=16)
    x = torch.randint(256, (3, 16))
    changed = x.clone()
    changed[:, 9] += 1 - 2 * (changed[:, 9] // 255)
    before, after = model(x), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert (after[:, 9:] != before[:, 9:]).any(dim=2).all(), "every later place sees the byte"


@pytest.mark.parametrize(("size", "millions"), [("small", 0.8), ("medium", 10.8)])
def test_the_sizes_are_as_printed(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = gpt.GPT(**gpt.SIZES[size])
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_it_trains_alone(scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    scripts.alone("examples/gpt.py", *TINY, "--steps", "50")
    printed = losses(capsys.readouterr().out)
    assert len(printed) == 4
    assert printed[0] > UNTRAINED and printed[-1] < 3.5


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--local-steps", "3"),
        ("--local-steps", "3", "--overlap"),
        ("--local-steps", "3", "--ahead"),
        ("--local-steps", "3", "--outer", "sgd:lr=0.7,momentum=0.5,nesterov=true"),
    ],
)
def test_two_workers_train(options: tuple[str, ...], scripts: Scripts, capsys: pytest.CaptureFixture[str]) -> None:
    job = scripts.together("examples/gpt.py", *TINY, "--steps", "90", "--every", "10", *options)
    printed = losses(capsys.readouterr().out)
    measured = [event.value for event in job.events if isinstance(event, Measured) and event.kind == "val_loss"]
    assert printed == pytest.approx(measured, abs=6e-4)
    assert printed[0] > UNTRAINED and printed[-1] < 3.7
    sizes = [event.batch_size for event in job.events if isinstance(event, Arrived)]
    assert sum(sizes) == 90 * 4
    assert max(sizes) == (12 if options else 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--width", "100"), "--width must be a multiple of 32; got 100."),
        (("--size", "huge"), "argument --size: invalid choice: 'huge'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    options: tuple[str, ...], said: str, scripts: Scripts, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        scripts.alone("examples/gpt.py", *options)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def wait_until(condition: Callable[[], object], running: Background, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and running.process.poll() is None, "\n".join(running.lines)
        time.sleep(0.02)


def newest_version(job: Path) -> int:
    """Return the version of the job's newest checkpoint, or 0. Its files may vanish meanwhile, so they are not read."""
    return max((int(each.name[-9:]) for each in versions(job)), default=0)


def process_of_worker(number: int, running: Background) -> int:
    """Return the id of the process in which this worker runs."""
    variable = f"PACELINE_WORKER={number}".encode()
    (found,) = (
        pid
        for pid in running.children()
        if b"gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return found


@pytest.mark.slow
def test_four_processes_are_killed_and_resumed(tmp_path: Path, started: list[Background]) -> None:  # noqa: F811
    """First all processes are killed. Then the job is resumed, and one worker is killed."""
    job, trace = tmp_path / "job", tmp_path / "trace.jsonl"
    steps, batch = 1000, 4
    options = ("--workers", 4, "-p", "r2sp", "--updates", "int8", "--lease", 2, "--checkpoint-every", 8)
    script = (PATH, *TINY, "--steps", steps, "--local-steps", 5)

    first = Background("run", *options, "--checkpoint", job, *script)
    started.append(first)
    wait_until(lambda: newest_version(job) >= 24, first)
    pids = [first.process.pid, *first.children()]
    os.killpg(first.process.pid, signal.SIGKILL)
    assert first.ends() == -signal.SIGKILL
    assert all_gone(pids)
    half = checkpoint.read(job)
    trained = half.job["samples"]["trained"]
    assert 0 < trained < steps * batch
    assert losses("\n".join(first.lines))[0] > UNTRAINED

    second = Background("run", *options, "--resume", job, "--trace", trace, *script)
    started.append(second)
    wait_until(lambda: newest_version(job) > half.version, second)
    os.kill(process_of_worker(1, second), signal.SIGKILL)
    assert second.ends(300.0) == 0, "\n".join(second.lines)
    assert "Worker 1 was killed by SIGKILL; restarting it." in second.lines
    whole = checkpoint.read(job)
    assert (whole.job["samples"]["trained"], whole.job["samples"]["open"]) == (steps * batch, [])
    assert samples_applied(trace) == steps * batch - trained, "no sample is trained on again, and none is lost"

    printed = losses("\n".join(second.lines))
    assert printed[-1] < printed[0] < UNTRAINED - 1, "the model is that of the checkpoint"
    arrived = [event for line in trace.read_text().splitlines() if isinstance(event := from_line(line), Arrived)]
    assert arrived[0].loss is not None and arrived[0].loss < UNTRAINED - 1
