"""The command line: its output, its files and its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import paceline
import shell as shell_of
from paceline.observe.trace import Applied, Began, Event, from_line
from paceline.policies import names, policy_options
from paceline.simulate import Cluster, SimulationError, builtin_names, limit_seconds, load_cluster

CONSOLE_SCRIPT = Path(sys.executable).with_name("paceline")

SMALL = """
[model]
bytes = "10MB"
[servers]
count = 1
link = "1Gbit"
[[workers]]
count = 2
link = "1Gbit"
batch = 8
samples_per_second = 80.0
"""

#: Keys that users rely on. More may be added.
KEYS = {
    "policy",
    "apply",
    "limit_seconds",
    "mean_iteration_seconds",
    "samples_per_second",
    "blocking_seconds",
    "blocking_by_worker",
    "communication_seconds",
    "max_staleness",
    "mean_staleness",
    "max_progress_gap",
    "update_gaps",
    "batch_sizes",
    "updates",
    "clipped",
    "discarded",
    "events",
    "wall_seconds",
}
ADDED = {
    *("simulated_seconds", "warm_up_iterations", "updates_by_worker", "lost", "returned"),
    *("seconds", "counts_samples"),
}


class Shell(shell_of.Shell):
    """A shell in a folder with a small cluster."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int = 120
    ) -> None:
        super().__init__(folder, capsys, monkeypatch, width=width)
        (folder / "small.toml").write_text(SMALL)

    def files(self) -> set[str]:
        return super().files() - {"small.toml"}

    def json(self, *args: str) -> Any:
        outcome = self("simulate", *args, "--json")
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)


# JSON


def test_json_has_the_keys_that_users_rely_on(shell: Shell) -> None:
    printed = shell.json("r2sp-b", "--policy", "bsp,ssp:staleness=5,r2sp", "--iterations", "8", "--seed", "0")
    assert printed.keys() == {"cluster", "limit_seconds", "peak_memory_mb", "policies"}
    assert printed["cluster"] == "r2sp-b"
    assert printed["limit_seconds"] == pytest.approx(limit_seconds(load_cluster("r2sp-b"), streamed=False))
    assert [run["policy"] for run in printed["policies"]] == ["bsp", "ssp:staleness=5", "r2sp"]
    for run in printed["policies"]:
        assert run.keys() == KEYS | ADDED
        assert run["update_gaps"].keys() == {"zero_fraction", "p5", "p50", "p95"}
        workers = {str(worker) for worker in range(8)}
        assert run["batch_sizes"].keys() == run["blocking_by_worker"].keys() == workers
        assert run["apply"] == "whole"
        assert run["limit_seconds"] == printed["limit_seconds"]
        assert run["updates"] + run["discarded"] <= 8 * 8 + 8
        assert run["events"] > 0
        assert run["wall_seconds"] > 0


def test_json_is_all_there_is_on_stdout_and_nothing_on_stderr(shell: Shell) -> None:
    outcome = shell("simulate", "small.toml", "--policy", "asp", "--iterations", "3", "--json")
    json.loads(outcome.out)
    assert outcome.err == ""


def test_a_cluster_file_is_named_by_its_stem(shell: Shell) -> None:
    assert shell.json("small.toml", "-p", "bsp", "--iterations", "2")["cluster"] == "small"


def test_the_default_policies(shell: Shell) -> None:
    printed = shell.json("small.toml", "--iterations", "2")
    assert [run["policy"] for run in printed["policies"]] == ["bsp", "asp", "ssp", "dssp", "r2sp"]


def test_policy_may_be_repeated_and_options_belong_to_the_one_before(shell: Shell) -> None:
    printed = shell.json(
        "small.toml",
        "--policy",
        "dssp:low=1,high=2,asp",
        "--policy",
        "r2sp:relax=0.5",
        "-p",
        "bsp",
        "--iterations",
        "2",
    )
    assert [run["policy"] for run in printed["policies"]] == ["dssp:low=1,high=2", "asp", "r2sp:relax=0.5", "bsp"]


