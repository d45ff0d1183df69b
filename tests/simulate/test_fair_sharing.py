"""Max-min fair rates of flows over arbitrary routes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.simulate.fair_sharing import max_min
from tries import tries


@tries(60, 200, derandomize=False)
@given(st.data())
def test_no_flow_can_have_more_unless_a_flow_with_no_higher_rate_gets_less(data: st.DataObject) -> None:
    links = data.draw(st.integers(1, 6))
    routes = data.draw(
        st.lists(st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True), min_size=1, max_size=8)
    )
    capacity = np.array(data.draw(st.lists(st.floats(0.5, 10), min_size=links, max_size=links)))
    used = np.array([link for route in routes for link in route])
    owner = np.repeat(np.arange(len(routes)), [len(route) for route in routes])
    rates = max_min(used, owner, len(routes), capacity)
    load = np.bincount(used, weights=rates[owner], minlength=links)
    assert (load <= capacity * (1 + 1e-6)).all()
    for flow, route in enumerate(routes):
        # Each flow has a link that is full, on which no flow is faster.
        assert any(
            load[link] >= capacity[link] * (1 - 1e-6) and rates[flow] >= max(rates[owner[used == link]]) * (1 - 1e-6)
            for link in route
        )
