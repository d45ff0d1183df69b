"""Notes about a job or a lab, before it begins."""

from __future__ import annotations

import pytest

from paceline.cli.job_checks import note_links


def test_a_machine_that_cannot_carry_the_links_is_noted_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    note_links(0.97)
    assert not capsys.readouterr().err
    note_links(0.005)
    noted = " ".join(capsys.readouterr().err.split())
    assert noted.startswith("Note: this machine carries only 0.5% of the links' rates")
    assert "Describe slower links" in noted