def test_more_groups_than_workers_are_as_many_turns_as_workers_with_a_note(shell: Shell) -> None:
    policies = ("-p", "r2sp:groups=4,r2sp:groups=5,r2sp")
    outcome = shell(
        "simulate", "dssp-homogeneous-alexnet", *policies, "--iterations", "8", "--apply", "streamed", "--json"
    )
    assert outcome.err == (
        "Note: r2sp:groups=5 has more groups than workers (4). Each worker takes its own turn, as without groups.\n"
    )
    assert len({run["mean_iteration_seconds"] for run in json.loads(outcome.out)["policies"]}) == 1


def test_a_policy_that_cannot_be_streamed_runs_whole_with_a_note(shell: Shell) -> None:
    outcome = shell("simulate", "r2sp-a-vgg16", "-p", "bsp,r2sp", "--iterations", "4", "--apply", "streamed", "--json")
    printed = json.loads(outcome.out)
    assert outcome.err == "Note: bsp cannot be streamed. Its updates are applied whole.\n"
    spec = load_cluster("r2sp-a-vgg16")
    whole, streamed = (limit_seconds(spec, streamed=way) for way in (False, True))
    assert [(run["apply"], run["limit_seconds"]) for run in printed["policies"]] == [
        ("whole", pytest.approx(whole)),
        ("streamed", pytest.approx(streamed)),
    ]
    assert printed["limit_seconds"] == pytest.approx(streamed)


def test_a_pipelined_barrier_has_the_floor_of_a_streamed_run(shell: Shell) -> None:
    printed = shell.json("dssp-mixed", "-p", "bsp:pipeline=true", "--iterations", "8")
    run = printed["policies"][0]
    assert run["limit_seconds"] == pytest.approx(limit_seconds(load_cluster("dssp-mixed"), streamed=True))
    assert run["mean_iteration_seconds"] >= 0.999 * run["limit_seconds"]


def test_colocate(shell: Shell) -> None:
    apart = shell.json("r2sp-a-vgg16", "-p", "bsp", "--iterations", "3")
    beside = shell.json("r2sp-a-vgg16", "-p", "bsp", "--iterations", "3", "--colocate")
    spec = load_cluster("r2sp-a-vgg16").colocated()
    assert beside["limit_seconds"] == pytest.approx(limit_seconds(spec, streamed=False))
    # All push and then all pull: 15/16 of the model each way, at a worker's own rate.
    expected = 128 / 182.8571 + 2 * 15 / 16 * 552e6 / 489.24e6
    assert beside["policies"][0]["mean_iteration_seconds"] == pytest.approx(expected, rel=0.01)
    assert apart["policies"][0]["mean_iteration_seconds"] > 3 * expected


def test_jitter_and_seed(shell: Shell) -> None:
    def seconds(*args: str) -> float:
        run = shell.json("r2sp-b", "-p", "asp", "--iterations", "5", *args)["policies"][0]
        return float(run["mean_iteration_seconds"])

    assert seconds("--jitter", "0.2") == seconds("--jitter", "0.2", "--seed", "0")
    assert seconds("--jitter", "0.2") != seconds("--jitter", "0.2", "--seed", "-1")
    assert seconds("--jitter", "0", "--seed", "1") == seconds("--seed", "2")


def test_every_seed_trains_and_one_that_is_too_large_is_refused(shell: Shell) -> None:
    pytest.importorskip("torch")
    train = ("simulate", "small.toml", "-p", "asp", "--train", "mlp", "--rounds", "1", "--seed")
    assert shell(*train, 2**32 - 1).code == 0
    outcome = shell(*train, 2**32)
    assert outcome.code == 2
    assert "should be less than or equal to 4294967295" in outcome.err


