"""A push in visits: the coordinator says when this worker pushes which part of its gradient to which shard.

A shard runs beside each worker. Two visits are under way at a time, so each has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.job.visits import AT_ONCE
from paceline.serve.worker.shard_link import ShardLink
from paceline.serve.worker.streamed_exchange import StreamedExchange


class VisitedPush:
    """One push of one gradient."""

    def __init__(self, shards: Sequence[ShardLink], worker: int, parts: int, exchange: StreamedExchange) -> None:
        self._shards, self._parts, self._exchange = shards, parts, exchange
        away = [shard for shard in shards if shard.number != worker]
        self._left = {(shard.number, part) for shard in away for part in range(parts)}
        self._beside = [shard for shard in shards if shard.number == worker]
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, next_visit: Callable[[], tuple[int, int] | None], end_visit: Callable[[int, int], None]) -> None:
        """Push everything. Return when all of it is sent."""
        for shard in self._beside:
            for piece in range(len(shard.pieces)):
                self._exchange.send(shard, piece)

        def visit_until_done() -> None:
            try:
                while self._take_place():
                    place = next_visit()
                    if place is None:
                        return
                    self._visit(*place)
                    end_visit(*place)
            except BaseException as error:
                self._error = error

        self._places = len(self._left)
        others = [threading.Thread(target=visit_until_done, daemon=True) for _ in range(AT_ONCE - 1)]
        for thread in others:
            thread.start()
        visit_until_done()
        for thread in others:
            thread.join()
        if self._error:
            raise self._error
        for place in sorted(self._left):  # the iteration is over, and the shards return what arrives
            self._send(*place)

    def _take_place(self) -> bool:
        """Return whether another visit is to come, and count it."""
        with self._lock:
            self._places -= 1
            return self._places >= 0

    def _visit(self, shard: int, part: int) -> None:
        # The next visit begins while this part is on its way, because its return begins when all of it has arrived.
        self._exchange.drain(self._shards[shard], all_but=self._send(shard, part))
        with self._lock:
            self._left.discard((shard, part))

    def _send(self, shard: int, part: int) -> int:
        """Push a part. Return the number of its pieces."""
        link = self._shards[shard]
        count = len(link.pieces)
        pieces = range(part * count // self._parts, (part + 1) * count // self._parts)
        for piece in pieces:
            self._exchange.send(link, piece)
        return len(pieces)
