"""The ring of R²SP: seats in a fixed order, and whose turn it is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from paceline.policies.contract import Update, WorkerId


class Seat:
    """A place in the ring: one worker's, or one group's. Its updates are applied together when its turn comes."""

    __slots__ = ("members", "number", "pending", "present", "running", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[WorkerId, None] = {}
        self.running: dict[WorkerId, None] = {}  # members whom the turn waits for
        self.present: dict[WorkerId, float] = {}  # members who wait for the turn, and since when
        self.pending: list[Update] = []  # updates that wait for the turn, also of members who have left since
        self.since = 0.0  # when the last of `running` was granted


class Ring:
    """Seats in the order in which they take turns.

    The links are numbers and not references, so that a ring of ten thousand can be copied and saved.
    """

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._after: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._head = -1
        self.head = Seat(-1)  # whose turn it is; where there are no seats, nobody's
        self._next_number = 0
        self._sizes: list[tuple[int, int]] = []  # heap of (members, number); outdated entries are skipped

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        """All seats, from the one whose turn it is."""
        number = self._head
        for _ in range(len(self._seats)):
            yield self._seats[number]
            number = self._after[number]

    def add(self, before: Seat | None = None) -> Seat:
        """A new seat, before that one; or last in line. So nobody in the ring waits longer for it in this revolution,
        and one who left after its turn and came back gets no second turn before the others have had theirs."""
        seat = Seat(self._next_number)
        number, self._next_number = self._next_number, self._next_number + 1
        if not self._seats:
            self._head = self._before[number] = self._after[number] = number
            self.head = seat
        else:
            next_one = self._head if before is None else before.number
            last = self._before[next_one]
            self._after[last] = self._before[next_one] = number
            self._before[number], self._after[number] = last, next_one
        self._seats[number] = seat
        return seat

    def remove(self, seat: Seat) -> None:
        before, after = self._before.pop(seat.number), self._after.pop(seat.number)
        del self._seats[seat.number]
        if not self._seats:
            self._head, self.head = -1, Seat(-1)
            return
        self._after[before], self._before[after] = after, before
        if seat is self.head:
            self._head, self.head = after, self._seats[after]

    def pass_on(self) -> None:
        """The turn goes to the next in line."""
        self._head = self._after[self._head]
        self.head = self._seats[self._head]

    def sit(self, worker: WorkerId, seat: Seat) -> None:
        seat.members[worker] = None
        self._note_size(seat)

    def rise(self, worker: WorkerId, seat: Seat) -> None:
        del seat.members[worker]
        self._note_size(seat)

    def smallest(self) -> Seat:
        """The seat with the fewest members, the oldest of them."""
        while True:
            size, number = self._sizes[0]
            seat = self._seats.get(number)
            if seat is not None and len(seat.members) == size:
                return seat
            heapq.heappop(self._sizes)

    def _note_size(self, seat: Seat) -> None:
        heapq.heappush(self._sizes, (len(seat.members), seat.number))
        if len(self._sizes) > 4 * len(self._seats) + 16:  # so that coming and going does not pile up
            self._sizes = [(len(seat.members), number) for number, seat in self._seats.items()]
            heapq.heapify(self._sizes)