def test_faults_come_from_the_seed(shell: Shell) -> None:
    def simulated(seed: int) -> float:
        printed = shell.json("rlp-10", "-p", "r2sp", "--iterations", "8", "--faults", "6", "--seed", str(seed))
        return float(printed["policies"][0]["simulated_seconds"])

    assert simulated(1) == simulated(1)
    assert simulated(1) != simulated(2)


# The table


def test_the_table_shows_every_policy_and_the_floor(shell: Shell) -> None:
    outcome = shell("simulate", "r2sp-a-vgg16", "-p", "bsp,r2sp", "--iterations", "8")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "r2sp-a-vgg16: 16 workers, 4 servers, a model of 552 MB" in outcome.out
    assert "This cluster's floor is 4.513 s per iteration." in outcome.out
    assert "2.16" in outcome.out
    assert "peak memory" in outcome.out


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(tmp_path, capsys, monkeypatch, width)
    outcome = shell("simulate", "r2sp-b", "-p", "bsp,r2sp:tune_batches=true,groups=4,dssp", "--iterations", "4")
    assert "…" not in outcome.out
    assert max(len(line) for line in outcome.out.splitlines()) <= width


def test_one_server_is_not_many(shell: Shell) -> None:
    assert "2 workers, 1 server, a model of 10 MB" in shell("simulate", "small.toml", "--iterations", "1").out


