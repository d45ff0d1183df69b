"""Who takes part in a job: in the order, waiting for its end, or expected back. It knows no policy and no clock."""

from __future__ import annotations

from paceline.serve.messages import Finished, Granted, Identity, Ready
from paceline.serve.peer import Peer


class Member:
    """A worker that takes part."""

    def __init__(self, worker: int, incarnation: int, peer: Peer, now: float) -> None:
        self.worker, self.incarnation, self.peer = worker, incarnation, peer
        self.heard = now
        self.admitted = False  # has the policy been told?
        self.iteration = 0
        self.granted: Granted | None = None  # the last one
        self.turned = False
        self.announced = False  # has the policy been told that it is ready?
        self.dropped = False  # streamed: will what the shards have not applied of this iteration's update never be?
        self.applied = -1  # version that its last update made
        self.ready: Ready | None = None
        self.parts: set[int] = set()  # shards at which this iteration's update is in
        self.answered = False  # has this iteration's update arrived, whole?
        self.barred = ""  # why the policy leaves it out, if it does
        self.finished: Finished | None = None  # what it was told at the end

    @property
    def identity(self) -> Identity:
        """Of the update that this iteration will give."""
        return Identity(self.worker, self.incarnation, self.iteration)


class Roster:
    """Everybody, and whether anybody may still train."""

    def __init__(self, wanted: int, awaited: frozenset[int] | None = None, restored: bool = False) -> None:
        """wanted: how many workers the job was meant for. awaited: who had not left the generation before this one.

        Where a checkpoint was restored and nobody knows who that was (None), as many as were wanted may yet come.
        """
        self.members: dict[int, Member] = {}  # in the order
        self.finishing: dict[int, Member] = {}  # no longer in the order, and wait for the last model
        self.awaited: set[int] = set(awaited or ())  # given up, or of the generation before, and not back
        self._strangers = wanted if restored and awaited is None else 0  # that may come
        self._came: set[int] = set()

    def find(self, worker: int) -> Member | None:
        """Whoever has this number."""
        return self.members.get(worker) or self.finishing.get(worker)

    def takes_part(self, member: Member) -> bool:
        return self.find(member.worker) is member

    def present(self) -> list[Member]:
        return [*self.members.values(), *self.finishing.values()]

    def free_number(self) -> int:
        """The first that nobody has. One whose connection is closed is most likely the caller's own former self."""
        taken = {member.worker for member in self.present() if member.peer.is_open}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def enter(self, member: Member) -> None:
        """It comes, or comes back."""
        self.members[member.worker] = member
        self.awaited.discard(member.worker)
        self._came.add(member.worker)

    def finish(self, member: Member) -> None:
        """It leaves the order, and waits for the last model."""
        del self.members[member.worker]
        self.finishing[member.worker] = member

    def leave(self, member: Member, expected_back: bool) -> None:
        """It takes no part any more."""
        self.members.pop(member.worker, None)
        self.finishing.pop(member.worker, None)
        if expected_back:
            self.awaited.add(member.worker)

    def expect_no_strangers(self) -> None:
        """Whoever has not come by now will not come."""
        self._strangers = 0

    @property
    def only_strangers_are_missing(self) -> bool:
        """Is nobody known to train, but somebody unknown may come who would?"""
        return not self.members and not self.awaited and len(self._came) < self._strangers

    @property
    def nobody_trains(self) -> bool:
        """Nobody does, and nobody is expected who would."""
        return not self.members and not self.awaited and len(self._came) >= self._strangers

    @property
    def expected(self) -> frozenset[int]:
        """Those who would go on in another generation."""
        return frozenset(self.awaited | {member.worker for member in self.present() if member.finished is None})
