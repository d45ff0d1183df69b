"""Writes results as one self-contained HTML page: plots, and tables with the paper's values beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from paceline.reproduce.shared.draw import can_draw, svg
from paceline.reproduce.shared.rows import NOT_REPRODUCED, TITLES, Figure, Results, Row, Value

NAME = "index.html"
NO_PICTURES = "This page has no plots because matplotlib is not installed: pip install 'paceline[plot]'."

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #5b6570; --back: #ffffff; --line: #d8dee4; --mark: #9a5b00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ed; --dim: #9aa5b1; --back: #14171b; --line: #343b43; --mark: #e0a84a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 100rem; padding: 1rem; color: var(--text); background: var(--back);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1.05rem; margin: 0 0 .5rem; }
a { color: inherit; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; padding: 0; list-style: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .5rem 0; color: var(--dim); }
dd { margin: 0; }
section { border-top: 1px solid var(--line); padding: 1rem 0; }
.sides { display: grid; grid-template-columns: minmax(0, 1fr); gap: 1rem 2rem; align-items: start; }
figure { margin: 0 0 1rem; }
figure svg { display: block; width: 100%; max-width: 46rem; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
.value { text-align: right; white-space: nowrap; }
.of th { padding-top: .8rem; }
small { display: block; color: var(--dim); font-size: .85em; line-height: 1.35; }
.missing { color: var(--mark); }
@media (min-width: 64rem) {
  .sides.drawn { grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); }
  .plots { position: sticky; top: 1rem; }
}
@media (max-width: 40rem) { body { padding: .6rem; } table { font-size: .8rem; } .value { white-space: normal; } }
"""


def write(results: Sequence[Results], folder: Path) -> Path:
    """Write the page into a folder, which is created if it does not exist. Return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    path.write_text(page(results), encoding="utf-8")
    return path


def page(results: Sequence[Results]) -> str:
    """Return the HTML of the page."""
    draws = can_draw()
    names = {at: f"r{at}" for at in range(len(results))}
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>paceline: {escape(', '.join(each.paper for each in results))}</title>",
        f"<style>{STYLE}</style></head>",
        "<body><header><h1>Papers reproduced with paceline</h1>",
        "" if draws else f'<p class="missing">{escape(NO_PICTURES)}</p>',
        "</header>",
        *(_links(each, names[at]) for at, each in enumerate(results)),
        "<main>",
        *(_results(each, names[at], draws) for at, each in enumerate(results)),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def shown(value: Value) -> str:
    """Format a value with four significant digits; a missing value is a dash."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _links(results: Results, name: str) -> str:
    links = "".join(
        f'<li><a href="#{name}-{at}">{escape(figure.id)}</a></li>' for at, figure in enumerate(results.figures)
    )
    return f'<nav aria-label="{escape(results.paper)}"><strong>{escape(results.paper)}</strong><ul>{links}</ul></nav>'


def _results(results: Results, name: str, draws: bool) -> str:
    facts = {"command": f"<code>{escape(results.command)}</code>"}
    facts |= {"device": escape(results.device), "date": escape(results.date)}
    head = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    figures = "\n".join(_figure(figure, f"{name}-{at}", draws) for at, figure in enumerate(results.figures))
    not_reproduced = "\n".join(
        f'<p class="missing">Not reproduced: {escape(what)}</p>' for what in NOT_REPRODUCED.get(results.paper, ())
    )
    return f"<h2>{escape(TITLES.get(results.paper, results.paper))}</h2>\n<dl>{head}</dl>\n{figures}\n{not_reproduced}"


def _figure(figure: Figure, name: str, draws: bool) -> str:
    plots = ""
    if draws and figure.plots:
        pictures = "\n".join(
            f'<figure role="img" aria-label="{escape(plot.title)}">{svg(plot, f"{name}-{at}")}</figure>'
            for at, plot in enumerate(figure.plots)
        )
        plots = f'<div class="plots">{pictures}</div>'
    missing = "".join(f"<li>{escape(what)}</li>" for what in figure.missing)
    return "\n".join(
        part
        for part in (
            f'<section id="{name}"><h3>{escape(figure.id)}: {escape(figure.title)}</h3>',
            f'<div class="sides{" drawn" if plots else ""}">',
            plots,
            _table(figure.rows, figure.paper_heading) if figure.rows else "",
            "</div>",
            f'<p class="missing">Missing:</p><ul class="missing">{missing}</ul>' if missing else "",
            "</section>",
        )
        if part
    )


def _table(rows: Sequence[Row], paper: str) -> str:
    values = "".join(f'<th class="value">{escape(heading)}</th>' for heading in (paper, "ours"))
    headings = f"<th>what</th>{values}<th>unit</th><th>where</th>"
    parts = []
    for prefix, group in groupby(rows, key=_prefix):
        together = list(group)
        if prefix and len(together) > 1:  # The common prefix becomes a heading above its rows.
            parts.append(f'<tr class="of"><th colspan="5" scope="rowgroup">{escape(prefix)}</th></tr>')
            parts += [_row(row, row.what[len(prefix) + 2 :]) for row in together]
        else:
            parts += [_row(row, row.what) for row in together]
    body = "\n".join(parts)
    return f'<div class="table"><table><thead><tr>{headings}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _prefix(row: Row) -> str:
    """Return the part of a row's description before its colon, such as the model; empty if there is none."""
    prefix, colon, _ = row.what.partition(": ")
    return prefix if colon else ""


def _row(row: Row, what: str) -> str:
    note = f"<small>{escape(row.note)}</small>" if row.note else ""
    paper, ours = (f'<td class="value">{escape(shown(value))}</td>' for value in (row.paper, row.ours))
    return f"<tr><td>{escape(what)}{note}</td>{paper}{ours}<td>{escape(row.unit)}</td><td>{row.where}</td></tr>"
