"""Synchronization policies for Flower: `PolicyStrategy` drives a federation of Flower nodes by a policy of paceline.

The nodes run an unchanged ClientApp. This package needs the extra: pip install 'paceline[flower]'.
"""

from __future__ import annotations

from paceline import extras

extras.FLOWER.check()

from paceline.flower.strategy import PolicyStrategy  # noqa: E402  # only after the check

__all__ = ["PolicyStrategy"]