@pytest.mark.parametrize("iterations", ["1", "2", "3", "4", "5"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_very_short_runs(shell: Shell, iterations: str, workers: str) -> None:
    (shell.folder / "few.toml").write_text(SMALL.replace("count = 2", f"count = {workers}"))
    every = ",".join(names()) + ",bsp:pipeline=true,r2sp:groups=auto"
    for more in ((), ("--colocate",), ("--apply", "streamed")):
        outcome = shell("simulate", "few.toml", "-p", every, "--iterations", iterations, *more)
        assert outcome.code == 0, outcome.err
        assert "nan" not in outcome.out
        assert "inf" not in outcome.out


@pytest.mark.parametrize("latency", ["0s", "10s"])
def test_no_latency_and_far_too_much(shell: Shell, latency: str) -> None:
    (shell.folder / "far.toml").write_text(SMALL.replace('link = "1Gbit"', f'link = "1Gbit"\nlatency = "{latency}"', 1))
    for apply in ("whole", "streamed"):
        printed = shell.json("far.toml", "-p", "bsp,bsp:pipeline=true,asp,r2sp", "--iterations", "8", "--apply", apply)
        for run in printed["policies"]:
            assert run["mean_iteration_seconds"] >= 0.999 * run["limit_seconds"]


# Files


def events_of(path: Path) -> list[Event]:
    return [from_line(line) for line in path.read_text().splitlines()]


def test_a_trace_holds_every_run(shell: Shell) -> None:
    outcome = shell(
        "simulate", "small.toml", "-p", "bsp,r2sp", "--iterations", "3", "--seed", "5", "--trace", "t.jsonl"
    )
    assert outcome.err == "Written: t.jsonl\n"
    assert shell.files() == {"t.jsonl"}
    events = events_of(shell.folder / "t.jsonl")
    began = [event for event in events if isinstance(event, Began)]
    assert began == [Began(0.0, "small", "bsp", "whole", 5), Began(0.0, "small", "r2sp", "whole", 5)]
    assert events[0] == began[0]
    assert sum(isinstance(event, Applied) for event in events) >= 3 + 6


def test_the_same_seed_writes_the_same_bytes(shell: Shell) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        shell("simulate", "rlp-10", "-p", "asp,r2sp", "--iterations", "3", "--seed", seed, "--trace", name)
    a, b, c = ((shell.folder / name).read_bytes() for name in "abc")
    assert a == b
    begins = [line for line in c.splitlines() if b'"began"' in line]
    assert len(begins) == 2
    assert c.replace(b'"seed":4', b'"seed":3') != a


def test_a_plot_is_drawn(shell: Shell) -> None:
    pytest.importorskip("matplotlib")
    outcome = shell(
        "simulate", "small.toml", "-p", "bsp,r2sp", "--iterations", "6", "--plot", "p.PNG", "--trace", "t", "--json"
    )
    assert outcome.code == 0
    assert json.loads(outcome.out)["cluster"] == "small"
    assert shell.files() == {"p.PNG", "t"}
    assert (shell.folder / "p.PNG").read_bytes().startswith(b"\x89PNG")


def test_an_old_file_is_replaced(shell: Shell) -> None:
    (shell.folder / "t.jsonl").write_text("old\n")
    shell("simulate", "small.toml", "-p", "bsp", "--iterations", "2", "--trace", "t.jsonl")
    assert "old" not in (shell.folder / "t.jsonl").read_text()


def test_a_run_that_gets_stuck_writes_nothing_and_keeps_an_old_file(shell: Shell) -> None:
    kills = "".join(f'[[faults]]\nkind = "kill"\ntime = 0.1\nworker = {worker}\n' for worker in (0, 1))
    (shell.folder / "small.toml").write_text(SMALL + kills)
    (shell.folder / "t.jsonl").write_text("old\n")
    outcome = shell("simulate", "small.toml", "-p", "bsp", "--trace", "t.jsonl", "--plot", "p.png")
    assert outcome.code == 2
    assert "no worker can continue" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert shell.files() == {"t.jsonl"}
    assert (shell.folder / "t.jsonl").read_text() == "old\n"


def test_a_full_disk_is_reported_and_leaves_no_file(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "t.jsonl")

    monkeypatch.setattr(sys.modules["paceline.cli.simulate"], "write_event", full)
    outcome = shell("simulate", "small.toml", "-p", "bsp", "--iterations", "2", "--trace", "t.jsonl")
    assert (outcome.code, outcome.err) == (2, "t.jsonl cannot be written: No space left on device.\n")
    assert shell.files() == set()


# Mistakes


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("small.toml -p bps", "There is no policy 'bps'. Did you mean 'bsp'? Known policies: " + ", ".join(names())),
        ("small.toml -p bsp,asp,nonsense", "There is no policy 'nonsense'. Known policies:"),
        (
            "small.toml -p ssp:stale=3",
            "ssp has no option 'stale'. Did you mean 'staleness'? Its options: staleness, weights, wait.",
        ),
        ("small.toml -p ssp:staleness=-1", "ssp: staleness must be a whole number"),
        ("small.toml -p ssp:staleness=three", "at least 0, not 'three'"),
        ("small.toml -p r2sp:relax=0", "r2sp: relax must be a number above 0 and at most 2, not '0'"),
        ("small.toml -p bsp:fraction=2", "above 0 and at most 1, not '2'"),
        ("small.toml -p bsp:pipeline=maybe", "bsp: pipeline must be true or false, not 'maybe'."),
        ("small.toml -p dssp:low=3,high=1", "dssp: high must be at least low (3); got 1."),
        ("small.toml -p staleness=3", "The option 'staleness=3' must come after the name of a policy."),
        ("small.toml -p ,", "The list ',' has an empty item."),
        ("small.toml -p no.such.module:Thing", "'no.such.module:Thing' cannot be loaded as a policy"),
        ("small.toml -p os.path:join", "'os.path:join' is not a policy"),
        (
            "nowhere",
            "There is no cluster 'nowhere', neither built in nor as a file. Built in: dssp-homogeneous-alexnet,",
        ),
        ("r2sp-a-vgg", "Did you mean 'r2sp-a-vgg16'?"),
        ("missing.toml", "There is no cluster 'missing.toml'"),
        (".", "There is no cluster '.'"),
        ("unknown-key.toml", "unknown-key.toml: servers.colour is not known; expected one of count, link,"),
        ("missing-key.toml", "missing-key.toml: model.bytes is missing; expected a size greater than 0"),
        ("bad-unit.toml", "bad-unit.toml: servers.link is '1Gb'; expected a rate greater than 0, such as \"10Gbit\""),
        ("negative.toml", "negative.toml: model.bytes is '-10MB'; expected a size greater than 0"),
        ("no-toml.toml", "no-toml.toml: is not valid TOML"),
        ("small.toml --rate 0.1", "--rate needs --train NETWORK."),
        ("small.toml --rounds 3 -p bsp", "--rounds needs --train NETWORK."),
        ("small.toml --apply both", "--apply must be whole or streamed, not 'both'."),
        ("small.toml --jitter 5", "--jitter must be a number from 0 to 3, not 5; 0.05 is 5%."),
        ("small.toml --jitter -0.1", "--jitter must be a number from 0 to 3, not -0.1"),
        ("small.toml --jitter nan", "--jitter must be a number from 0 to 3, not nan"),
        ("small.toml --jitter inf", "--jitter must be a number from 0 to 3, not inf"),
        ("small.toml --jitter much", "--jitter"),
        ("small.toml --iterations 0", "--iterations"),
        ("small.toml --iterations -5", "--iterations"),
        ("small.toml --iterations 2.5", "--iterations"),
        ("small.toml --faults -1", "--faults"),
        ("small.toml --seed one", "--seed"),
        ("small.toml --polcy bsp", "--polcy"),
        ("small.toml --iterations", "--iterations"),
        ("small.toml bsp", "bsp"),
        ("small.toml --trace", "--trace"),
        ("small.toml --trace .", "--trace: '.' cannot be written; name a plain file in a folder that exists."),
        ("small.toml --trace no/such/folder/t.jsonl", "cannot be written; name a plain file in a folder that exists."),
        ("small.toml --trace /dev/null", "--trace: '/dev/null' cannot be written; name a plain file"),
        ("small.toml --plot no/such/p.png", "--plot: 'no/such/p.png' cannot be written"),
        ("small.toml --plot p.pdf", "--plot must name a .png file, not 'p.pdf'."),
        ("small.toml --plot p", "--plot must name a .png file, not 'p'."),
        ("small.toml --plot x.png --trace ./x.png", "--trace and --plot must name two different files."),
        ("", "cluster"),
    ],
)
def test_an_error_is_one_sentence_and_writes_nothing(shell: Shell, args: str, said: str) -> None:
    for name, old, new in (
        ("unknown-key.toml", "count = 1\n", "count = 1\ncolour = 3\n"),
        ("missing-key.toml", 'bytes = "10MB"', ""),
        ("bad-unit.toml", '"1Gbit"', '"1Gb"'),
        ("negative.toml", "10MB", "-10MB"),
        ("no-toml.toml", "[model]", "[model"),
    ):
        (shell.folder / name).write_text(SMALL.replace(old, new, 1))
    before = shell.files()
    extra = [] if "--trace" in args or "--iterations" in args else ["--trace", "t.jsonl"]
    outcome = shell("simulate", *args.split(), *extra)
    assert outcome.code == 2
    assert outcome.out == ""
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert outcome.err.rstrip().endswith((".", "?", "--help`."))
    assert "Traceback" not in outcome.err
    assert shell.files() == before


