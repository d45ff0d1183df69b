"""Advice: what is compared, what is chosen and why, links that are measured, and what a person is told."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import cli
from paceline.advise import links
from paceline.advise.advice import (
    DDP,
    Advice,
    Candidate,
    Estimate,
    advise,
    candidates,
    choose,
    expected,
    price,
    reasons,
)
from paceline.lab import namespaces as labs
from paceline.launch.link_probe import call, serve
from paceline.launch.processes import JobError
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.simulate import ClusterSpec, WorkerSpec, load_cluster, parse_cluster

EXAMPLES = Path(__file__).parents[2] / "examples"


def cluster(
    compute: float, model: float = 5e6, link: float = 50e6, workers: int = 4, servers: int = 1, slow: float = 1.0
) -> ClusterSpec:
    each = WorkerSpec(link=link, batch=32, samples_per_second=32 / compute)
    last = replace(each, samples_per_second=32 / compute / slow)
    return ClusterSpec("made", model, servers, link, 50e-6, 10e9, 30.0, (each,) * (workers - 1) + (last,))


def told(spec: ClusterSpec, now: str = DDP) -> Advice:
    return advise(spec, Candidate(now), 60)


# What is chosen


def test_where_computing_takes_nearly_all_the_time_one_stays_with_what_there_is() -> None:
    advice = told(cluster(compute=10.0))
    assert advice.chosen is advice.now
    assert advice.chosen.candidate == Candidate(DDP)
    assert re.search(r"Computing takes 9\d% of the time under ddp: no policy gains more than 2%\.", advice.reasons[0])
    assert any("is not worth it" in reason for reason in advice.reasons), "something stale is a little faster"


def test_where_the_network_counts_turns_between_colocated_servers_win() -> None:
    advice = told(cluster(compute=0.12, workers=8))
    assert advice.chosen.candidate == Candidate("r2sp", streamed=True, colocated=True)
    assert advice.chosen.samples_per_second > 1.3 * advice.now.samples_per_second
    assert advice.ranked[0] is advice.chosen
    assert any("instead of 1: each carries 1.8 times" in reason for reason in advice.reasons)
    assert [step.partition(" would")[0] for step in advice.steps] == [
        "Links twice as fast",
        "Machines that compute twice as fast",
    ]


def test_gains_are_over_what_there_is_now() -> None:
    advice = told(cluster(compute=0.12), now="ssp:staleness=5")
    assert advice.now.candidate.policy == "ssp:staleness=5"
    assert advice.now in advice.ranked


def test_unequal_workers_are_offered_batches_of_their_own() -> None:
    alike, unlike = cluster(0.1), cluster(0.1, slow=3.0)
    assert not any("tune_batches" in each.policy for each in candidates(alike))
    assert any("tune_batches" in each.policy for each in candidates(unlike))
    advice = told(unlike)
    assert "tune_batches" in advice.chosen.candidate.policy
    assert any("computes 3.0 times as long as the fastest" in reason for reason in advice.reasons)


def test_the_table_fits_a_narrow_terminal() -> None:
    from rich.console import Console

    from paceline.cli.advise import _table

    advice = told(cluster(0.1))
    for width, shown in ((80, False), (120, True)):
        file = io.StringIO()
        Console(width=width, file=file).print(_table(advice, [], "title", width))
        text = file.getvalue()
        assert ("samples/s" in text) is ("staleness" in text) is shown
        assert "× ddp" in text and all(each.candidate.policy in text for each in advice.ranked), "in one line each"


def test_one_worker_has_nobody_to_reduce_with() -> None:
    assert all(each.policy != DDP and not each.colocated for each in candidates(cluster(0.1, workers=1)))


def test_the_order_is_by_samples_and_the_least_staleness_wins_within_three_percent() -> None:
    order = [Candidate(DDP), Candidate("bsp"), Candidate("r2sp"), Candidate("asp")]

    def made(policy: str, rate: float, stale: float) -> Estimate:
        return Estimate(Candidate(policy), 1.0, rate, stale)

    stale, steady = made("asp", 103.0, 3.0), made("bsp", 101.0, 0.0)
    assert choose([stale, steady], order) is steady
    assert choose([made("asp", 105.0, 3.0), steady], order).candidate.policy == "asp"
    assert choose([made("bsp", 101.0, 0.0), made(DDP, 100.0, 0.0)], order).candidate.policy == DDP, "it asks for less"
    ranked = told(cluster(0.05)).ranked
    assert [each.worth for each in ranked] == sorted((each.worth for each in ranked), reverse=True)


def test_staleness_has_its_price_by_the_optimizer() -> None:
    plain, momentum = (OptimizerSpec("SGD", ({"lr": 0.1, "momentum": beta},)) for beta in (0.0, 0.9))
    adam, other = (OptimizerSpec(name, ({"lr": 0.1},)) for name in ("Adam", "RMSprop"))
    for optimizer in (None, plain, momentum, adam, other):
        assert price("bsp", 0.0, optimizer) == 1
        assert price("asp", 15.0, optimizer) > price("r2sp", 15.0, optimizer) > 1
    assert price("asp", 15.0, momentum) == price("ssp:staleness=5", 3.0, adam) > price("asp", 15.0, plain)
    assert price("r2sp:groups=3", 2.0, adam) < price("r2sp", 15.0, adam)
    unlike = cluster(0.1, slow=3.0)
    asked = Candidate("asp")
    cheap, dear = (expected(unlike, asked, 40, optimizer=each) for each in (plain, momentum))
    assert cheap.samples_per_second == dear.samples_per_second
    assert cheap.worth > 1.5 * dear.worth
    fast, slow = Estimate(asked, 1.0, 130.0, 15.0, price=1.5), Estimate(Candidate("bsp"), 1.0, 100.0)
    advice = reasons(unlike, slow, [slow, fast], slow)
    assert any("30% more samples a second" in each and "about 50% more of them" in each for each in advice)


def test_all_reduce_by_hand() -> None:
    small = expected(cluster(0.12, workers=8), Candidate(DDP), 10)
    assert small.iteration_seconds == pytest.approx(0.12 + 2 * 7 / 8 * 0.1, rel=0.01)
    slowest = expected(cluster(0.12, workers=8, slow=2.0), Candidate(DDP), 10)
    assert slowest.iteration_seconds == pytest.approx(0.24 + 0.175, rel=0.01)
    # Of 100 buckets all but the first are sent while the rest of the backward pass runs, or after it.
    large = expected(cluster(30.0, model=100 * 25 * 2**20, workers=2), Candidate(DDP), 10)
    assert large.iteration_seconds == pytest.approx(10.0 + 0.2 + 2621.44 / 50, rel=0.01)


# Links


@pytest.mark.alone
def test_a_link_on_this_machine() -> None:
    token = secrets.token_bytes(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener, token), daemon=True)
        thread.start()
        address = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(address) as stranger:
            stranger.sendall(bytes(16))
            assert stranger.recv(1) == b"", "without the token nothing is answered"
        (stretch,) = call([address], token, 0.1)
        thread.join(5)
    assert stretch.up > 1e6
    assert stretch.down > 1e6
    assert 0 < stretch.latency < 0.1


@pytest.mark.slow
@pytest.mark.alone
def test_hosts_are_measured_over_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an ssh that runs the command here, and notes what it was asked."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$3 $4" >> {tmp_path}/commands\nexec sh -c "$4"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(links, "SECONDS", 0.1)
    found = asyncio.run(links.measured(links.SshAccess(), links.HERE, ["127.0.0.1", "me@localhost"]))
    assert len(found.workers) == 2
    assert min(found.server, *found.workers) > 1e6
    commands = (tmp_path / "commands").read_text()
    assert "me@localhost" in commands
    assert not re.search(r"[0-9a-f]{32}", commands), "the token is nowhere on a command line"


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: no route to nowhere.' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(JobError, match=r"^The link of nowhere could not be measured: ssh: no route to nowhere\.$"):
        asyncio.run(links.measured(links.SshAccess(), links.HERE, ["nowhere"]))


# The command


def paceline(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--link", "1Gbit", "nowhere.py"), "There is no script 'nowhere.py'."),
        ((), "Say which links there are, in one way: --link 1Gbit, --cluster FILE, --lab FILE or --hosts a,b,c."),
        (("--link", "1Gbit", "--cluster", "r2sp-b"), "Say which links there are, in one way:"),
        (("--link", "fast"), "--link is a rate greater than 0, such as 1Gbit or 100MB/s, not 'fast'."),
        (("--cluster", "r2sp-b", "--workers", "3"), "--workers and --servers go with --link;"),
        (("--hosts", "a,b", "--workers", "3"), "--workers goes with --link;"),
        (("--hosts", "a,a"), "--hosts names a machine twice;"),
        (("--hosts", ","), "--hosts names the workers' machines: a,b,c."),
        (("--link", "1Gbit", "--verify"), "--verify measures in a lab: use it with --lab FILE."),
        (("--link", "1Gbit", "--now", "nothing"), "'nothing'"),
        (("--cluster", "nowhere.toml"), "There is no cluster 'nowhere.toml'"),
    ],
)
def test_mistakes_are_said_in_a_sentence(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    script = () if "nowhere.py" in arguments else (str(EXAMPLES / "digits.py"),)
    monkeypatch.setattr(sys, "argv", ["paceline", "advise", *arguments, *script])
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder it is called in
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_script_is_advised_and_the_cluster_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    target, cluster = tmp_path / "mine.toml", EXAMPLES / "clusters" / "slow-worker.toml"
    run = paceline(
        *("advise", "--cluster", str(cluster), "--steps", "10", "--json"),
        *("--iterations", "40", "--now", "bsp", "--write", str(target), str(EXAMPLES / "digits.py")),
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["timing"]["batch"] == 32
    assert said["now"]["policy"] == "bsp"
    assert said["right"] is None
    assert {DDP, "bsp", "asp", "r2sp"} <= {each["policy"] for each in (row["candidate"] for row in said["candidates"])}
    assert target.read_text() == said["cluster"]
    spec = parse_cluster(target.read_text(), "mine", str(target))
    assert spec.model_bytes == 39980
    assert len(spec.workers) == 4
    first, _, _, last = (worker.compute_seconds() for worker in spec.workers)
    told_first, _, _, told_last = (worker.compute_seconds() for worker in load_cluster(str(cluster)).workers)
    assert last / first == pytest.approx(told_last / told_first, rel=0.01)
    assert said["command"].startswith("paceline run --workers 4 --policy ")
    assert said["command"].endswith(str(EXAMPLES / "digits.py"))


# In a lab


@pytest.fixture
def a_lab() -> None:
    try:
        labs.check()
    except labs.LabError as error:
        pytest.skip(str(error))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.alone
def test_links_of_a_lab_are_as_they_were_built(a_lab: None) -> None:
    rates = {"server0": 25e6, "worker0": 25e6, "worker1": 5e6, "worker2": 25e6}
    with labs.Lab(rates) as lab:
        found = asyncio.run(links.measured(links.LabAccess(lab), "server0", ["worker0", "worker1", "worker2"]))
    assert found.server == pytest.approx(25e6, rel=0.08)
    assert found.workers == pytest.approx((25e6, 5e6, 25e6), rel=0.08)
    assert found.latency < 0.01


@pytest.mark.slow
@pytest.mark.alone
def test_advice_is_put_to_the_test(a_lab: None) -> None:
    pytest.importorskip("torch")
    from paceline.advise import verify
    from paceline.lab.hosts import hosts

    spec = cluster(compute=0.1, model=1e6, link=12.5e6, workers=3).with_jitter(0.02)
    advice = told(spec)
    with labs.Lab(hosts(spec)) as lab:
        found = [verify.measured(lab, spec, each, 12) for each in verify.contenders(advice, 1)]
    assert advice.chosen.candidate in {each.expected.candidate for each in found}
    assert Candidate(DDP) in {each.expected.candidate for each in found}
    for each in found:
        assert abs(each.off) < 0.35, f"{each.expected.candidate.name}: a busy machine may be slow, but not that slow"
    assert isinstance(verify.right(found, advice.chosen.candidate), bool)
