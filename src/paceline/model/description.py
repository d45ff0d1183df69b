"""What a job trains, as a worker describes it when it joins: the model's layout and the optimizer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline.model.layout import Layout
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise

EACH, FEW, MANY = 1 << 15, 16, 64  # elements in a slice, and how many slices there are, if nobody says
MIN_PIECE_ELEMENTS = (
    1 << 13
)  # elements in a slice, if it can be helped: below, its head and its step cost more than its bytes


@dataclass(frozen=True)
class Description:
    """A model's layout and its optimizer. Every worker of a job must bring the same."""

    layout: Layout
    optimizer: OptimizerSpec
    fixed: str = ""  # a digest of what is part of the model and does not travel, its frozen parameters

    MAX_BYTES = 16 << 20  # bytes of JSON

    def deal(self, shards: int, slices: int | None = None) -> list[tuple[tuple[int, int], ...]]:
        """Cut the model into so many slices or a few more, and deal them out to shards like cards.

        So every part of the model is spread over all shards. Slices are not made too small, and where an optimizer
        looks at whole tensors, there are as many as the tensors allow. ValueError if there are more shards.
        slices: None is as many as its size calls for, to be streamed.
        """
        if slices is None:
            slices = min(max(FEW, self.layout.size // EACH), MANY)
        anywhere = is_elementwise(self.optimizer.name)
        rows = max(1, min(-(-slices // shards), self.layout.size // (shards * MIN_PIECE_ELEMENTS)))
        while True:
            try:
                cut = self.layout.cut(shards * rows, anywhere)
                break
            except ValueError:
                if rows == 1:
                    raise
                rows -= 1
        return [tuple((each.start, each.stop) for each in cut[shard::shards]) for shard in range(shards)]

    def differs_from(self, other: Description) -> str | None:
        """One sentence that names the first difference that matters, or None. `self` is what is here, `other` there.

        An optimizer's settings may differ: the first worker's count, and learning rates travel with each update.
        """
        difference = self.layout.differs_from(other.layout)
        if difference:
            return difference
        ours, theirs = self.optimizer, other.optimizer
        if ours.name != theirs.name:
            return f"the optimizer is {ours.name} here and {theirs.name} there"
        groups, others = len(ours.settings_of_groups), len(theirs.settings_of_groups)
        if groups != others:
            return f"the optimizer has {groups} parameter groups here and {others} there"
        if self.fixed != other.fixed:
            return "parameters that are frozen, or buffers, have other values there: load or seed them alike"
        return None

    def as_json(self) -> bytes:
        values = {"layout": self.layout.as_json(), "optimizer": self.optimizer.as_json(), "fixed": self.fixed}
        return json.dumps(values).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Description:
        """Read what `as_json` wrote. Whatever else it is given: ValueError with one sentence."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("a description is not nested so deep") from None
        match values:
            case {"layout": layout, "optimizer": optimizer, **rest} if rest.keys() <= {"fixed"}:
                fixed = str(rest.get("fixed", ""))[:128]
                return cls(Layout.from_json(layout), OptimizerSpec.from_json(optimizer), fixed)
        raise ValueError('a description must be an object with "layout" and "optimizer"')
