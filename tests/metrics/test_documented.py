"""Every metric is documented, and the dashboard names only metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.metrics.job_metrics import JobMetrics

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "metrics.md"
DASHBOARD = REPOSITORY / "examples" / "grafana" / "paceline.json"
FAMILIES = {family.name: family for family in JobMetrics().families()}
#: The names of the time series of each kind.
SERIES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}


def expressions(node: Any) -> Iterator[str]:
    """Yield every query of the dashboard."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in ("expr", "query") and isinstance(value, str))
        for value in node.values():
            yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def test_every_metric_is_documented_with_its_kind_labels_and_help() -> None:
    rows = re.findall(r"^\| `(paceline_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE.read_text(), re.M)
    documented = [(name, kind, labels, text) for name, kind, labels, text in rows]
    assert documented == [
        (
            family.name + SERIES[family.kind][0] * (family.kind == "info"),
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.help,
        )
        for family in FAMILIES.values()
    ]


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"paceline_[a-z_]+", name)
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert family.help.endswith(".")
        assert not re.search(r"_(milli|micro|ms|minutes|hours|kb|mb|percent)", name), "base units"


def test_the_dashboard_names_only_metrics_and_labels_that_exist() -> None:
    series = {name + ending: family for name, family in FAMILIES.items() for ending in SERIES[family.kind]}
    used: set[str] = set()
    for expression in expressions(json.loads(DASHBOARD.read_text())):
        for name, matchers in re.findall(r"(paceline_\w+)(?:\{(.*?)\})?", expression):
            assert name in series, expression
            used.add(series[name].name)
            for label, _ in re.findall(r"(\w+)=~?\"(.*?)\"", matchers):
                assert label == "instance" or label in series[name].labels, expression
        for label in re.findall(r"(?:by|without) \((\w+)\)", expression):
            assert label == "le" or any(label in family.labels for family in FAMILIES.values()), expression
    assert len(used) > 20, "it shows most of the metrics"


def test_labels_have_few_values() -> None:
    metrics = JobMetrics()
    for worker in range(10_000):
        metrics.joined(0.0, worker)
        metrics.granted(0.0, worker, None, 0)
        metrics.computed(1.0, worker, 1.0)
        metrics.turned(1.0, worker)
        metrics.arrived(2.0, worker, 1, 32)
    assert sum(len(family.values) for family in metrics.families()) < 60
