"""`paceline collective`, and the all-reduce of ranks in `paceline run`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from shell import Shell

DESCRIBE = ("collective", "--describe", "--topology")
SMALL = ("--n", 2, "--levels", 2, "--bytes", "1e6", "--link", "100Mbit")


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys, monkeypatch, ())


def test_a_network_is_described(shell: Shell) -> None:
    ended = shell(*DESCRIBE, "bcube", "--n", 3, "--levels", 2)
    assert ended.code == 0
    assert "BCube(3, 1): 9 servers, 2 NICs each; 6 switches" in ended.out
    assert "⟨2 1⟩" in ended.out
    found = json.loads(shell(*DESCRIBE, "torus", "--sizes", "3x4", "--json").out)
    assert len(found["servers"]) == 12 and len(found["cables"]) == 24


@pytest.mark.parametrize("kind", ["bcube", "dcell", "torus", "fattree"])
def test_a_network_is_drawn(shell: Shell, kind: str) -> None:
    pytest.importorskip("matplotlib")
    ended = shell(*DESCRIBE, kind, "--n", 4, "--levels", 2, "--plot")
    assert ended.code == 0 and f"Written: {kind}-4-2.png" in ended.err
    assert Path(f"{kind}-4-2.png").read_bytes().startswith(b"\x89PNG")


def test_every_algorithm_by_formula_and_simulated(shell: Shell) -> None:
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


def test_auto_names_the_fastest_algorithm(shell: Shell) -> None:
    dcell = ("collective", "--topology", "dcell", "--n", 3, "--stages", "auto", "-a", "hips")
    found = json.loads(shell(*dcell, "--json").out)
    assert found["fastest"] == {"algorithm": "ring", "stages": [], "seconds": pytest.approx(0.1467, rel=1e-3)}
    assert [row["algorithm"] for row in found["rows"]] == ["hips", "ring"]  # the answer has a row of its own
    assert found["least_seconds"] == pytest.approx(0.0733, rel=1e-2)
    assert "The fastest is ring: 147 ms." in shell(*dcell).out
    assert "The fastest is mesh:" in shell(*dcell, "--bytes", "1e4", "--latency", "100us").out
    assert json.loads(shell("collective", *SMALL, "--json").out)["fastest"] is None


def test_unequal_tori_say_how_far_they_are_from_the_bound(shell: Shell) -> None:
    ended = shell("collective", "--topology", "torus", "--sizes", "2x4", "-a", "hips,rings")
    assert "No all-reduce on these links can take less than 35 ms." in ended.out
    assert "HiPS takes 1.29 times as long: the levels are unequal" in ended.out
    assert "times as long" not in shell("collective", "--topology", "torus", "--n", 4, "-a", "hips").out


def test_each_level_may_have_its_own_rate(shell: Shell) -> None:
    two = ("collective", "--n", 2, "--levels", 2, "-a", "hips,ring", "--json")
    rows = json.loads(shell(*two, "--link", "600Gbit/100Gbit").out)["rows"]
    assert [row["simulated_seconds"] for row in rows] == [pytest.approx(5e-3, rel=0.01), pytest.approx(12e-3)]
    assert [row["formula_seconds"] for row in rows] == [pytest.approx(5e-3, rel=0.01), pytest.approx(12e-3)]
    assert shell(*two, "--link", "75GB/s/12.5GB/s").out == shell(*two, "--link", "600Gbit/100Gbit").out


def test_a_large_network_is_calculated_but_not_simulated(shell: Shell) -> None:
    ended = shell("collective", "--n", 16, "--levels", 4, "--stages", "auto", "-a", "hips,ring,mesh,ps")
    assert ended.code == 0 and "Networks of more than 600 servers are not simulated." in ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*DESCRIBE, "bcub"), "Did you mean 'bcube'?"),
        ((*DESCRIBE, "bcube", "--n", 1), "n is the number of servers in a group and must be at least 2; got 1."),
        ((*DESCRIBE, "torus", "--sizes", "3xa"), "--sizes: '3xa' is not a list of numbers such as 3x4."),
        ((*DESCRIBE, "bcube", "--n", 20, "--levels", 2, "--plot"), "has 400 servers; at most 300 can be drawn."),
        (("collective", "--algorithm", "hips,rong"), "there are hips, ring, rings, mesh, ps. Did you mean 'ring'?"),
        (("collective", "--stages", "ring,mesh,ps"), "name 2 stages, or one for all levels; got 3."),
        (("collective", "--stages", "star"), "There is no stage 'star'; there are ring, mesh, ps."),
        (("collective", "--levels", 0), "at least one level"),
        (("collective", "--bytes", "many"), "--bytes: 'many' is not a quantity"),
        (("collective", "--bytes", "0"), "--bytes must be from 4 to"),
        (("collective", "--link", "-3"), "--link greater than 0"),
        (("collective", "--bytes", "1e20"), "--bytes must be from 4 to 1e+15"),
        (("collective", "--bytes", "nan"), "--bytes: 'nan' is not a quantity"),
        (("collective", "--link", "1Gbit/2Gbit/3Gbit"), "has 2 levels: give 2 rates, or one for all; got 3."),
        (("collective", "--link", "1Gbit/fast"), "--link: '1Gbit/fast' is not a quantity"),
        (("collective", "--link", "inf"), "--link: 'inf' is not a quantity"),
        (("collective", "--latency", "nan"), "--latency: 'nan' is not a quantity"),
        (("collective", "--plot"), "--plot needs --describe."),
        (("collective", "--algorithm", ","), "name at least one of"),
        (("collective", "--latency", "1ms", "--lab"), "links of a lab have their own latency"),
        (("collective", "--n", 8, "--levels", 2, "--lab"), "a lab can hold 32."),
        (("collective", "-a", "rings", "--levels", 3), "Edge-disjoint rings are known"),
        (("run", "--ranks-per-worker", 3, "--reduce", "bcube:n=2,levels=2", __file__), "numbers must be equal."),
        (("run", "--reduce", "bcube:n=2,levels=2", __file__), "give their number with --ranks-per-worker"),
        (("run", "--ranks-per-worker", 4, "--reduce", "bcube:n=2,size=3", __file__), "'size=3' is not an option"),
        (
            ("run", "--ranks-per-worker", 4, "--reduce", "bcube:n=2,nics=eth0", __file__),
            "2 NICs in each server; got 1.",
        ),
    ],
)
def test_an_error_is_one_sentence(shell: Shell, arguments: tuple[object, ...], said: str) -> None:
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
