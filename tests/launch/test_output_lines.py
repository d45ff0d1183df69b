"""The output of a process: complete lines, progress bars that change, and lines without an end."""

from __future__ import annotations

import pytest

from paceline.launch.output_lines import MAX_LINE, Line, OutputLines


def split(*parts: bytes) -> list[Line]:
    """Return the lines of an output that arrives in these parts."""
    output = OutputLines()
    return [line for part in parts for line in output.feed(part)] + output.end()


def test_lines_are_passed_on_when_they_end() -> None:
    assert split(b"one\ntw", b"o\n\nthr", b"ee") == [Line("one"), Line("two"), Line(""), Line("three")]
    assert OutputLines().feed(b"a question? ") == []


def test_a_line_may_end_with_a_carriage_return_and_a_line_feed() -> None:
    assert [line.text for line in split(b"one\r\ntwo\r\n") if line.stays] == ["one", "two"]
    assert [line.text for line in split(b"one\r", b"\ntwo\r\n") if line.stays] == ["one", "two"]


def test_a_progress_bar_is_a_line_that_changes() -> None:
    bar = [b"\r 0%", b"\r 50%", b"\r100%", b"\n"]
    assert split(*bar) == [Line(" 0%", False), Line(" 50%", False), Line("100%", False), Line("100%")]


def test_only_the_newest_state_of_a_bar_is_passed_on() -> None:
    assert split(b"\r 0%\r 10%\r 20%", b"\r 20%") == [Line(" 20%", False), Line(" 20%")]


def test_a_bar_that_is_erased_is_removed() -> None:
    assert split(b"\r 99%", b"\r     \r") == [Line(" 99%", False), Line("", False)]


def test_the_last_state_of_a_bar_stays_if_the_process_ends_in_between() -> None:
    assert split(b"\r 42%")[-1] == Line(" 42%")


def test_nested_bars_do_not_add_a_line_for_each_refresh() -> None:
    """tqdm moves down with a line feed, redraws the inner bar, and moves up again."""
    inner = [b"\n\r inner %d%%\x1b[A" % done for done in range(0, 101, 20)]
    shown = split(b"\r outer 0%", *inner, b"\r outer 50%", *inner, b"\n\r         \r\x1b[A", b"\r outer 100%\n")
    assert [line.text for line in shown if line.stays] == [" outer 0%", " outer 50%", " outer 100%"]
    assert Line(" inner 80%", False) in shown


@pytest.mark.parametrize("size", [MAX_LINE, MAX_LINE + 1, 3 * MAX_LINE + 5])
def test_a_very_long_line_is_passed_on_in_pieces(size: int) -> None:
    pieces = split(b"x" * (size // 2), b"x" * (size - size // 2), b"\nnext\n")
    assert pieces[-1] == Line("next")
    assert "".join(line.text for line in pieces[:-1]) == "x" * size
    assert max(len(line.text) for line in pieces) <= MAX_LINE