def test_an_error_in_the_last_policy_is_found_before_the_first_runs(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr(Cluster, "run", run)
    assert shell("simulate", "small.toml", "-p", "bsp,asp,sssp").code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(shell: Shell) -> None:
    locked = shell.folder / "locked"
    locked.mkdir(mode=0o500)
    outcome = shell("simulate", "small.toml", "--trace", "locked/t.jsonl")
    assert (outcome.code, outcome.err) == (2, "--trace: the folder 'locked' cannot be written to; name another one.\n")


def test_a_wrong_command(shell: Shell) -> None:
    outcome = shell("simulat")
    assert outcome.code == 2
    assert "simulat" in outcome.err
    assert outcome.err.endswith("See `paceline --help`.\n")
    assert len(outcome.err.splitlines()) == 1


def test_plots_need_matplotlib_and_say_so(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = shell("simulate", "small.toml", "--plot", "p.png")
    assert (outcome.code, outcome.err) == (2, '--plot needs matplotlib: pip install "paceline[plot]".\n')


def test_an_interrupt_is_no_traceback(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cluster, "run", interrupted)
    outcome = shell("simulate", "small.toml", "--trace", "t.jsonl", "--plot", "p.png")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "Interrupted; nothing was written.\n")
    assert shell.files() == set()


def test_a_simulation_that_gets_stuck_is_one_sentence(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object) -> None:
        raise SimulationError("After 3 s no worker can continue.")

    monkeypatch.setattr(Cluster, "run", stuck)
    outcome = shell("simulate", "small.toml")
    assert (outcome.code, outcome.err) == (2, "After 3 s no worker can continue.\n")


# The other commands


def test_policies_names_every_policy_and_option(shell: Shell) -> None:
    outcome = shell("policies")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isalpha()][: len(names())] == names()
    for name in names():
        at = next(i for i, line in enumerate(lines) if line.split(" ")[0] == name)
        for option in policy_options(name):
            assert any(line.strip().startswith(f"{option}=") for line in lines[at + 1 : at + 20])
    assert "module:Class" in outcome.out


