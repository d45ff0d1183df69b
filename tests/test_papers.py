"""docs/papers.md: every file, name, option and command in its tables exists, and no number of a paper is left out."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.policies import make
from paceline.policies.registry import names, split_list
from paceline.simulate import load_cluster
from test_docs import ROOT, check_paceline, exists, found

PAGE = ROOT / "docs" / "papers.md"
HEADINGS = ("item", "what it is", "where", "status", "command")
NEEDS_A_REASON = {"improved", "in part", "not reproduced"}
STATUSES = NEEDS_A_REASON | {"faithful", "letter by option", "illustration"}
CODE = re.compile(r"`([^`]+)`")
BOLD = re.compile(r"\*\*([^*]+)\*\*")
KIND = re.compile(r"^(Algorithm|Formula|Table|Figure) (.*)$")


def numbered(kind: str, numbers: str) -> set[str]:
    return {f"{kind} {number}" for number in numbers.split()}


#: The numbers of each paper, read from the paper: its formulas, tables and figures.
NUMBERED = {
    "R²SP, INFOCOM 2019": {
        *numbered("Table", "I II"),
        *numbered("Figure", "1 2 3a 3b 4a 4b 5a 5b 6 7a 7b 7c 8 9 10 11 12"),
    },
    "R²SP and FL-R²SP, ToN 2026: clusters": {
        *numbered("Formula", "(1) (2) (3) (4)"),
        *numbered("Table", "I III"),
        *numbered("Figure", "1 2 3a 3b 4a 4b 5a 5b 7 8a 8b 8c 9 10 11 12 13 14a 14b 14c"),
    },
    "R²SP and FL-R²SP, ToN 2026: federations": {
        *numbered("Table", "II IV V"),
        *numbered("Figure", "6 15 16 17 18"),
    },
    "DSSP, ICDCS 2019": {
        *numbered("Formula", "(1) (2)"),
        *numbered("Table", "I"),
        *numbered("Figure", "1 2 3a 3b 3c 3d 3e 3f 4"),
    },
    "RLP, ICLR 2020": {*numbered("Table", "1"), *numbered("Figure", "1 2a 2b 2c 3a 3b 3c 4")},
    "HiPS, NetAI 2018": {*numbered("Table", "1 2 3"), *numbered("Figure", "1 2 3 4a 4b 4c 5 6 7")},
}
#: The algorithms of each paper: the last line of each of their parts.
LINES = {
    "R²SP, INFOCOM 2019": {("1", "worker"): 7, ("1", "server"): 2, ("1", "coordinator"): 3},
    "R²SP and FL-R²SP, ToN 2026: clusters": {("1", "worker"): 7, ("1", "server"): 2, ("1", "coordinator"): 3},
    "R²SP and FL-R²SP, ToN 2026: federations": {("2", "client"): 5, ("2", "server"): 18},
    "DSSP, ICDCS 2019": {("1", "worker"): 5, ("1", "server"): 19, ("2", ""): 9},
    "RLP, ICLR 2020": {("1", ""): 11, ("2", ""): 14},
    "HiPS, NetAI 2018": {("1", ""): 21, ("2", ""): 29},
}


@dataclass(frozen=True)
class PaperRow:
    """A row of a paper's table."""

    section: str
    item: str
    what: str
    where: str
    status: str
    command: str

    def __str__(self) -> str:
        return f"{self.section}: {self.item}"


def rows_of(page: str) -> list[PaperRow]:
    """Return the rows of all sections that stand for a paper."""
    rows = []
    for section in page.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert cells and tuple(cells[0]) == HEADINGS, f"{title}: the headings of its table must be {HEADINGS}"
        for row in cells[2:]:
            assert len(row) == len(HEADINGS) and all(row), f"{title}: a row of {len(HEADINGS)} cells, not {row}"
            rows.append(PaperRow(title, *row))
    return rows


