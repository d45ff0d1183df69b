"""What a job trains, as a worker describes it when it joins: the model's layout and the optimizer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline.model.layout import Layout
from paceline.model.spec import OptimizerSpec, is_elementwise


@dataclass(frozen=True)
class Description:
    """A model's layout and its optimizer. Every worker of a job must bring the same."""

    layout: Layout
    optimizer: OptimizerSpec

    MOST = 16 << 20  # bytes of JSON

    def cut(self, shards: int) -> tuple[range, ...]:
        """The elements that each of so many shards holds."""
        return self.layout.cut(shards, anywhere=is_elementwise(self.optimizer.name))

    def as_json(self) -> bytes:
        return json.dumps({"layout": self.layout.as_json(), "optimizer": self.optimizer.as_json()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Description:
        values = json.loads(text)
        return cls(Layout.from_json(values["layout"]), OptimizerSpec.from_json(values["optimizer"]))
