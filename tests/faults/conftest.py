"""One warm process for all scenarios. The tests that follow are known, so their scenarios are begun ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Outcome, Scenario
from faults.stage import AT_ONCE, Stage


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def play(stage: Stage, request: pytest.FixtureRequest) -> Callable[[Scenario], Outcome]:
    """Run a scenario; every promise must be kept."""

    def play(scenario: Scenario) -> Outcome:
        items = request.session.items
        here = items.index(request.node)
        for item in items[here : here + AT_ONCE]:
            coming = getattr(item, "callspec", None) and item.callspec.params.get("scenario")  # type: ignore[attr-defined]
            if isinstance(coming, Scenario):
                stage.prepare(coming)
        outcome = stage.run(scenario)
        assert not outcome.problems, "\n".join([*outcome.problems, outcome.report])
        return outcome

    return play
