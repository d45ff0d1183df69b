"""The description of a model that a worker sends when it joins: the layout and the optimizer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paceline.model.layout import Layout
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise

#: Elements per piece, if the number of pieces is not configured. Most of a piece's CPU
#: time does not depend on its size: with 1 << 15, 4 workers and 8 MB take 1.6 times as much (docs/benchmarks.md).
PIECE_ELEMENTS = 1 << 17
MIN_PIECES, MAX_PIECES = 16, 64  # limits of the number of pieces in that case, if there are few shards
MAX_PIECES_EACH = 16  # the largest number of pieces of each shard in that case, if there are several
MIN_PIECE_ELEMENTS = 1 << 13  # in a smaller piece, the header and the optimizer step cost more than the bytes


@dataclass(frozen=True)
class Description:
    """The layout and the optimizer of a model. All workers of a job must have the same."""

    layout: Layout
    optimizer: OptimizerSpec
    fixed: str = ""  # a digest of the parts of the model that are not sent, such as frozen parameters
    local_steps: bool = False  # whether an update is the difference that several steps of a worker have made

    MAX_BYTES = 16 << 20  # of the JSON text

    def deal(self, shards: int, pieces: int | None = None, each: int = 1) -> list[tuple[tuple[int, int], ...]]:
        """Cut the model into at least `pieces` pieces, deal them to the shards in turn, and return those of each shard.

        So every part of the model is spread over all shards. There are fewer pieces if they would be too small, or if
        the optimizer needs whole tensors and the model has too few of them. Raise ValueError if the model cannot be
        cut into one piece per shard.

        pieces: None chooses a number for streaming, from the size of the model. each: the least pieces of a shard then.
        """
        if pieces is None:
            most = max(MAX_PIECES, MAX_PIECES_EACH * shards if shards > 1 else 0)
            pieces = max(min(max(MIN_PIECES, self.layout.size // PIECE_ELEMENTS), most), each * shards)
        anywhere = is_elementwise(self.optimizer.name)
        rows = max(1, min(-(-pieces // shards), self.layout.size // (shards * MIN_PIECE_ELEMENTS)))
        while True:
            try:
                cut = self.layout.cut(shards * rows, anywhere)
                break
            except ValueError:
                if rows == 1:
                    raise
                rows -= 1
        return [tuple((each.start, each.stop) for each in cut[shard::shards]) for shard in range(shards)]

    def differs_from(self, other: Description, settings: bool = True) -> str | None:
        """Return one sentence that names the first difference that matters, or None. `self` is "here", `other` "there".

        Learning rates may differ: each update carries its own. settings: compare the optimizers' other settings too.
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
            return "frozen parameters or buffers have other values there: load the same values, or use the same seed"
        return _differing_setting(ours, theirs) if settings else None

    def as_json(self) -> bytes:
        """Return the description as JSON text."""
        values = {"layout": self.layout.as_json(), "optimizer": self.optimizer.as_json(), "fixed": self.fixed}
        return json.dumps(values | ({"local_steps": True} if self.local_steps else {})).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Description:
        """Return the description that `as_json` wrote. Raise ValueError with one sentence if the text is not one."""
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError("a description must not be nested that deeply") from None
        match values:
            case {"layout": layout, "optimizer": optimizer, **rest} if rest.keys() <= {"fixed", "local_steps"}:
                fixed, local_steps = str(rest.get("fixed", ""))[:128], bool(rest.get("local_steps"))
                return cls(Layout.from_json(layout), OptimizerSpec.from_json(optimizer), fixed, local_steps)
        raise ValueError('a description must be an object with "layout" and "optimizer"')


def _differing_setting(ours: OptimizerSpec, theirs: OptimizerSpec) -> str | None:
    """Return a sentence that names the first setting with two values, other than the learning rate, or None.

    A setting that only one side has is not compared: versions of torch differ in it.
    """
    several = len(ours.settings_of_groups) > 1
    for group, (mine, its) in enumerate(zip(ours.settings_of_groups, theirs.settings_of_groups, strict=True)):
        where = f" of parameter group {group}" if several else ""
        for name, value in mine.items():
            if name != "lr" and name in its and its[name] != value:
                return f"{ours.name}'s {name}{where} is {value} here and {its[name]} there"
    return None
