"""Jobs of real processes on this machine: they finish, survive a kill, and report errors in one sentence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from launch.test_by_hand import Background, paceline, started  # noqa: F401 (a fixture)
from paceline.model import checkpoint
from paceline.observe.trace import Applied, Arrived, Joined, Left, from_line
from paceline.serve.serve_job import NO_UPDATE

TRAINS = """
import os, pathlib, signal, sys, time
import torch
import paceline
from paceline.model.optimizer import without_compiler

without_compiler()  # importing torch's compiler takes two seconds in each process
torch.manual_seed(0)
x = torch.randn(240, 6)
y = torch.randint(0, 3, (len(x),))
model = torch.nn.Linear(6, 3)
mark = pathlib.Path(sys.argv[1])
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    steps = 0
    epochs = int(os.environ.get("EPOCHS", "4"))
    for a, b in session.batches(torch.utils.data.TensorDataset(x, y), batch_size=8, epochs=epochs):
        loss = torch.nn.functional.cross_entropy(model(a), b)
        loss.backward()
        steps += 1
        if session.worker == 1 and steps == 5 and len(sys.argv) > 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        time.sleep(float(os.environ.get("SLEEP", "0")))
        session.step(loss)
    session.finish()
    time.sleep(float(os.environ.get("EVALUATES", "0")))
