"""The synchronization problem as a Gymnasium environment: one simulated cluster, real gradients, the paper's actions.

A step is an iteration of the paper's algorithm 1: an update arrives, and the action says which workers run. The reward
is −Δt, so the return of an episode is minus the time until the target accuracy. The step that reaches the target ends
the episode, and takes no time. An episode is truncated when the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import gymnasium
    from gymnasium import spaces
except ModuleNotFoundError:
    message = "paceline.rlp.environment needs gymnasium: pip install 'paceline[rlp]'."
    raise ModuleNotFoundError(message, name="gymnasium") from None

import numpy as np
from numpy.typing import NDArray

from paceline.rlp.features import ALL, ITSELF, NEXT, WAIT, StateFeatures
from paceline.rlp.fleet import Fleet, FleetTick
from paceline.rlp.fleet_state import FleetState
from paceline.rlp.instance import Instance, drawn
from paceline.rlp.rollout import TEST_EVERY, Guard
from paceline.workloads.data import Data

Observation = NDArray[np.float32]
__all__ = ["ALL", "ITSELF", "NEXT", "WAIT", "SynchronizationEnv"]


class SynchronizationEnv(gymnasium.Env[Observation, np.int64]):
    """Actions: 0 keeps idle workers idle, 1 lets the worker run whose update arrived, 2 lets all idle workers run.

    instances: returns the instance of an episode, given a number that is drawn from the seed of `reset`. state: the
    features of the observations. ring: adds action 3, which lets the next worker in a ring run, if it is idle.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  # as Gymnasium declares it

    def __init__(
        self,
        data: Data,
        instances: Callable[[int], Instance] = drawn,
        state: StateFeatures | None = None,
        ring: bool = False,
    ) -> None:
        self._data, self._instances, self._features = data, instances, state or StateFeatures()
        self.action_space = spaces.Discrete(4 if ring else 3)
        self.observation_space = spaces.Box(-1.0, 1.0, (self._features.size,), np.float32)
        self._fleet: Fleet | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode on a new cluster, and wait for its first update.

        options: {"instance": an Instance} chooses the instance.
        """
        super().reset(seed=seed)
        instance = (options or {}).get("instance") or self._instances(int(self.np_random.integers(2**31)))
        self._instance: Instance = instance
        self._fleet = Fleet([instance], self._data)
        self._states, self._guard = FleetState(self._fleet, self._features), Guard(self._fleet)
        self._tick, observation = self._next(self._fleet)
        return observation, self._info(self._fleet)

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Let workers run as the action says, and wait for the next update."""
        fleet = self._fleet
        if fleet is None:
            raise gymnasium.error.ResetNeeded("Call reset before step.")
        before = float(fleet.now)
        granted = self._guard.granted(fleet.now.new_full((1,), int(action)).long(), fleet, self._tick)
        fleet.apply(granted.any(1))
        fleet.grant(granted)
        reached = fleet.updates % TEST_EVERY == 0 and float(fleet.accuracy()) >= self._instance.target
        if reached:  # no time follows, so the return is minus the time until the target
            return self._observation, 0.0, True, False, self._info(fleet)
        self._tick, observation = self._next(fleet)
        spent = fleet.updates >= self._instance.budget
        return observation, before - float(fleet.now), False, spent, self._info(fleet)

    def _next(self, fleet: Fleet) -> tuple[FleetTick, Observation]:
        tick = fleet.next_arrivals()
        state = self._states.observe(fleet, tick, fleet.loss() if self._features.validated else None)
        self._observation = state[0].numpy().astype(np.float32)
        return tick, self._observation

    def _info(self, fleet: Fleet) -> dict[str, Any]:
        return {"seconds": float(fleet.now), "updates": fleet.updates, "idle": int(fleet.idle.sum())}
