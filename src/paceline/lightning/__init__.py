"""Train with Lightning in a job: `Trainer(strategy="paceline")`, after `import paceline.lightning`.

Under plain `python` the strategy trains on one device. This package needs the extra: pip install 'paceline[lightning]'.
"""

from __future__ import annotations

from paceline.lightning import package  # noqa: F401  # first, because it checks that Lightning is installed
from paceline.lightning.strategy import PacelineStrategy

__all__ = ["PacelineStrategy"]
