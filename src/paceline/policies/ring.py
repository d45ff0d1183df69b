"""The ring of R²SP: seats in a fixed order, one of which has the turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from paceline.policies.contract import Update, WorkerId


class Seat:
    """A place in the ring, for one worker or one group. Its updates are applied together at its turn."""

    __slots__ = ("members", "number", "pending", "present", "running", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[WorkerId, None] = {}
        self.running: dict[WorkerId, None] = {}  # members that the turn waits for
        self.present: dict[WorkerId, float] = {}  # members that wait for the turn, and since when
        self.pending: list[Update] = []  # updates that wait for the turn; some of their workers may have left
        self.since = 0.0  # time of the last Grant to a member of `running`


class Ring:
    """Seats in the order in which they take turns.

    The links are numbers, not references: copying and saving a ring of ten thousand seats must not recurse that deep.
    """

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._after: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._head = -1
        self.head = Seat(-1)  # the seat that has the turn; a placeholder if the ring is empty
        self._next_number = 0
        self._sizes: list[tuple[int, int]] = []  # heap of (members, number); outdated entries are skipped

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        """Iterate over the seats, from the one that has the turn."""
        number = self._head
        for _ in range(len(self._seats)):
            yield self._seats[number]
            number = self._after[number]

    def add(self, before: Seat | None = None) -> Seat:
        """Add a new seat before the given one, by default last in line, and return it.

        A seat that is last in line delays no other seat in this revolution. A worker that leaves after its turn and
        comes back gets no second turn before the others have had theirs.
        """
        seat = Seat(self._next_number)
        number, self._next_number = self._next_number, self._next_number + 1
        if not self._seats:
            self._head = self._before[number] = self._after[number] = number
            self.head = seat
        else:
            following = self._head if before is None else before.number
            preceding = self._before[following]
            self._after[preceding] = self._before[following] = number
            self._before[number], self._after[number] = preceding, following
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
        """Pass the turn to the next seat."""
        self._head = self._after[self._head]
        self.head = self._seats[self._head]

    def sit(self, worker: WorkerId, seat: Seat) -> None:
        seat.members[worker] = None
        self._note_size(seat)

    def rise(self, worker: WorkerId, seat: Seat) -> None:
        del seat.members[worker]
        self._note_size(seat)

    def smallest(self) -> Seat:
        """Return the seat with the fewest members; of several, the oldest."""
        while True:
            size, number = self._sizes[0]
            seat = self._seats.get(number)
            if seat is not None and len(seat.members) == size:
                return seat
            heapq.heappop(self._sizes)

    def _note_size(self, seat: Seat) -> None:
        heapq.heappush(self._sizes, (len(seat.members), seat.number))
        if len(self._sizes) > 4 * len(self._seats) + 16:  # outdated entries must not accumulate
            self._sizes = [(len(seat.members), number) for number, seat in self._seats.items()]
            heapq.heapify(self._sizes)