def test_clusters_lists_every_built_in_cluster(shell: Shell) -> None:
    outcome = shell("clusters")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines() if line[0] != " "] == builtin_names()
    assert "VGG16 on the R²SP paper's cluster A" in outcome.out


def test_version(shell: Shell) -> None:
    assert shell("--version").out == f"paceline {paceline.__version__}\n"


def test_help(shell: Shell) -> None:
    alone, asked = shell(), shell("--help")
    assert alone.code == asked.code == 0
    assert alone.out == asked.out
    panels = [line.split()[1] for line in alone.out.splitlines() if line.startswith("╭─")]
    assert panels == ["Options", "Train", "Decide", "Research"]
    commands = [line.split()[1] for line in alone.out.splitlines() if line.startswith("│ ") and line[2].isalpha()]
    assert commands[:9] == ["run", "serve", "work", "shard", "watch", "token", "certificate", "export", "replay"]
    assert {"advise", "simulate", "lab", "reproduce", "federate", "collective", "policies", "clusters"} == set(
        commands[9:]
    )
    assert len(alone.out.splitlines()) <= 33, "it fits one screen"
    simulate = shell("simulate", "--help").out
    for option in ("policy", "iterations", "seed", "apply", "colocate", "jitter", "faults", "json", "trace", "plot"):
        assert f"--{option}" in simulate


def test_a_policy_in_the_current_folder(shell: Shell) -> None:
    (shell.folder / "mine.py").write_text(
        "from paceline.policies.asp import ASP\n"
        "class Lazy(ASP):\n"
        "    def __init__(self, naps: int = 1) -> None:\n"
        "        super().__init__()\n"
    )
    printed = shell.json("small.toml", "-p", "mine:Lazy:naps=2,bsp", "--iterations", "2")
    assert [run["policy"] for run in printed["policies"]] == ["mine:Lazy:naps=2", "bsp"]
    sys.modules.pop("mine")


# As a user runs it