ROWS = rows_of(PAGE.read_text())
every_row = pytest.mark.parametrize("row", ROWS, ids=str)


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Return the names that a file defines, and those that its classes define, as Class.name."""
    return frozenset(_defined(ast.parse(path.read_text()).body))


def _defined(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=inner):
                names |= {name, *(f"{name}.{each}" for each in _defined(inner))}
            case ast.Assign(targets=targets):
                found = [each for target in targets for each in ast.walk(target)]
                names |= {each.id for each in found if isinstance(each, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.If(body=inner):
                names |= _defined(inner)
    return names


def check_where(row: PaperRow) -> None:
    """Fail unless the cell names files of src/paceline, each followed by at least one name that it defines."""
    for part in row.where.split(";"):
        path, *inside = CODE.findall(part)
        assert path.startswith("src/paceline/") and (ROOT / path).is_file(), f"{row}: there is no {path}"
        assert inside, f"{row}: name what in {path}"
        for name in inside:
            assert name in defined_in(ROOT / path), f"{row}: {path} defines no {name}"


def check_status(row: PaperRow) -> None:
    """Fail unless the status has known words, with reasons, and policies that exist."""
    words = BOLD.findall(row.status)
    assert words and not set(words) - STATUSES, f"{row}: a status is one of {', '.join(sorted(STATUSES))}; got {words}"
    for word in NEEDS_A_REASON & set(words):
        assert re.search(rf"\*\*{word}\*\*[:,] \S+ \S+", row.status), f"{row}: say why it is {word}"
    options = [code for code in CODE.findall(row.status) if check_option(row, code)]
    assert options or "letter by option" not in words, f"{row}: name the option that gives the paper's letter"


def check_option(row: PaperRow, code: str) -> bool:
    """Return whether a piece of code names a policy, a function or a command. Fail if it does not exist."""
    if code.split(":")[0] in names():
        make(code)
    elif code.startswith("paceline "):
        check_command(row, code)
    elif code.startswith("paceline."):
        found(code)
    else:
        return False
    return True


def check_command(row: PaperRow, code: str) -> None:
    """Fail unless a command, its options, its cluster, its policies and its figures exist."""
    words = shlex.split(code)
    if words[0] == "pytest":
        assert (ROOT / words[1].partition("::")[0]).is_file(), f"{row}: {code}"
        return
    if words[0] == "python":
        assert exists(words[1], PAGE), f"{row}: {code}"
        return
    assert words[0] == "paceline", f"{row}: {code}"
    check_paceline(words[1:], str(row))
    for option, value in pairwise(words):
        if option in ("-p", "--policy"):
            for spec in split_list([value]):
                make(spec)
    scripts = [word for word in words if word.endswith(".py")]
    assert all((ROOT / script).is_file() for script in scripts), f"{row}: {code}"
    if words[1] == "simulate":
        load_cluster(words[2])
    if words[1] == "reproduce":
        only = [value for option, value in pairwise(words) if option == "--only"]
        check_figures(words[2], only, f"{row}: {code}")


def check_figures(paper: str, only: list[str], where: str) -> None:
    """Fail unless the paper has these figures. Without torch, nothing is checked."""
    pytest.importorskip("torch")
    from paceline.reproduce.shared import papers

    assert only, f"{where}: name a figure with --only"
    papers.paper(paper).named(only)


def items(row: PaperRow) -> set[str]:
    """Return the formulas, tables and figures that a row is about: "Figure 3a, 3b" is about two."""
    match = KIND.match(row.item)
    if match is None or match[1] == "Algorithm":
        return set()
    return {f"{match[1]} {number}" for number in match[2].split(", ")}


def algorithm_lines(row: PaperRow) -> tuple[tuple[str, str], list[int]] | None:
    """Return the algorithm, its part and the lines that a row is about; None if it is about something else."""
    match = re.match(r"^Algorithm (\d), (?:(\w+) )?lines? (\d+)(?:–(\d+))?$", row.item)
    if match is None:
        assert not row.item.startswith("Algorithm"), f"{row}: which lines?"
        return None
    first, last = int(match[3]), int(match[4] or match[3])
    return (match[1], match[2] or ""), list(range(first, last + 1))


@every_row
def test_its_files_and_names_exist(row: PaperRow) -> None:
    check_where(row)


@every_row
def test_its_status_is_known_and_its_options_exist(row: PaperRow) -> None:
    check_status(row)


@every_row
def test_its_command_exists(row: PaperRow) -> None:
    if row.command == "–":
        assert "**not reproduced**" in row.status, f"{row}: name a command"
        return
    (code,) = CODE.findall(row.command)
    check_command(row, code)


@pytest.mark.parametrize("section", NUMBERED)
def test_every_formula_table_and_figure_has_one_row(section: str) -> None:
    listed = [item for row in ROWS if row.section == section for item in items(row)]
    assert sorted(listed) == sorted(NUMBERED[section])


@pytest.mark.parametrize("section", LINES)
def test_every_line_of_every_algorithm_has_one_row(section: str) -> None:
    lines: dict[tuple[str, str], list[int]] = {}
    for row in ROWS:
        if row.section == section and (about := algorithm_lines(row)):
            lines.setdefault(about[0], []).extend(about[1])
    assert {part: sorted(found) for part, found in lines.items()} == {
        part: list(range(1, last + 1)) for part, last in LINES[section].items()
    }


def test_every_section_is_a_paper() -> None:
    assert {row.section for row in ROWS} == NUMBERED.keys() == LINES.keys()


GOOD = PaperRow(
    "a paper",
    "Figure 1",
    "a figure",
    "`src/paceline/policies/r2sp.py` `R2SP.gap`",
    "**improved**: it has a reason. **letter by option**: `r2sp:relax=1`",
    "`paceline reproduce r2sp --only fig1 --quick`",
)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (check_where, {"where": "`src/paceline/policies/gone.py` `R2SP`"}),
        (check_where, {"where": "`src/paceline/policies/r2sp.py`"}),
        (check_where, {"where": "`src/paceline/policies/r2sp.py` `R2SP.gone`"}),
        (check_where, {"where": "`src/paceline/policies/r2sp.py` `R2SP.gap`, `gone`"}),
        (check_status, {"status": "**perfect**"}),
        (check_status, {"status": "as in the paper"}),
        (check_status, {"status": "**improved**"}),
        (check_status, {"status": "**letter by option**: the right one"}),
        (check_status, {"status": "**letter by option**: `r2sp:gone=1`"}),
        (check_status, {"status": "**letter by option**: `paceline.gone`"}),
        (check_status, {"status": "**letter by option**: `paceline policies learn --gone`"}),
    ],
)
def test_a_broken_cell_is_found(check, change: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    check(GOOD)
    with pytest.raises((AssertionError, ValueError)):
        check(PaperRow(**{**vars(GOOD), **change}))


@pytest.mark.parametrize(
    "command",
    [
        "paceline gone",
        "paceline simulate gone -p r2sp",
        "paceline simulate r2sp-b --gone",
        "paceline simulate r2sp-b -p r2sp:gone=1",
        "paceline run --workers 4 examples/gone.py",
        "paceline reproduce r2sp --only gone",
        "paceline reproduce r2sp --quick",
        "python benchmarks/gone.py",
        "pytest tests/policies/test_gone.py",
        "make test",
    ],
)
def test_a_broken_command_is_found(command: str) -> None:
    with pytest.raises((AssertionError, ValueError, OSError)):
        check_command(GOOD, command)
