"""The prose of the library: each docstring names its object, and idioms that readers stumbled over do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from scripts.compare_prose import markdown_prose, python_prose

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for room in ("src", "examples", "benchmarks", "scripts") for path in (ROOT / room).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

#: A docstring that begins so has no subject or no object.
HEADLESS = re.compile(
    r"^(Who|Whoever|Whom|Whose|What|Those|That|Of|It|They|So|Until|As|For|Also|Where|When|Says|Tells|Among|From then)\b"
)
#: "Write it." and the like.
PRONOUN = re.compile(r"^\w+ (it|them|so|this|that|one)\W*$", re.IGNORECASE)
#: Phrases that engineers of other projects had to read twice.
IDIOMS = re.compile(
    r"\b(whoever|bears? to|is borne|are borne|gone on with|of (its|their) own accord|so many (of|as)|one who|those who"
    r"|who (is|was|has|are)|anybody|what is (to be|asked)|lets? go of|comes? to nothing|has its say)\b",
    re.IGNORECASE,
)


def folder(path: Path) -> str:
    """The first three folders of a file. A test of each folder costs less than a test of each file."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:3]) or "."


FOLDERS = sorted({folder(path) for path in [*SOURCES, *PAGES]})
each_folder = pytest.mark.parametrize("name", FOLDERS)


def docstrings(path: Path) -> list[str]:
    """The docstrings of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    return [text for node in nodes if (text := ast.get_docstring(node))]


@each_folder
def test_a_docstring_names_its_object(name: str) -> None:
    wrong = []
    for path in (path for path in SOURCES if folder(path) == name):
        firsts = [re.split(r"(?<=[.:?!])\s", text)[0] for text in docstrings(path)]
        wrong += [f"{path.name}: {first}" for first in firsts if HEADLESS.match(first) or PRONOUN.match(first)]
    assert wrong == []


@each_folder
def test_prose_has_no_idioms(name: str) -> None:
    wrong = []
    for path in (path for path in [*SOURCES, *PAGES] if folder(path) == name):
        text = path.read_text()
        parts = python_prose(text) if path.suffix == ".py" else markdown_prose(text)
        wrong += [
            f"{path.name}: {found.group()!r} in {' '.join(part.split())[:200]}"
            for part in parts
            if (found := IDIOMS.search(part))
        ]
    assert wrong == []
