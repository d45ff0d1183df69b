"""`paceline advise`: its options, its table, and its JSON."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from advise.clusters import advice_for, cluster
from paceline import cli
from paceline.advise.candidates import DDP, RINGS
from paceline.cli.advise_output import table_of
from paceline.simulate import load_cluster, parse_cluster
from shell import Shell

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--link", "1Gbit", "nowhere.py"), "There is no script 'nowhere.py'."),
        ((), "Describe the links in exactly one way: --link 1Gbit, --cluster FILE, --lab FILE or --hosts a,b,c."),
        (("--link", "1Gbit", "--cluster", "r2sp-b"), "Describe the links in exactly one way:"),
        (("--link", "fast"), "--link must be a rate greater than 0, such as 1Gbit or 100MB/s; got 'fast'."),
        (("--cluster", "r2sp-b", "--workers", "3"), "--workers needs --link, and --servers needs --link or --hosts."),
        (("--hosts", "a,b", "--workers", "3"), "--workers cannot be used with --hosts:"),
        (("--hosts", "a,a"), "--hosts names a machine twice."),
        (("--hosts", ","), "--hosts must name the workers' machines, such as a,b,c."),
        (("--link", "1Gbit", "--verify"), "--verify measures in a lab: use it with --lab FILE."),
        (("--link", "1Gbit", "--now", "nothing"), "'nothing'"),
        (("--cluster", "nowhere.toml"), "There is no cluster 'nowhere.toml'"),
        (("--link", "1Gbit", "--local-steps", "0"), "--local-steps must be whole numbers from 1 to 1000000, separated"),
        (("--link", "1Gbit", "--local-steps", "50,many"), "such as 50,200; got '50,many'."),
        (("--link", "1Gbit", "--updates", "int5"), "--updates: updates are encoded as int8, int4, topk:F"),
        (("--link", "1Gbit", "--now", "diloco"), "use it with --local-steps 50, say."),
        (
            ("--lab", str(EXAMPLES / "clusters" / "eight-sites.toml")),
            "--lab is for float32 gradients in every step; leave local steps, updates and overlap out.",
        ),
    ],
)
def test_a_mistake_is_refused_in_one_sentence(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    script = () if "nowhere.py" in arguments else (str(EXAMPLES / "digits.py"),)
    monkeypatch.setattr(sys, "argv", ["paceline", "advise", *arguments, *script])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the current folder
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("option", [("--link", "1Gbit"), ("--hosts", "a,b"), ()])
def test_without_a_script_a_cluster_must_describe_the_steps(
    option: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Shell(tmp_path, capsys, monkeypatch, ("advise",))(*option)
    assert (outcome.code, outcome.err) == (
        2,
        "Name the training script, or describe its model and the time of a step with --cluster FILE.\n",
    )


def test_a_cluster_in_the_place_of_the_script_is_refused_with_the_right_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Shell(tmp_path, capsys, monkeypatch, ("advise",))("eight-sites.toml")
    assert (outcome.code, outcome.err) == (
        2,
        "eight-sites.toml describes a cluster and is no training script; use --cluster eight-sites.toml.\n",
    )


def test_a_described_cluster_is_advised_on_without_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(EXAMPLES / "clusters" / "eight-sites.toml")
    shell = Shell(tmp_path, capsys, monkeypatch, ("advise", "--cluster", file, "--iterations", "8"))
    printed = json.loads(shell("--json").out)
    assert printed["timing"] is None
    assert {row["candidate"]["local_steps"] for row in printed["candidates"]} == {1, 100}, "ddp, and those of the file"
    codecs = {(row["candidate"]["policy"] in RINGS, row["candidate"]["updates"]) for row in printed["candidates"]}
    assert codecs == {(True, ""), (False, "int4")}
    assert parse_cluster(printed["cluster"], "eight-sites", "printed") == load_cluster(file)
    text = " ".join(shell("--local-steps", "50", "--updates", "int8", "--now", "diloco").out.split())
    assert "eight-sites is described, its first worker computes 2 s for 64 samples. The model is 1 GB." in text
    assert "updates in int8" in text
    assert "This compares time per sample alone." in text


@pytest.mark.parametrize("verified", [False, True], ids=["simulated", "verified"])
@pytest.mark.parametrize("width", [80, 120])
def test_the_table_has_all_columns_in_a_narrow_terminal_too(width: int, verified: bool) -> None:
    pytest.importorskip("torch")
    from paceline.advise.verify import VerifiedEstimate

    advice = advice_for(cluster(0.1, slow=3.0), now="ssp:staleness=5")
    measured = [VerifiedEstimate(each, each.iteration_seconds, each.samples_per_second) for each in advice.ranked]
    file = io.StringIO()
    Console(width=width, file=file).print(table_of(advice, measured if verified else [], "title", width))
    lines = file.getvalue().splitlines()
    for heading in ("scheme", "iteration", "samples/s", "staleness", "needs", "× ssp", *(["off"] if verified else [])):
        assert heading in lines[1]
    assert ("servers" in lines[1]) is (width == 120)
    assert all(len(line) <= width for line in lines)
    assert not any("…" in line for line in lines), "nothing is cut off"
    for each in advice.ranked:
        assert any(each.candidate.policy in line for line in lines), "a name is not broken"
    assert sum("streamed" in line for line in lines) == sum(each.candidate.streamed for each in advice.ranked)
    assert sum("beside" in line for line in lines) == sum(each.candidate.colocated for each in advice.ranked)


@pytest.mark.core
@pytest.mark.slow
def test_advice_as_json_and_the_measured_cluster_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    target, slow_worker = tmp_path / "mine.toml", EXAMPLES / "clusters" / "slow-worker.toml"
    command = [sys.executable, "-m", "paceline", "advise", "--cluster", str(slow_worker), "--steps", "10", "--json"]
    command += ["--iterations", "40", "--now", "bsp", "--write", str(target), str(EXAMPLES / "digits.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert printed["timing"]["batch"] == 32
    assert printed["now"]["policy"] == "bsp"
    assert printed["right"] is None
    assert {DDP, "bsp", "asp", "r2sp"} <= {row["candidate"]["policy"] for row in printed["candidates"]}
    assert target.read_text() == printed["cluster"]
    spec = parse_cluster(target.read_text(), "mine", str(target))
    assert spec.model_bytes == printed["timing"]["model_bytes"] > 30_000
    assert len(spec.workers) == 4
    first, _, _, last = (worker.compute_seconds() for worker in spec.workers)
    expected_first, _, _, expected_last = (
        worker.compute_seconds() for worker in load_cluster(str(slow_worker)).workers
    )
    assert last / first == pytest.approx(expected_last / expected_first, rel=0.01)
    assert printed["command"].startswith("paceline run --workers 4 --policy ")
    assert printed["command"].endswith(str(EXAMPLES / "digits.py"))
