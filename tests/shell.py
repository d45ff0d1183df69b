"""Run the `paceline` command in this process, in an empty folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer.main

from paceline import cli

#: Build the tree of commands once for each process. It takes 0.1 seconds, and tests run hundreds of commands.
get_command = cache(typer.main.get_command)


@dataclass
class Outcome:
    code: int
    out: str
    err: str


class Shell:
    """A shell that runs the `paceline` command. words: the first words of each command, such as a subcommand."""

    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        words: tuple[str, ...] = (),
        width: int = 120,
    ) -> None:
        self.folder, self.words, self._capsys, self.monkeypatch = folder, words, capsys, monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.delenv("PACELINE_DATA", raising=False)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(typer.main, "get_command", get_command)

    def __call__(self, *args: object) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["paceline", *self.words, *(str(each) for each in args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = self._capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, said.out, said.err)

    def files(self) -> set[str]:
        """The names of all files below the folder."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}
