"""A small terminal: the lines that a person sees after a program has written its output."""

from __future__ import annotations

import re

TOKENS = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<command>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)")


def screen(output: str) -> list[str]:
    """Return the lines of the screen. It knows the commands by which rich redraws a table, and ignores colours."""
    lines, row, column = [""], 0, 0
    for token in TOKENS.finditer(output):
        arguments, command, control, text = token.group("arguments", "command", "control", "text")
        count = int(arguments) if (arguments or "").isdigit() else 1
        if control == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif control == "\r":
            column = 0
        elif text:
            lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
            column += len(text)
        elif command == "A":
            row = max(0, row - count)
        elif command == "K":
            lines[row] = "" if arguments == "2" else lines[row][:column]
    return lines
