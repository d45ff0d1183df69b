"""One warm process for all scenarios. The scenarios of the next tests are begun ahead of time."""

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
    """Return a function that runs a scenario and asserts that every promise was kept."""

    def play(scenario: Scenario) -> Outcome:
        items = request.session.items
        here = items.index(request.node)
        for item in items[here : here + AT_ONCE]:
            following = getattr(item, "callspec", None) and item.callspec.params.get("scenario")  # type: ignore[attr-defined]
            if isinstance(following, Scenario):
                stage.prepare(following)
        outcome = stage.run(scenario)
        assert not outcome.problems, "\n".join([*outcome.problems, outcome.report])
        return outcome

    return play
