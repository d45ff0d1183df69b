"""Distributed training that stays fast when the network, or a mix of unequal machines, is the bottleneck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.policies import register

if TYPE_CHECKING:
    from paceline.serve.worker.pace import Pace, coordinate
    from paceline.train.optimizer import PacedOptimizer
    from paceline.train.session import Session, join, wrap

__version__ = "0.1.0"
__all__ = ["Pace", "PacedOptimizer", "Session", "__version__", "coordinate", "join", "wrap"]

NEEDS_TORCH = "paceline.{} needs torch: pip install 'paceline[torch]'. For JAX or Keras, call paceline.arrays.join."

register("rlp", "paceline.rlp.policy:RLP")  # it needs numpy, and so it lives outside of paceline.policies


def __getattr__(name: str) -> Any:
    """`paceline.join` needs torch, and policies and the simulator do not: it is imported when it is asked for."""
    if name in ("PacedOptimizer", "Session", "join", "wrap"):
        try:
            from paceline.train import session
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(NEEDS_TORCH.format(name), name="torch") from None
        return getattr(session, name)
    if name in ("coordinate", "Pace"):
        from paceline.serve.worker import pace

        return getattr(pace, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
