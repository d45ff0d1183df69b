"""How a model's parameters lie one after the other in one flat buffer of float32 elements, and how that is cut."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

#: Types a parameter may have in the worker's model. In the buffer each is float32.
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Types that a statistic may have besides (batch norm counts its batches).
WHOLE = ("int64", "int32", "int16", "int8", "uint8")

#: The "group" of tensors that no optimizer moves: a model's running statistics (torch calls them buffers). They are
#: averaged over the workers instead; see `Slice.step`.
STATISTICS = -1

#: More elements than this (4 TiB of float32) are a mistake or an attack, not a model.
MAX_ELEMENTS = 2**40
#: torch itself holds no more dimensions.
MAX_DIMENSIONS = 64
#: More groups than this nobody has; it bounds what a stranger's layout can make us allocate.
MAX_GROUPS = 2**16


@dataclass(frozen=True)
class Tensor:
    """One parameter: its name in the model, its shape and type there, and the optimizer's group it belongs to.

    Or one running statistic: its group is STATISTICS.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    group: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a tensor's name must be a string that is not empty, not {self.name!r:.80}")
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(f"the shape of {self.name!r} must be a tuple of at most {MAX_DIMENSIONS} sizes")
        # Each size by itself as well as their product: a zero among them would hide an absurd one.
        if not all(_is_count(size, MAX_ELEMENTS) for size in self.shape) or self.size > MAX_ELEMENTS:
            raise ValueError(
                f"the sizes in the shape of {self.name!r} must be whole numbers from 0 up to a total of 2^40"
            )
        # `type`, because True == 1 and -1.0 == -1.
        known = type(self.group) is int and STATISTICS <= self.group < MAX_GROUPS
        if not known:
            raise ValueError(f"the group of {self.name!r} must be a whole number from -1 to {MAX_GROUPS - 1}")
        types = (*DTYPES, *WHOLE) if self.group == STATISTICS else DTYPES
        if self.dtype not in types:
            raise ValueError(f"the type of {self.name!r} must be one of {', '.join(types)}, not {self.dtype!r:.80}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in the order in which they lie in the buffer. Names are unique."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        seen = set[str]()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ValueError(f"the layout names {tensor.name!r} twice")
            seen.add(tensor.name)
        if self.size > MAX_ELEMENTS:
            raise ValueError(f"the layout holds {self.size} elements, more than the 2^40 that are allowed")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and at the end where the last one stops: one more than there are tensors."""
        return (0, *accumulate(tensor.size for tensor in self.tensors))

    @property
    def size(self) -> int:
        """Number of elements in the buffer."""
        return self.offsets[-1]

    @property
    def groups(self) -> int:
        """How many parameter groups the optimizer needs at least."""
        return 1 + max((tensor.group for tensor in self.tensors), default=-1)

    def within(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """The tensors that lie in part or whole in [start, stop), each with where that part begins and ends.

        Both ends count in elements of the whole buffer. Tensors without elements are left out.
        """
        first = bisect_right(self.offsets, start) - 1
        for index in range(first, len(self.tensors)):
            begin, end = max(start, self.offsets[index]), min(stop, self.offsets[index + 1])
            if self.offsets[index] >= stop:
                return
            if begin < end:
                yield self.tensors[index], begin, end

    def digest(self) -> str:
        """SHA-256, in hex: equal for two layouts if, and only if, they are equal."""
        canonical = json.dumps(self.as_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def differs_from(self, other: Layout) -> str | None:
        """One sentence that names the first difference, or None. `self` is what is here, `other` there."""
        for index, (ours, theirs) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            if ours.name != theirs.name:
                return f"parameter {index} is {ours.name!r} here and {theirs.name!r} there"
            for what in ("shape", "dtype", "group"):
                mine, its = getattr(ours, what), getattr(theirs, what)
                if mine != its:
                    return f"the {what} of {ours.name!r} is {mine} here and {its} there"
        if len(self.tensors) != len(other.tensors):
            longer, where = (self, "here") if len(self.tensors) > len(other.tensors) else (other, "there")
            extra = longer.tensors[min(len(self.tensors), len(other.tensors))].name
            counts = f"{len(self.tensors)} parameters here and {len(other.tensors)} there"
            return f"there are {counts}: {extra!r} is only {where}"
        return None

    def as_json(self) -> dict[str, object]:
        """As values that JSON knows; `from_json` reads them back."""
        return {"tensors": [[each.name, list(each.shape), each.dtype, each.group] for each in self.tensors]}

    @classmethod
    def from_json(cls, value: object) -> Layout:
        """Read what `as_json` wrote. Whatever else it is given: ValueError with one sentence."""
        match value:
            case {"tensors": list(rows), **rest} if not rest:
                return cls(tuple(_tensor_from(row) for row in rows))
        raise ValueError('a layout must be an object with one entry, "tensors", that is a list')

    def cut(self, shards: int, anywhere: bool) -> tuple[range, ...]:
        """Cut the buffer into that many pieces without gaps, one a shard, none of them empty.

        anywhere: sizes differ by one element at most. Otherwise every cut is at a tensor's boundary; the largest piece
        is as small as that allows, and the others are as even as is found in one pass from left to right.
        """
        if shards < 1:
            raise ValueError(f"a model is cut into at least 1 shard, not {shards}")
        sizes = [tensor.size for tensor in self.tensors if tensor.size]
        most, unit = (self.size, "elements") if anywhere else (len(sizes), "tensors that are not empty")
        if shards > most:
            raise ValueError(f"{shards} shards are too many: the model has only {most} {unit} to share out")
        if anywhere:
            ends = [self.size * shard // shards for shard in range(shards + 1)]
        else:
            ends = _cut_between(sizes, shards)
        return tuple(range(start, stop) for start, stop in pairwise(ends))


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _tensor_from(row: object) -> Tensor:
    match row:
        case [str(name), list(shape), str(dtype), int(group)]:
            return Tensor(name, tuple(shape), dtype, group)
    raise ValueError(f"a layout's tensor must be [name, shape, type, group], not {row!r:.80}")


def _cut_between(sizes: list[int], shards: int) -> list[int]:
    """Where to cut between neighbours so that the largest of the pieces is as small as can be: 0, …, sum(sizes)."""
    ends = [0, *accumulate(sizes)]
    low, high = max(sizes), ends[-1]
    while low < high:  # The smallest room in which every piece fits.
        middle = (low + high) // 2
        if _pieces_needed(ends, middle)[0] <= shards:
            high = middle
        else:
            low = middle + 1
    needed = _pieces_needed(ends, low)
    cuts, at = [0], 0
    for left in range(shards - 1, 0, -1):  # `left` shards come after this one.
        even = ends[at] + (ends[-1] - ends[at]) / (left + 1)
        # It must fit, leave the others one tensor each, and leave them no more than they can hold.
        last = min(bisect_right(ends, ends[at] + low) - 1, len(sizes) - left)
        first = next(index for index in range(at + 1, last + 1) if needed[index] <= left)
        after = min(max(bisect_left(ends, even), first), last)
        at = after - 1 if after > first and even - ends[after - 1] < ends[after] - even else after
        cuts.append(ends[at])
    return [*cuts, ends[-1]]


def _pieces_needed(ends: list[int], room: int) -> list[int]:
    """For each tensor: how many pieces of at most `room` elements it takes to hold it and all that follow."""
    needed = [0] * len(ends)
    for index in range(len(ends) - 2, -1, -1):
        needed[index] = 1 + needed[bisect_right(ends, ends[index] + room) - 1]
    return needed
