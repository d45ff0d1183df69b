"""The wire benchmark: bytes are moved and steps are made, or the transport has a fault and no figures."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from benchmarks import ROOT
from benchmarks.transports import measure as wire
from benchmarks.transports.load import Buffers, ServedModel


@pytest.mark.slow
def test_a_small_run_has_figures_for_every_transport() -> None:
    seen = []
    result = wire.measure(1, 3, ("tcp", "paceline"), progress=lambda _transport, part: seen.append(part))
    # No fault means that the bytes came back with every step applied.
    assert [(figure.transport, figure.fault) for figure in result.transports] == [("tcp", None), ("paceline", None)]
    for figure in result.transports:
        assert figure.seconds is not None and figure.seconds > 0
        assert figure.gigabytes_per_second == pytest.approx(0.002 / figure.seconds)
    assert result.transports[0].ratio_to_tcp == 1.0
    assert result.ratio_to_tcp == result.transports[1].ratio_to_tcp
    assert result.ratio_to_tcp_with_apply is None, "tcp_with_apply was not measured"
    assert seen[0] == 0.0 and seen[-1] == 1.0


@pytest.mark.slow
def test_a_missing_step_or_a_wrong_byte_is_noticed() -> None:
    buffers, model = Buffers.of(1000), ServedModel(1000)
    for _ in range(3):
        model.step(buffers.gradient)
    buffers.weights.copy_(model.weights)
    assert buffers.hold_steps(3)
    assert not buffers.hold_steps(2)
    buffers.weights[500] += 0.5
    assert not buffers.hold_steps(3)


def test_a_transport_that_returns_wrong_bytes_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['{"transport": "tcp", "seconds": 0.1}\n', '{"transport": "tcp", "right": false}\n']
    code = f"import sys; sys.stdout.write({''.join(lines)!r})"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _command, **how: start([sys.executable, "-c", code], **how))
    (figure,) = wire.measure(1, 1, ("tcp",)).transports
    assert figure.seconds is None
    assert figure.fault == "tcp returned wrong bytes"


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    result = wire.measure(1, 1, ("ray",))
    assert [figure.fault for figure in result.transports] == ["not installed"] * 2
    assert list(wire.rows(result))[1] == ("ray", "not installed", "", "")


def test_a_model_that_does_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(wire.BenchError, match="fewer --megabytes"):
        wire.measure(10**9)


@pytest.mark.parametrize("bad", [["--megabytes", "0"], ["--rounds", "none"], ["--megabytes", "1000000000"]])
def test_the_command_refuses_in_one_sentence(bad: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "wire.py", *bad], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.strip().splitlines()[-1].startswith("wire.py: error: ")
