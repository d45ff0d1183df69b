"""The output of `paceline advise`: a table and sentences, or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.advise.candidates import RINGS, Candidate
from paceline.advise.evaluate import Estimate
from paceline.advise.explain import NEAR, Advice
from paceline.advise.profile import ScriptProfile
from paceline.observe.table import duration, ruled
from paceline.simulate import ClusterSpec

if TYPE_CHECKING:
    from paceline.advise.verify import VerifiedEstimate

LEGEND = "beside: a server beside each worker. needs: the samples that staleness costs. × {now}: the speed of learning."
LEGEND_OF_STEPS = (
    "iteration: all steps up to an exchange, and the exchange. beside: a server beside each worker. × {now}: samples a "
    "second, without what staleness and local steps cost. diloco, ddp: all-reduce over a ring, in float32."
)
MANY_TIMES = 10  # a gain from here on is said as a multiple
WIDE = 95  # columns that the whole table needs
WIDE_VERIFIED = 115  # columns that it needs with the measured figures


def show(name: str, profiled: ScriptProfile | None, advice: Advice, verified: list[VerifiedEstimate]) -> None:
    """Print the profile of the script called `name`, the table of candidates, the advice and its reasons.

    profiled: None if there is no script; then `name` is that of the cluster.
    """
    console = Console(highlight=False)
    spec = advice.spec
    links = sorted({worker.link for worker in spec.workers})
    slowest, fastest = _bits(links[0]), _bits(links[-1])
    console.print()
    console.print(Text(_timing(name, profiled) if profiled else _described(name, spec)))
    title = (
        f"{len(spec.workers)} workers with links of {slowest if slowest == fastest else f'{slowest} to {fastest}'}, "
        f"{spec.servers} server{'s' if spec.servers > 1 else ''} with {_bits(spec.server_link)}"
    )
    if codecs := {each.candidate.updates for each in advice.ranked if each.candidate.updates}:
        title += f", updates in {', '.join(sorted(codecs))}"
    console.print(table_of(advice, verified, title, console.width))
    legend = LEGEND_OF_STEPS if _has_local_steps(advice) else LEGEND
    console.print(Text(legend.format(now=advice.now.candidate.policy.partition(":")[0]), style="dim"))
    console.print()
    console.print(Text(_headline(advice), style="bold"))
    for line in (*advice.reasons, *advice.upgrades):
        console.print(Text(f"- {line}"))
    if verified:
        console.print(Text(f"- {_verdict(advice, verified)}"))


def _timing(name: str, profiled: ScriptProfile) -> str:
    return (
        f"{name} computes {duration(profiled.seconds)} for {profiled.batch} samples here "
        f"(±{profiled.jitter:.0%}, {profiled.steps} steps, on {profiled.device}). Its model is "
        f"{_size(profiled.model_bytes)}, its optimizer {profiled.optimizer_name}."
    )


def _described(name: str, spec: ClusterSpec) -> str:
    first = spec.workers[0]
    return (
        f"As {name} is described, its first worker computes {duration(first.compute_seconds())} for {first.batch} "
        f"samples. The model is {_size(spec.model_bytes)}."
    )


def _has_local_steps(advice: Advice) -> bool:
    return any(each.candidate.local_steps > 1 for each in advice.ranked)


def _headline(advice: Advice) -> str:
    now = advice.now.candidate.name
    if advice.chosen is advice.now:
        return f"Advice: stay with {now}."
    gain = advice.chosen.effective_rate / advice.now.effective_rate - 1
    faster = f"{gain:.0%} faster than" if gain < MANY_TIMES - 1 else f"{gain + 1:,.3g} times as fast as"
    return f"Advice: {advice.chosen.candidate.name}. It is {faster} {now}."


def table_of(advice: Advice, verified: list[VerifiedEstimate], title: str, width: int) -> Table:
    """Return the table of candidates. A narrow one names the place of the servers in the column of schemes."""
    found = {each.expected.candidate: each for each in verified}
    table = ruled(title)
    rows = [_cells(each, advice, found) for each in advice.ranked]
    headings = list(rows[0])
    headings.remove("needs" if _has_local_steps(advice) else "steps")
    room = None  # columns for the scheme; None: as many as it needs
    if width < (WIDE_VERIFIED if verified else WIDE):
        headings.remove("servers")
        table.padding = (0, 0)
        room = width - sum(1 + len(heading) for heading in headings[1:]) - len("× 1.05") + len("needs")
    table.add_column("scheme", overflow="fold", min_width=10)
    for heading in headings[1:]:
        table.add_column(heading, justify="left" if heading == "servers" else "right", no_wrap=True)
    for each, cells in zip(advice.ranked, rows, strict=True):
        chosen = each is advice.chosen
        scheme = _scheme(each.candidate, "→ " if chosen else "  ", room)
        table.add_row(scheme, *(cells[heading] for heading in headings[1:]), style="green" if chosen else None)
    return table


def _scheme(candidate: Candidate, mark: str, room: int | None) -> Text:
    """Return the name of a candidate. If there is little room, add the place of its servers, and use two lines."""
    more = ["streamed"] if candidate.streamed else []
    more += ["overlapped"] if candidate.overlap else []
    if room is not None and candidate.colocated:
        more.append("beside")
    line = " ".join((mark + candidate.policy, ", ".join(more))).rstrip()
    return Text(line if room is None or len(line) <= room else f"{mark}{candidate.policy}\n  {', '.join(more)}")


def _cells(each: Estimate, advice: Advice, found: Mapping[Candidate, VerifiedEstimate]) -> dict[str, str]:
    """Return a row of the table, by heading. The scheme is left out."""
    candidate = each.candidate
    cells = {
        "scheme": "",
        "servers": _servers(candidate),
        "steps": str(candidate.local_steps),
        "iteration": duration(each.iteration_seconds),
        "samples/s": f"{each.samples_per_second:,.0f}",
        "staleness": f"{each.mean_staleness:.1f} ≤{each.max_staleness}",
        "needs": "" if each.price == 1 else f"× {each.price:.4g}",
        f"× {advice.now.candidate.policy.partition(':')[0]}": f"{each.effective_rate / advice.now.effective_rate:.2f}",
    }
    if found:
        measured = found.get(candidate)
        cells["measured"] = duration(measured.iteration_seconds) if measured else ""
        cells["off"] = f"{measured.error:+.0%}" if measured else ""
    return cells


def _verdict(advice: Advice, verified: list[VerifiedEstimate]) -> str:
    """Return a sentence that says whether the measurements confirm the advice."""
    from paceline.advise.verify import is_right

    best = max(verified, key=lambda each: each.effective_rate)
    own = next(each for each in verified if each.expected is advice.chosen)
    if is_right(verified, advice.chosen.candidate):
        return (
            f"Measured in the lab, the advice is right: {own.samples_per_second:,.0f} samples/s, and no measured "
            f"candidate is more than {NEAR:.0%} faster."
        )
    ahead = best.effective_rate / own.effective_rate - 1
    return f"Measured in the lab, the advice is wrong: {best.expected.candidate.name} is {ahead:.0%} faster."


def as_json(
    profiled: ScriptProfile | None, advice: Advice, verified: list[VerifiedEstimate], toml: str
) -> dict[str, Any]:
    """Return everything that was measured and advised, for --json.

    profiled: None if there is no script. toml: the measured cluster.
    """
    from paceline.advise.verify import is_right

    found = {each.expected.candidate: each for each in verified}

    def row(each: Estimate) -> dict[str, Any]:
        measured = found.get(each.candidate)
        return {
            **dataclasses.asdict(each),
            "gain": each.effective_rate / advice.now.effective_rate,
            "measured": None
            if measured is None
            else {
                "iteration_seconds": measured.iteration_seconds,
                "samples_per_second": measured.samples_per_second,
            },
        }

    return {
        "timing": dataclasses.asdict(profiled) if profiled else None,
        "cluster": toml,
        "now": dataclasses.asdict(advice.now.candidate),
        "advice": dataclasses.asdict(advice.chosen.candidate),
        "gain": advice.chosen.effective_rate / advice.now.effective_rate,
        "reasons": advice.reasons,
        "what_else": advice.upgrades,
        "candidates": [row(each) for each in advice.ranked],
        "right": is_right(verified, advice.chosen.candidate) if verified else None,
    }


def _servers(candidate: Candidate) -> str:
    return "none" if candidate.policy in RINGS else "beside" if candidate.colocated else "apart"


def _bits(rate: float) -> str:
    """Return a rate in bytes per second as text in bits per second."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if 8 * rate >= size:
            return f"{8 * rate / size:.3g} {unit}"
    return f"{8 * rate / 1e3:.3g} kbit/s"


def _size(count: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
