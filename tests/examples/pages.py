"""The recipes: pages of docs/recipes, the scripts that they link to, and the commands that they show."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/recipes"
INDEX = FOLDER / "README.md"
ARRAYS = ROOT / "docs/arrays.md"  # the scripts without torch
PAGES = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(((?:\.\./)+examples/[\w/.]+\.py)\)")


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [match[2] for match in BLOCK.finditer(page.read_text()) if match[1] == language]


def scripts(page: Path) -> list[Path]:
    """Return the scripts that a page links to."""
    return [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]


def commands(page: Path) -> list[list[str]]:
    """Return the commands that a page shows, split into words."""
    lines = (line for block in blocks(page, "console") for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def is_part(block: str, script: str) -> bool:
    """Return whether the lines of a block are lines of a script, in this order. A line `...` stands for any lines."""
    position = 0
    for part in re.split(r"^ *\.\.\.\n", block, flags=re.MULTILINE):
        wanted, lines = textwrap.dedent(part).strip("\n").splitlines(), script.splitlines()
        starts = range(position, len(lines) - len(wanted) + 1)
        found = [n for n in starts if textwrap.dedent("\n".join(lines[n : n + len(wanted)])).splitlines() == wanted]
        if not found:
            return False
        position = found[0] + len(wanted)
    return True
