"""`paceline topology` and `paceline collective`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from shell import Shell

SMALL = ("--n", 2, "--levels", 2, "--bytes", "1e6", "--link", "100Mbit")


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys, monkeypatch, ())


def test_a_network_is_described(shell: Shell) -> None:
    ended = shell("topology", "bcube", "--n", 3, "--levels", 2)
    assert ended.code == 0
    assert "BCube(3, 1): 9 servers, 2 NICs each; 6 switches" in ended.out
    assert "⟨2 1⟩" in ended.out
    found = json.loads(shell("topology", "torus", "--sizes", "3x4", "--json").out)
    assert len(found["servers"]) == 12 and len(found["cables"]) == 24


@pytest.mark.parametrize("kind", ["bcube", "dcell", "torus", "fattree"])
def test_a_network_is_drawn(shell: Shell, kind: str) -> None:
    pytest.importorskip("matplotlib")
    ended = shell("topology", kind, "--n", 4, "--levels", 2, "--plot")
    assert ended.code == 0 and f"Written: {kind}-4-2.png" in ended.err
    assert Path(f"{kind}-4-2.png").read_bytes().startswith(b"\x89PNG")


def test_every_algorithm_two_ways(shell: Shell) -> None:
    ended = shell("collective", *SMALL, "--algorithm", "hips,ring,rings,mesh,ps", "--json")
    rows = {row["algorithm"]: row for row in json.loads(ended.out)["rows"]}
    assert list(rows) == ["hips", "ring", "rings", "mesh", "ps"]
    assert rows["hips"]["formula_seconds"] == pytest.approx(0.06)
    assert rows["hips"]["simulated_seconds"] == pytest.approx(0.06)
    assert rows["ring"]["simulated_seconds"] == pytest.approx(0.12)
    assert all(row["measured_seconds"] is None for row in rows.values())
    assert rows["hips"]["stages"] == ["ring", "ring"] and rows["ring"]["stages"] is None


def test_a_table_for_people(shell: Shell) -> None:
    ended = shell("collective", *SMALL, "--stages", "ring,mesh", "--latency", "10us")
    assert ended.code == 0
    assert "BCube(2, 1): all-reduce of 1 MB on 4 servers with 2 NICs each" in ended.out
    assert "hips (ring, mesh)" in ended.out


def test_stages_are_chosen(shell: Shell) -> None:
    torus = (
        "collective",
        "--topology",
        "torus",
        "--n",
        6,
        "--levels",
        2,
        "--stages",
        "auto",
        "--latency",
        "10us",
        "--json",
    )
    small, large = (json.loads(shell(*torus, "--bytes", size, "-a", "hips").out)["rows"][0] for size in ("400", "1e9"))
    assert small["stages"] == ["mesh", "mesh"] and large["stages"] == ["ring", "ring"]


def test_what_is_too_large_is_calculated_alone(shell: Shell) -> None:
    ended = shell("collective", "--n", 16, "--levels", 4, "--stages", "auto", "-a", "hips,ring,mesh,ps")
    assert ended.code == 0 and "Networks of more than 600 servers are not simulated." in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("topology", "bcub"), "Did you mean 'bcube'?"),
        (("topology", "bcube", "--n", 1), "n is the number of servers in a group, at least 2, not 1."),
        (("topology", "torus", "--sizes", "3xa"), "--sizes: '3xa' is not a list of numbers such as 3x4."),
        (("topology", "bcube", "--n", 20, "--levels", 2, "--plot"), "has 400 servers; up to 300 can be drawn."),
        (("collective", "--algorithm", "hips,rong"), "there are hips, ring, rings, mesh, ps. Did you mean 'ring'?"),
        (("collective", "--stages", "ring,mesh,ps"), "it takes 2 stages, or one for all, not 3."),
        (("collective", "--stages", "star"), "There is no stage 'star'; there are ring, mesh, ps."),
        (("collective", "--levels", 0), "at least one level"),
        (("collective", "--bytes", "many"), "--bytes: 'many' is not understood"),
        (("collective", "--bytes", "0"), "--bytes must be from 4 to"),
        (("collective", "--link", "-3"), "--link greater than 0"),
        (("collective", "--bytes", "1e20"), "--bytes must be from 4 to 1e+15"),
        (("collective", "--bytes", "nan"), "--bytes: 'nan' is not understood"),
        (("collective", "--link", "inf"), "--link: 'inf' is not understood"),
        (("collective", "--latency", "nan"), "--latency: 'nan' is not understood"),
        (("collective", "--algorithm", ","), "name one at least"),
        (("collective", "--latency", "1ms", "--lab"), "a lab's links have their own"),
        (("collective", "--n", 8, "--levels", 2, "--lab"), "a lab has room for 32."),
        (("collective", "-a", "rings", "--levels", 3), "Edge-disjoint rings are known"),
        (("run", "--ranks-per-worker", 3, "--reduce", "bcube:n=2,levels=2", __file__), "they must be as many."),
        (("run", "--reduce", "bcube:n=2,levels=2", __file__), "say how many with --ranks-per-worker"),
        (("run", "--ranks-per-worker", 4, "--reduce", "bcube:n=2,size=3", __file__), "'size=3' is no option"),
        (("run", "--ranks-per-worker", 4, "--reduce", "bcube:n=2,nics=eth0", __file__), "has 2 NICs a server, not 1."),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(shell: Shell, arguments: tuple[object, ...], said: str) -> None:
    ended = shell(*arguments)
    assert ended.code == 2
    assert said in ended.err and len(ended.err.strip().splitlines()) == 1


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="network namespaces need root")
def test_measured_on_real_links(shell: Shell) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyroute2")
    ended = shell("collective", *SMALL[:4], "--bytes", "4e6", "--link", "100Mbit", "-a", "hips,ring", "--lab", "--json")
    if "kernel" in ended.err:
        pytest.skip(ended.err)
    rows = {row["algorithm"]: row for row in json.loads(ended.out)["rows"]}
    assert list(rows) == ["hips", "ring", "gloo"]
    for name in ("hips", "ring"):
        assert rows[name]["measured_seconds"] > 0.95 * rows[name]["formula_seconds"]
    assert rows["hips"]["measured_seconds"] < 0.8 * rows["ring"]["measured_seconds"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may make a lab")
def test_a_lab_needs_root(shell: Shell) -> None:
    assert "A lab needs root" in shell("collective", *SMALL, "--lab").err
