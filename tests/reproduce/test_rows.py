"""Results are written as JSON and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Results, Row, read

RESULTS = Results(
    "r2sp",
    "paceline reproduce r2sp --quick",
    "cpu",
    "2026-02-03",
    (
        Figure(
            "table1",
            "A table",
            (
                Row("table1", "seconds", 9.74, 9.7, "s", "simulated", "fitted"),
                Row("table1", "a range", "25 to 60", "35 to 69", "%", "simulated"),
                Row("table1", "not reached", 3.0, None, "s", "gpu", "the best was 0.6"),
                Row("table1", "a whole number", None, 15, "updates", "lab"),
            ),
            (Plot("Bars", "", "s", (PlotLine("ours", ("a", "b"), (1.0, None)),), "bars"),),
        ),
        Figure("fig2", "A figure", (Row("fig2", "x", None, 1.0, "", "simulated"),), missing=("ImageNet is not here.",)),
        Figure(
            "fig3", "Nothing of it", (), (Plot("Lines", "x", "y", (PlotLine("l", (0.1, 1.0), (1.0, 2.0)),), log=True),)
        ),
    ),
)


def written(folder: Path, content: Any) -> Path:
    path = folder / "results.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_results_survive_writing_and_reading(tmp_path: Path) -> None:
    assert read(written(tmp_path, RESULTS.as_json())) == RESULTS


def test_all_rows_are_in_one_list() -> None:
    plain = json.loads(RESULTS.as_json())
    assert plain.keys() == {"paper", "not_reproduced", "rows", "command", "device", "date", "figures"}
    assert [row["what"] for row in plain["rows"]] == [row.what for row in RESULTS.rows]
    assert plain["rows"][0] == {
        "id": "table1",
        "what": "seconds",
        "paper": 9.74,
        "ours": 9.7,
        "unit": "s",
        "where": "simulated",
        "note": "fitted",
    }
    assert all("rows" not in figure for figure in plain["figures"])


def test_empty_results_survive_writing_and_reading(tmp_path: Path) -> None:
    none = Results("dssp", "", "cpu", "", ())
    assert none.rows == []
    assert read(written(tmp_path, none.as_json())) == none


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b'{"paper": "r2sp", "rows": [',
        [],
        [1, 2],
        "r2sp",
        7,
        None,
        {},
        {"rows": [], "figures": []},
        {"rows": 3, "figures": [{"id": "x"}]},
        {"rows": [{"what": "no id"}], "figures": [{"id": "x"}]},
        json.loads(RESULTS.as_json()) | {"device": 3},
        json.loads(RESULTS.as_json()) | {"figures": "all"},
    ],
    ids=lambda bad: str(bad)[:30],
)
def test_other_files_are_refused_with_a_sentence(tmp_path: Path, bad: Any) -> None:
    path = written(tmp_path, bad)
    with pytest.raises(ValueError, match=r"results\.json does not hold results of `paceline reproduce`\.$"):
        read(path)
