"""Draw random sentences of the prose at an earlier commit, and show what became of each.

python scripts/compare_prose.py COMMIT [--count 10] [--seed 0]

The sentences come from docstrings, comments and messages under src/ and from the Markdown pages. Git finds the file
that each page or module has become. The sentence shown as "after" is the most similar one in that file.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import random
import re
import subprocess
import tokenize

WORDS = 5  # a shorter sentence is not drawn


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    became = renames(asked.commit)
    pool = [
        (path, sentence)
        for path in git("ls-tree", "-r", "--name-only", asked.commit).split()
        if is_prose(path)
        for sentence in sentences(path, git("show", f"{asked.commit}:{path}"))
    ]
    print("| file | before | after |\n|---|---|---|")
    for path, before in random.Random(asked.seed).sample(pool, asked.count):
        files = became.get(path, [path])
        after = [sentence for file in files for sentence in sentences(file, read(file))]
        found = difflib.get_close_matches(before, after, 1, 0.0)
        same = bool(found) and found[0] == before
        row = (files[0], before, "(unchanged)" if same else found[0] if found else "(removed)")
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")


def git(*arguments: str) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def read(path: str) -> str:
    """The text of a file in the working tree; empty if the file is gone."""
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def is_prose(path: str) -> bool:
    """Does this file hold prose that users or developers read?"""
    return (path.startswith("src/") and path.endswith(".py")) or path.endswith(".md")


def renames(commit: str) -> dict[str, list[str]]:
    """The files that each file of the commit has become."""
    found: dict[str, list[str]] = {}
    for line in git("diff", "-M20%", "-C", "--name-status", "--diff-filter=RC", commit).splitlines():
        _, old, new = line.split("\t")
        found.setdefault(old, []).append(new)
    return found


def sentences(path: str, text: str) -> list[str]:
    """The sentences of a file's prose."""
    parts = python_prose(text) if path.endswith(".py") else markdown_prose(text)
    found = []
    for part in parts:
        for sentence in re.split(r"(?<=[.?!])\s+", " ".join(part.split())):
            found += [sentence] * (len(sentence.split()) >= WORDS)
    return found


def python_prose(text: str) -> list[str]:
    """Docstrings, comments, and strings that read like sentences."""
    strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        *(value for value in strings if isinstance(value, str) and value.count(" ") >= WORDS - 1),
        *(token.string.lstrip("#: ") for token in tokens if token.type == tokenize.COMMENT),
    ]


def markdown_prose(text: str) -> list[str]:
    """Paragraphs and list items, without code blocks and tables."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#"))]
    return re.split(r"\n\s*\n|\n\s*[-*] ", "\n".join(lines))


if __name__ == "__main__":
    main()
