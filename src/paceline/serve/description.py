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
        """Read what `as_json` wrote. Whatever else it is given: ValueError with one sentence."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("a description is not nested so deep") from None
        match values:
            case {"layout": layout, "optimizer": optimizer, **rest} if not rest:
                return cls(Layout.from_json(layout), OptimizerSpec.from_json(optimizer))
        raise ValueError('a description must be an object with "layout" and "optimizer"')
