"""README and docs: every link, command, option, file name and import in them exists, and their lines are short."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import app
from shell import get_command

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "paceline"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MAX_LINE = 120
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"^(?:[\w.-]+/)+[\w.-]+$|^[\w-]+\.(?:py|md|toml|json|jsonl|txt|png)$")
DOTTED = re.compile(r"^paceline(?:\.\w+)+$")
MADE_BY_USERS = {
    "train.py",
    "mine.toml",
    "mine.png",
    "impatient.py",
    "run.jsonl",
    "run.json",
    "model.safetensors",
    "job.json",
}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text())


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return [match[3] for match in FENCE.finditer(page.read_text()) if match[2] == language]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading for #{anchor}"


def exists(name: str, page: Path) -> bool:
    """Is there a file or folder of this name in the repository, or one that a user makes?"""
    if name in MADE_BY_USERS:
        return True
    if any((folder / name).exists() for folder in (ROOT, SOURCE, ROOT / "docs", page.parent)):
        return True
    return "/" not in name and any(found for folder in ("src", "tests") for found in (ROOT / folder).rglob(name))


@pages
def test_file_names_in_prose_exist(page: Path) -> None:
    folders = {each.name for each in [*ROOT.iterdir(), *SOURCE.iterdir()] if each.is_dir()}
    for code in CODE.findall(prose(page)):
        name = code.rstrip("/")
        if PATH.match(name) and (name.split("/")[0] in folders or "/" not in name):
            assert exists(name, page), f"{page.name} names {code}"


@pages
def test_dotted_names_exist(page: Path) -> None:
    for code in CODE.findall(prose(page)):
        name = re.split(r"[\s(:\[]", code)[0]
        if DOTTED.match(name):
            found(name)


def found(name: str) -> Any:
    """The module or attribute of a dotted name. AssertionError if there is none."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name and not error.name.startswith("paceline"):
                pytest.skip(f"{error.name} is not installed")
            continue
        for part in parts[cut:]:
            assert hasattr(thing, part), f"there is no {name}"
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"there is no {name}")


@pages
def test_python_in_pages_imports_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                for alias in node.names:
                    found(f"{node.module}.{alias.name}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("paceline"):
                        found(alias.name)


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page's console blocks, split into words."""
    for block in blocks(page, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def strip_prefix(words: list[str]) -> list[str]:
    """A command without `sudo`, variables and the folder of its program."""
    while words and (words[0] == "sudo" or re.match(r"^[A-Z_]+=", words[0])):
        words = words[1:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]] if words else []


def check_paceline(words: list[str], where: str) -> None:
    """Fail if `paceline WORDS` names a command or an option that does not exist."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        if words[0].startswith("-"):
            assert words[0].partition("=")[0] in options, f"{where}: there is no {words[0]}"
            words = words[1:]
            continue
        if words[0] not in command.commands:
            assert command.name == "policies", f"{where}: there is no command {words[0]}"
            return
        command, words = command.commands[words[0]], words[1:]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.endswith(".py"):
            break  # the rest are the script's own options
        if word.startswith("-") and not re.match(r"^-\d", word):
            assert word.partition("=")[0] in options | {"--help"}, f"{where}: {command.name} has no {word}"


@pages
def test_commands_in_pages_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for raw in commands(page):
        words = strip_prefix(raw)
        if not words:
            continue
        where = f"{page.name}: {' '.join(raw)}"
        if words[0] == "paceline":
            check_paceline(words[1:], where)
        elif words[0] == "make":
            assert all(word in targets for word in words[1:] if "=" not in word and not word.startswith("-")), where
        elif words[0].startswith("python") and len(words) > 1 and words[1].endswith(".py"):
            assert exists(words[1], page), where
    for code in CODE.findall(prose(page)):
        if code.startswith("paceline ") and not set(code) & set("…|{}<>"):
            check_paceline([word for word in shlex.split(code)[1:] if word not in ("COMMAND",)], f"{page.name}: {code}")
        if match := re.match(r"^python (benchmarks/\S+\.py)", code):
            assert exists(match[1], page), f"{page.name}: {code}"


@pages
def test_lines_of_prose_are_short(page: Path) -> None:
    for line in prose(page).splitlines():
        assert len(line) <= MAX_LINE or line.lstrip().startswith("|"), f"{page.name}: {line}"


PANELS = {
    "Train": {"run", "serve", "work", "shard", "watch", "token", "certificate", "export", "replay"},
    "Decide": {"advise", "simulate", "lab"},
    "Research": {"reproduce", "federate", "collective", "policies", "clusters"},
}


def test_help_fits_one_screen() -> None:
    """The commands of `paceline --help` are in three panels, one line each."""
    command: Any = get_command(app)
    panels = {name: getattr(each, "rich_help_panel", None) for name, each in command.commands.items()}
    for panel, names in PANELS.items():
        assert {name for name, each in panels.items() if each == panel} == names
    assert len(panels) == sum(map(len, PANELS.values()))
    for name, each in command.commands.items():
        assert 0 < len(each.get_short_help_str(200)) <= 62, f"{name}: {each.get_short_help_str(200)}"


def test_the_page_of_the_protocol_names_every_message_with_its_fields() -> None:
    messages = pytest.importorskip("paceline.serve.wire.messages")
    page = (ROOT / "docs" / "wire.md").read_text()
    kinds: list[Any] = [
        each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, messages.Message)
    ]
    kinds.remove(messages.Message)
    assert len(kinds) > 50
    for kind in kinds:
        names = ", ".join(kind.__struct_fields__)
        assert f"{kind.__name__}({names})" in " ".join(page.split()), f"{kind.__name__}({names}) is not in docs/wire.md"