"""


def process_name(pid: int) -> str:
    """Return the name of a process and its command line. The fork server sets the name of a shard."""
    return " ".join(Path(f"/proc/{pid}/{what}").read_text().replace("\0", " ") for what in ("comm", "cmdline"))


def paceline_run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return paceline("run", *arguments, **variables)


def samples_applied(trace: Path) -> int:
    """Return the number of samples whose updates changed the model."""
    waiting: dict[tuple[int, int], int] = {}
    total = 0
    for line in trace.read_text().splitlines():
        event = from_line(line)
        if isinstance(event, Arrived):
            waiting[event.worker, event.iteration] = event.batch_size
        elif isinstance(event, Applied):
            total += sum(waiting.pop(key) for key in zip(event.workers, event.iterations, strict=True))
    return total


@pytest.mark.core
@pytest.mark.slow
def test_a_job_trains_on_every_sample_once_an_epoch(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.jsonl"
    script.write_text(TRAINS)
    options = ("--workers", "2", "--servers", "2", "-p", "r2sp", "--trace", str(trace))
    ran = paceline_run(*options, str(script), str(tmp_path / "mark"), EVALUATES="0.5")
    assert ran.returncode == 0, ran.stderr
    assert "updates    120" in ran.stdout
    assert samples_applied(trace) == 4 * 240
    figures = dict(line.split(maxsplit=1) for line in ran.stdout.splitlines())
    seconds, rate = float(figures["seconds"]), float(figures["samples/s"].replace(",", ""))
    assert seconds == pytest.approx(4 * 240 / rate, abs=0.06), "evaluating the model is no part of either"


@pytest.mark.core
@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_no_sample_is_lost(tmp_path: Path) -> None:
    script, trace = tmp_path / "train.py", tmp_path / "trace.jsonl"
    script.write_text(TRAINS)
    ran = paceline_run(
        *("--workers", "2", "-p", "r2sp", "--lease", "2", "--trace", str(trace)),
        *(str(script), str(tmp_path / "mark"), "SIGKILL"),
    )
    assert ran.returncode == 0, ran.stderr
    assert "Worker 1 was killed by SIGKILL; restarting it." in ran.stderr
    events = [from_line(line) for line in trace.read_text().splitlines()]
    left = [event.time for event in events if isinstance(event, Left) and event.worker == 1]
    back = [event.time for event in events if isinstance(event, Joined) and event.worker == 1]
    assert len(back) == 2
    assert back[0] < left[0] <= back[1]
    assert samples_applied(trace) == 4 * 240


@pytest.mark.slow
def test_a_script_that_never_joins_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('nothing')\n")
    ran = paceline_run("--workers", "1", str(script))
    assert ran.returncode == 1
    assert "never called paceline.join" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.core
def test_a_script_that_fails_at_once_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import sys\nsys.exit('Give --data.')\n")
    ran = paceline_run("--workers", "1", "--restarts", "5", str(script))
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        "Give --data.",
        "Worker 0 ended with exit code 1 before its first update, so it is not restarted. Its last output:",
        "  Give --data.",
    ]


def complaints(errors: str) -> list[str]:
    """Return the lines of standard error, without the progress of a job whose workers are slow to start."""
    progress = re.compile(r"\d+ workers?, waiting for \d+ (more|workers?)")
    return [line for line in errors.splitlines() if not progress.fullmatch(line)]


@pytest.mark.slow
def test_a_job_without_an_update_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.replace("session.step(loss)", "pass"))
    ran = paceline_run("--workers", "1", str(script), str(tmp_path / "mark"))
    assert ran.returncode == 1
    assert complaints(ran.stderr) == [NO_UPDATE]
    assert ran.stdout == ""


@pytest.mark.slow
def test_a_missing_script_is_an_error(tmp_path: Path) -> None:
    ran = paceline_run("--workers", "1", str(tmp_path / "none.py"))
    assert ran.returncode == 2
    assert "There is no script" in ran.stderr


@pytest.mark.slow
def test_a_job_is_resumed_exported_and_replayed(tmp_path: Path) -> None:
    script, job, record = tmp_path / "train.py", tmp_path / "job", tmp_path / "record"
    script.write_text(TRAINS)
    common = ("--workers", "2", "--servers", "2", "-p", "ssp")
    ran = paceline_run(
        *(*common, "--checkpoint", str(job), "--checkpoint-every", "10"),
        str(script),
        str(tmp_path / "mark"),
        EPOCHS="2",
    )
    assert ran.returncode == 0, ran.stderr
    half = checkpoint.newest(job)
    assert half is not None
    assert half.job["samples"]["trained"] == 2 * 240
    resumed = ("--resume", str(job), "--record-updates", str(record))
    ran = paceline_run(*common, *resumed, str(script), str(tmp_path / "mark"), EPOCHS="4")
    assert ran.returncode == 0, ran.stderr
    whole = checkpoint.newest(job)
    assert whole is not None
    assert whole.job["samples"]["trained"] == 4 * 240
    assert whole.version == 2 * half.version == 120

    ran = paceline_run(
        *("--workers", "1", "--servers", "2", "-p", "ssp", "--resume", str(job)),
        *(str(script), str(tmp_path / "mark")),
        EPOCHS="4",
    )
    assert ran.returncode == 0, "a job whose samples are all done needs no update"

    exported = paceline("export", job, tmp_path / "model.pt")
    assert exported.returncode == 0, exported.stderr
    model = torch.nn.Linear(6, 3)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))

    replayed = paceline("replay", record)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("the same, bit for bit") == 2
    assert "all the same" in replayed.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "servers"),
    [
        ("shard 1", ("--servers", 2)),
        pytest.param("-m paceline.serve ", ("--servers", 2), marks=pytest.mark.matrix),
        pytest.param("paceline.serve.shard 1", ("--colocate", "--apply", "streamed"), marks=pytest.mark.matrix),
    ],
)
def test_a_killed_server_is_restarted_and_training_continues(
    target: str,
    servers: tuple[object, ...],
    tmp_path: Path,
    started: list[Background],  # noqa: F811
) -> None:
    script, job = tmp_path / "train.py", tmp_path / "job"
    script.write_text(TRAINS)
    running = Background(
        *("run", "--workers", 2, *servers, "-p", "r2sp", "--lease", 5),
        *("--checkpoint", job, "--checkpoint-every", 5, script, tmp_path / "mark"),
        SLEEP="0.05",
    )
    started.append(running)
    end = time.monotonic() + 120
    while not list(job.glob("version-*[1-9]")):  # later than version 0
        assert time.monotonic() < end, running.lines
        time.sleep(0.05)
    os.kill(next(pid for pid in running.children() if target in process_name(pid)), signal.SIGKILL)
    assert running.ends(180) == 0, "\n".join(running.lines)
    assert any("restarting it" in line or "Going back to version" in line for line in running.lines)
    found = checkpoint.newest(job)
    assert found is not None
    assert found.job["samples"]["trained"] == 4 * 240
    assert found.job["samples"]["open"] == []


@pytest.mark.matrix
@pytest.mark.slow
def test_serve_and_work_with_a_shard_beside_each_worker(tmp_path: Path, started: list[Background]) -> None:  # noqa: F811
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    server = Background("serve", "--workers", 2, "--colocate", "--apply", "streamed", "-p", "r2sp")
    started.append(server)
    connect = server.address()
    workers = []
    for number in range(2):
        arguments = ("work", "--colocate", "--connect", connect, script, tmp_path / "mark")
        workers.append(Background(*arguments, PACELINE_WORKER=str(number)))
        started.append(workers[-1])
    assert [each.ends() for each in (*workers, server)] == [0, 0, 0], [each.lines for each in (*workers, server)]
    assert any("updates    120" in line for line in server.lines)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_shard_that_the_server_refuses_ends_its_worker(tmp_path: Path, started: list[Background]) -> None:  # noqa: F811
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    server = Background("serve", "--workers", 1)
    started.append(server)
    connect = server.address()
    arguments = ("work", "--colocate", "--connect", connect, script, tmp_path / "mark")
    ran = paceline(*arguments, PACELINE_WORKER="0", SLEEP="1")
    assert ran.returncode == 1
    assert "The shard beside worker 0 is refused: This server starts its own shards; " in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_shard_beside_a_worker_without_a_number(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    refused = paceline("work", "--colocate", "--connect", "127.0.0.1:1", script)
    assert refused.returncode == 2
    assert "a shard has the number of its worker" in " ".join(refused.stderr.split())


@pytest.mark.slow
def test_without_a_checkpoint_a_killed_server_ends_the_job(tmp_path: Path, started: list[Background]) -> None:  # noqa: F811
    script = tmp_path / "paces.py"
    script.write_text("import paceline, time\nwith paceline.coordinate() as pace:\n    time.sleep(1000)\n")
    running = Background("run", "--workers", 1, "--servers", 0, script)
    started.append(running)
    end = time.monotonic() + 60
    while len(running.children()) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    (server,) = [
        pid for pid in running.children() if "paceline.serve" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    ]
    os.kill(server, signal.SIGKILL)
    assert running.ends() == 1
    assert "there is no checkpoint to restart it from; use --checkpoint" in running.lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param(
            ("torch.nn.Linear(6, 3)", "torch.nn.Flatten()"),
            "optimizer got an empty parameter list",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            ("model.parameters()", "[p.requires_grad_(False) for p in model.parameters()]"),
            "no parameter to train",
            marks=pytest.mark.matrix,
        ),
        (("Linear(6, 3)", "Linear(6, 3 + int(os.environ['PACELINE_WORKER']))"), "must train the same model: the shape"),
        pytest.param(
            ("batch_size=8", "batch_size=800"),
            "The dataset has 240 samples, fewer than a batch of 800.",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            ("torch.randn(240, 6)", "torch.randn(240 + 8 * int(os.environ['PACELINE_WORKER']), 6)"),
            "All workers must train on the same data",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            ("loss.backward()", "(loss * float('nan')).backward()"),
            "there is NaN or infinity in the values for 'weight'",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["no parameters", "all frozen", "other models", "small dataset", "other data", "NaN"],
)
def test_an_error_that_the_user_can_fix_is_one_sentence(change: tuple[str, str], error: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS.replace(*change))
    workers = "2" if "All workers" in error or "same model" in error else "1"
    ran = paceline_run("--workers", workers, "--restarts", "5", str(script), str(tmp_path / "mark"))
    assert ran.returncode == 1
    assert error in ran.stderr.splitlines()[-1]
    if "empty parameter list" not in error:  # torch raises this one, with a traceback
        assert len(complaints(ran.stderr)) == 1, ran.stderr
