"""The scripts of JAX and Keras before and after porting: the size of the change, and the page that shows it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from examples.scripts import ROOT
from examples.test_port import before, difference

PAGE = (ROOT / "docs/arrays.md").read_text()
MAX_CHANGED = 16  # removed and added lines both count, and empty ones too


@pytest.mark.parametrize(("name", "heading"), [("jax", "JAX"), ("keras", "Keras and TensorFlow")])
def test_few_lines_change_and_the_page_shows_them(name: str, heading: str) -> None:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = difference(name)
    changed = [line for line in lines if line[0] in "+-"]
    assert 0 < len(changed) <= MAX_CHANGED
    assert section.strip().startswith(f"{len(changed)} lines change")
    assert "paceline" not in "\n".join((ROOT / before(name)).read_text().splitlines()[1:])
    shown = re.search(r"```diff\n(.*?)```", section, re.DOTALL)
    assert shown is not None
    assert [line.rstrip() for line in shown[1].splitlines()] == [line.rstrip() for line in lines]
