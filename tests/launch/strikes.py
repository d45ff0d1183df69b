"""Kill chosen processes of a job at chosen moments of their start, without a hook in the product.

Python runs a module `sitecustomize` at the start of each process, if it finds one on PYTHONPATH. The one that is made
here counts the starts of each command, and wraps the function at which a process is to kill itself.
"""

from __future__ import annotations

import os
from pathlib import Path

SITE = """
import os, pathlib, signal, sys

here = pathlib.Path(__file__).parent


def strike(number):
    # Once: the shards of a fork server share what it has wrapped.
    try:
        os.close(os.open(here / f"struck-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def strike_at(number, module, name, when):
    import importlib
    import inspect

    place = importlib.import_module(module)
    *within, last = name.split(".")
    for part in within:
        place = getattr(place, part)
    call = getattr(place, last)

    def watched(*arguments, **named):
        if when == "before":
            strike(number)
        result = call(*arguments, **named)
        if when == "after" and not inspect.isawaitable(result):
            strike(number)
        return later(result) if inspect.isawaitable(result) else result

    async def later(result):
        result = await result
        if when == "after":
            strike(number)
        return result

    setattr(place, last, watched)


def turn_of(process):
    for turn in range(1, 100):
        try:
            os.close(os.open(here / f"start-{process}-{turn}", os.O_CREAT | os.O_EXCL))
            return turn
        except FileExistsError:
            pass


arguments = sys.orig_argv[1:]
this = arguments[1] if arguments[:1] == ["-m"] else pathlib.Path(arguments[0]).name if arguments else ""
specs = [spec.split("/") for spec in os.environ["STRIKES"].split()]
turn = turn_of(this) if any(process == this for process, _, _ in specs) else 0
for number, (process, start, moment) in enumerate(specs):
    if process != this or turn != int(start):
        continue
    if moment == "at-once":
        strike(number)
    when, _, place = moment.partition("-")
    module, _, name = place.partition(":")
    strike_at(number, module, name, when)
"""


def strikes(folder: Path, *specs: str) -> dict[str, str]:
    """Return the environment in which processes kill themselves.

    A spec is written PROCESS/START/MOMENT: a module or a script, the number of its start from 1, and at-once, or
    before-MODULE:FUNCTION or after-MODULE:FUNCTION.
    """
    (folder / "sitecustomize.py").write_text(SITE)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "STRIKES": " ".join(specs)}


def struck(folder: Path) -> int:
    """Return how many processes have killed themselves."""
    return len(list(folder.glob("struck-*")))
