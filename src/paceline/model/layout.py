"""The layout of a model's tensors in one flat buffer of float32 elements, and how that buffer is cut."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

#: The types that a parameter may have in the worker's model. In the buffer, every element is float32.
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Types that only a running statistic may have (batch norm counts its batches).
WHOLE = ("int64", "int32", "int16", "int8", "uint8")

#: The "group" of a model's running statistics (torch calls them buffers). No optimizer changes them; they are averaged
#: over the workers instead (see `Slice.step`).
STATISTICS = -1

#: The limit of a model's elements (4 TiB of float32). A larger number is a mistake or an attack.
MAX_ELEMENTS = 2**40
#: The limit of torch itself.
MAX_DIMENSIONS = 64
#: The limit of parameter groups. It bounds the memory that a hostile layout can make the server allocate.
MAX_GROUPS = 2**16


@dataclass(frozen=True)
class Tensor:
    """One parameter of a model: its name, shape and type, and its parameter group in the optimizer.

    For a running statistic, the group is STATISTICS.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    group: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a tensor must be a string that is not empty; got {self.name!r:.80}")
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(f"the shape of {self.name!r} must be a tuple of at most {MAX_DIMENSIONS} sizes")
        # Check each size and the product: a zero among the sizes would hide an absurd one.
        if not all(_is_count(size, MAX_ELEMENTS) for size in self.shape) or self.size > MAX_ELEMENTS:
            raise ValueError(
                f"the sizes in the shape of {self.name!r} must be whole numbers from 0 up to a total of 2^40"
            )
        # `type is`, because True == 1 and -1.0 == -1.
        known = type(self.group) is int and STATISTICS <= self.group < MAX_GROUPS
        if not known:
            raise ValueError(f"the group of {self.name!r} must be a whole number from -1 to {MAX_GROUPS - 1}")
        types = (*DTYPES, *WHOLE) if self.group == STATISTICS else DTYPES
        if self.dtype not in types:
            raise ValueError(f"the type of {self.name!r} must be one of {', '.join(types)}, not {self.dtype!r:.80}")

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in their order in the buffer. Their names are unique."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        seen = set[str]()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ValueError(f"the layout names {tensor.name!r} twice")
            seen.add(tensor.name)
        if self.size > MAX_ELEMENTS:
            raise ValueError(f"the layout has {self.size} elements, which is more than the 2^40 that are allowed")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each tensor in the buffer, followed by the size of the buffer."""
        return (0, *accumulate(tensor.size for tensor in self.tensors))

    @property
    def size(self) -> int:
        """The number of elements in the buffer."""
        return self.offsets[-1]

    @cached_property
    def trained_elements(self) -> int:
        """The number of elements before the running statistics, which lie at the end."""
        end = len(self.tensors)
        while end and self.tensors[end - 1].group == STATISTICS:
            end -= 1
        return self.offsets[end]

    @property
    def groups(self) -> int:
        """The number of parameter groups that the optimizer needs at least."""
        return 1 + max((tensor.group for tensor in self.tensors), default=-1)

    def within(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yield each tensor that overlaps the range [start, stop), with the start and the stop of the overlap.

        All positions count elements of the whole buffer. Tensors without elements are left out.
        """
        first = bisect_right(self.offsets, start) - 1
        for index in range(first, len(self.tensors)):
            begin, end = max(start, self.offsets[index]), min(stop, self.offsets[index + 1])
            if self.offsets[index] >= stop:
                return
            if begin < end:
                yield self.tensors[index], begin, end

    def digest(self) -> str:
        """Return the SHA-256 of the layout in hex. Two layouts have the same digest if and only if they are equal."""
        canonical = json.dumps(self.as_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def differs_from(self, other: Layout) -> str | None:
        """Return one sentence that names the first difference, or None. `self` is "here", `other` is "there"."""
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
        """Return the layout as JSON values."""
        return {"tensors": [[each.name, list(each.shape), each.dtype, each.group] for each in self.tensors]}

    @classmethod
    def from_json(cls, value: object) -> Layout:
        """Return the layout that `as_json` wrote. Raise ValueError with one sentence if it is not one."""
        match value:
            case {"tensors": list(rows), **rest} if not rest:
                return cls(tuple(_tensor_from(row) for row in rows))
        raise ValueError('a layout must be an object with one entry, "tensors", that is a list')

    def cut(self, shards: int, anywhere: bool) -> tuple[range, ...]:
        """Cut the buffer into one piece per shard. The pieces have no gaps, and none of them is empty.

        anywhere: True if a tensor may be cut; then the sizes differ by at most one element. Otherwise every cut is at a
        boundary of tensors. Then the largest piece is as small as possible, and one pass from left to right makes the
        others as even as it can.
        """
        if shards < 1:
            raise ValueError(f"a model must be cut into at least 1 shard, not {shards}")
        sizes = [tensor.size for tensor in self.tensors if tensor.size]
        most, unit = (self.size, "elements") if anywhere else (len(sizes), "tensors that are not empty")
        if shards > most:
            raise ValueError(f"{shards} shards are too many: the model has only {most} {unit}")
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
    """Return the cuts between tensors, from 0 to sum(sizes), that make the largest piece as small as possible."""
    ends = [0, *accumulate(sizes)]
    low, high = max(sizes), ends[-1]
    while low < high:  # search for the smallest possible size of the largest piece
        middle = (low + high) // 2
        if _pieces_needed(ends, middle)[0] <= shards:
            high = middle
        else:
            low = middle + 1
    needed = _pieces_needed(ends, low)
    cuts, at = [0], 0
    for left in range(shards - 1, 0, -1):  # `left` shards come after this one
        even = ends[at] + (ends[-1] - ends[at]) / (left + 1)
        # The piece must fit, leave at least one tensor for each later piece, and leave no more than those can hold.
        last = min(bisect_right(ends, ends[at] + low) - 1, len(sizes) - left)
        first = next(index for index in range(at + 1, last + 1) if needed[index] <= left)
        after = min(max(bisect_left(ends, even), first), last)
        at = after - 1 if after > first and even - ends[after - 1] < ends[after] - even else after
        cuts.append(ends[at])
    return [*cuts, ends[-1]]


def _pieces_needed(ends: list[int], room: int) -> list[int]:
    """Return, for each tensor, how many pieces of at most `room` elements can hold it and all later tensors."""
    needed = [0] * len(ends)
    for index in range(len(ends) - 2, -1, -1):
        needed[index] = 1 + needed[bisect_right(ends, ends[index] + room) - 1]
    return needed
