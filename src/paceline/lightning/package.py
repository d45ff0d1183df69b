"""The package of Lightning that the script uses: `pytorch_lightning`, or `lightning`, which contains the same classes.

A strategy must be a subclass of that package's own.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paceline import extras

#: Is it the package `lightning`? It is if the script has imported it, or if there is no other one.
IS_UNIFIED = "lightning" in sys.modules or (find_spec("lightning") is not None and not find_spec("pytorch_lightning"))

(extras.UNIFIED_LIGHTNING if IS_UNIFIED else extras.LIGHTNING).check()

PYTORCH, FABRIC = ("lightning.pytorch", "lightning.fabric") if IS_UNIFIED else ("pytorch_lightning", "lightning_fabric")

_strategies = import_module(f"{PYTORCH}.strategies")
_callbacks = import_module(f"{PYTORCH}.callbacks")

SingleDeviceStrategy: Any = _strategies.SingleDeviceStrategy
StrategyRegistry: Any = _strategies.StrategyRegistry
EarlyStopping: Any = _callbacks.EarlyStopping
Checkpoint: Any = _callbacks.Checkpoint
#: Functions whose attribute `rank` says which process logs.
RANK_ZERO_FUNCTIONS: tuple[Any, ...] = tuple(
    import_module(f"{name}.utilities.rank_zero").rank_zero_only for name in (PYTORCH, FABRIC)
)
