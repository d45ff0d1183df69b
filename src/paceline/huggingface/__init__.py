"""Train with the Trainer of transformers in a job: `PacedTrainer` in place of `Trainer`.

Under plain `python` a PacedTrainer is a Trainer. This package needs the extra: pip install 'paceline[huggingface]'.
"""

from __future__ import annotations

from paceline.huggingface import library  # noqa: F401  # first, because it checks that transformers is installed
from paceline.huggingface.trainer import PacedTrainer

__all__ = ["PacedTrainer"]