def paceline_process(*args: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(CONSOLE_SCRIPT), *args],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_console_script(tmp_path: Path) -> None:
    process = paceline_process("simulate", "r2sp-b", "-p", "r2sp", "--iterations", "4", "--json", folder=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["policies"][0]["policy"] == "r2sp"


def test_the_console_script_refuses(tmp_path: Path) -> None:
    process = paceline_process("simulate", "r2sp-b", "-p", "r3sp", folder=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("There is no policy 'r3sp'. Did you mean 'r2sp'? Known policies: bsp,")


def test_as_a_module(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"paceline {paceline.__version__}\n", "")


def test_control_c_in_a_long_run(tmp_path: Path) -> None:
    process = paceline_process(
        "simulate", "r2sp-b", "-p", "r2sp", "--iterations", "100000000", "--trace", "t.jsonl", folder=tmp_path
    )
    try:
        deadline = time.monotonic() + 30
        part = tmp_path / "t.jsonl.part"
        while not (part.exists() and part.stat().st_size):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert (out, err) == ("", "Interrupted; nothing was written.\n")
    assert list(tmp_path.iterdir()) == []


def test_the_reader_of_the_output_may_close_it(tmp_path: Path) -> None:
    process = paceline_process("policies", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert "Traceback" not in err
    assert "Exception" not in err


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["run", "--apply", "streamed", "-p", "r2sp"], "Streamed updates cannot be replicated yet"),
        (["run", "-p", "bsp:pipeline=true"], "Streamed updates cannot be replicated yet"),
        (["run", "--link", "200Mbit"], "--link cannot be used with --replicas yet"),
        (["serve", "--record-updates", "folder"], "--record-updates cannot be used with --replicas yet"),
        (["serve", "--colocate"], "needs `paceline run`"),
        (["lab", "lab-1mb", "--apply", "streamed"], "Streamed updates cannot be replicated yet"),
        (["simulate", "r2sp-b", "-p", "bsp:pipeline=true"], "Streamed updates cannot be replicated yet"),
        (["simulate", "r2sp-b", "--colocate", "-p", "bsp"], "cannot be simulated yet"),
    ],
)
def test_replicas_that_cannot_be_had_are_refused(shell: Shell, command: list[str], reason: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    scripts = [str(script)] if command[0] == "run" else []
    outcome = shell(*command, "--replicas", "1", *scripts)
    assert outcome.code == 2
    assert reason in outcome.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--max-norm", "10", "--apply", "streamed", "-p", "r2sp"], "apply updates whole"),
        (["--max-norm", "10", "-p", "bsp:pipeline=true"], "apply updates whole"),
        (["--max-norm", "10", "-p", "safa"], "Workers push whole models under safa"),
        (["--max-norm", "inf"], "a number from 1 up"),
        (["--max-norm", "nan"], "max-norm"),
        (["--max-norm", "0.5"], "max-norm"),
        (["--updates", "int3"], "topk:F such as topk:0.02, or a part at a time such as int4/4, not as 'int3'"),
        (["--updates", "int4/1"], "2 to 256 parts, such as int4/4, not 'int4/1'"),
        (["--updates", "topk:2"], "from 0.0001 to 1"),
        (["--updates", "int8", "-p", "safa"], "Workers push whole models under safa"),
        (["--updates", "int8", "--servers", "0"], "no shards"),
    ],
)
def test_updates_that_cannot_be_clipped_or_encoded_are_refused(
    shell: Shell, options: list[str], reason: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    for command in (["run", *options, str(script)], ["serve", *options]):
        outcome = shell(*command)
        assert outcome.code == 2
        assert reason in outcome.err


def test_a_federation_with_too_few_clients_is_answered_in_its_own_words(shell: Shell) -> None:
    outcome = shell("federate", "serve", "--clients", "2", "-p", "ksync:k=3")
    assert outcome.code == 2
    assert outcome.err == "ksync:k=3 needs at least 3 clients, and there are 2; use --clients 3.\n"


def test_a_job_with_too_few_workers_is_refused_without_notes_about_it(shell: Shell) -> None:
    outcome = shell("serve", "--workers", "2", "-p", "r2sp:groups=3")
    assert outcome.code == 2
    assert outcome.err == "r2sp:groups=3 needs at least 3 workers, and there are 2; use --workers 3.\n"


@pytest.mark.parametrize("policy", ["asp", "bsp", "ssp:staleness=3"])
def test_a_correction_of_staleness_that_nobody_knows_gives_a_note(shell: Shell, policy: str, tmp_path: Path) -> None:
    outcome = shell("serve", "-p", policy, "--correct", "full", "--resume", str(tmp_path / "none"))
    assert outcome.code == 2
    assert f"Note: --correct has no effect, since {policy} does not know in advance how stale" in outcome.err
