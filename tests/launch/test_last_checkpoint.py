"""A last checkpoint that cannot be written: the model stays in memory, and the exit code says if it is lost.

Also the way back: each command that a message recommends is run as it was printed.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from launch.test_by_hand import Background, started  # noqa: F401 (a fixture)
from launch.test_local import TRAINS
from paceline.model import checkpoint
from paceline.model.checkpoint_names import versions
from paceline.serve.last_save import UNSAVED
from serve.workers import work

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 256 KiB, which is full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small file system")
    try:
        with (folder / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "patience", "code"),
    [("room", "10m", 0), pytest.param("nothing", "2s", UNSAVED, marks=pytest.mark.matrix), ("ctrl-c", "10m", UNSAVED)],
)
def test_run_keeps_the_model_until_a_full_disk_has_room(
    tmp_path: Path,
    small_disk: Path,
    started: list[Background],  # noqa: F811
    then: str,
    patience: str,
    code: int,
) -> None:
    script, folder = tmp_path / "train.py", small_disk / "job"
    script.write_text(TRAINS)
    running = Background(
        *("run", "--workers", 1, "--checkpoint", folder, "--checkpoint-every", 10, "--checkpoint-patience", patience),
        *(script, tmp_path / "mark"),
        EPOCHS="1",
    )
    started.append(running)
    first = running.wait_for("The checkpoint of version 0 could not be written")
    assert f"{folder}: No space left on device" in first
    last = running.wait_for("The last checkpoint could not be written")
    assert "press Ctrl-C to give the model up" in last
    if then == "room":
        (small_disk / "ballast").unlink()
    elif then == "ctrl-c":
        running.process.send_signal(signal.SIGINT)
    assert running.ends() == code, running.lines
    assert sum("could not be written: " in line for line in running.lines) == 2, "the same reason is not repeated"
    if code:
        assert any("The model of version 30 is lost" in line for line in running.lines), running.lines
        assert not versions(folder)
    else:
        found = checkpoint.read(folder)
        assert found.version == 30 and found.job["samples"]["trained"] == 240


def served(*arguments: object) -> Background:
    return Background(*arguments, "-p", "asp", "--checkpoint-every", 2)


def worker(server: Background, samples: int = 20, updates: int | None = None) -> threading.Thread:
    """Train in a thread of this process."""
    address = server.address()

    def take_part() -> None:
        with contextlib.suppress(ConnectionError):  # some of these tests stop the server
            work(address, samples, updates=updates)

    thread = threading.Thread(target=take_part, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("command", [("serve",), pytest.param(("federate", "serve"), marks=pytest.mark.matrix)])
@pytest.mark.parametrize("then", ["repaired", "ctrl-c"])
def test_serve_keeps_the_model_until_the_folder_is_repaired(
    tmp_path: Path,
    started: list[Background],  # noqa: F811
    command: tuple[str, ...],
    then: str,
) -> None:
    folder = tmp_path / "job"
    server = served(*command, "--checkpoint", folder)
    started.append(server)
    server.address()
    folder.write_text("A file is in the place of the folder.")
    worker(server)
    server.wait_for("The last checkpoint could not be written")
    if then == "repaired":
        folder.unlink()
        assert server.ends() == 0, server.lines
        assert checkpoint.read(folder).job["samples"]["trained"] == 20
    else:
        server.process.send_signal(signal.SIGINT)
        assert server.ends() == UNSAVED, server.lines
        server.wait_for("The model of version 5 is lost, because its last checkpoint could not be written")


@pytest.mark.slow
def test_a_server_that_is_stopped_keeps_the_model_until_the_second_signal(
    tmp_path: Path,
    started: list[Background],  # noqa: F811
) -> None:
    folder = tmp_path / "job"
    server = served("serve", "--workers", 1, "--checkpoint", folder)
    started.append(server)
    worker(server, samples=1 << 40)
    server.wait_for("updates", 60)  # a line of the live table: the job has begun
    aside = folder.rename(tmp_path / "aside")
    folder.write_text("A file is in the place of the folder.")
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("The last checkpoint could not be written")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.ends() == UNSAVED, server.lines
    assert not any("Interrupted" in line for line in server.lines)
    assert versions(aside)


@pytest.mark.slow
def test_the_recommended_commands_continue_the_job(tmp_path: Path, started: list[Background]) -> None:  # noqa: F811
    """Resume one checkpoint, then damage the newest, then follow the messages."""
    folder = tmp_path / "job"

    def finish(*arguments: object) -> list[str]:
        server = served("serve", *arguments)
        started.append(server)
        worker(server)
        assert server.ends() == 0, server.lines
        return server.lines

    finish("--checkpoint", folder)
    older, newer = versions(folder)
    lines = finish("--resume", older)
    said = f"Going back to version {int(older.name[-9:])}; {newer.name} will be kept as *.abandoned."
    assert said in lines
    assert not list(folder.glob("version-*/version-*")), "nothing is written inside a checkpoint"
    assert newer.with_suffix(".abandoned").is_dir()
    last = checkpoint.read(folder)
    assert last.folder.parent == folder and last.job["samples"]["trained"] == 20
    finish("--resume", folder)

    whole, _ = versions(folder)
    part = last.folder / "shard-0.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    advice = set()
    for wrong in (("--checkpoint", folder), ("--resume", last.folder)):
        refused = served("serve", *wrong)
        started.append(refused)
        assert refused.ends() == 2
        (line,) = refused.lines
        advice |= set(re.findall(r"--resume [^,]*\w", line))
    (recommended,) = advice
    lines = finish(*recommended.split())
    (note,) = [line for line in lines if "is damaged: " in line]
    assert note.endswith(f"; going back to version {int(whole.name[-9:])}."), note
    assert last.folder.with_suffix(".damaged").is_dir()
    assert checkpoint.read(folder).job["samples"]["trained"] == 20
