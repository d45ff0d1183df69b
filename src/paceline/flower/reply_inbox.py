"""Collects the replies of nodes. A reply whose arrays are still on their way holds up no other one.

`Grid.pull_messages` returns when it has the arrays of all replies that it has found. A node on a slow link uploads for
seconds, and one that dies meanwhile is waited for until its session expires. So the grid is asked in threads, and asked
again while an earlier call waits. The superlink forgets a message once its reply is pulled. To a later call that asks
for the same message, it says that there is no such message. Such an error counts only if no earlier call brings the
reply.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

THREADS = 8  # calls that may be under way
PROMPT = 0.1  # seconds to wait for a call that finds no upload under way


@dataclass(eq=False)
class _Call:
    """A call of the grid, in a thread of its own."""

    asked: frozenset[str]
    done: threading.Event = field(default_factory=threading.Event)
    replies: list[Message] = field(default_factory=list)
    error: Exception | None = None

    def run(self, grid: Grid) -> None:
        try:
            self.replies = list(grid.pull_messages(sorted(self.asked)))
        except Exception as error:
            self.error = error
        self.done.set()


@dataclass
class _Doubt:
    """An error instead of a reply, and the earlier calls that may bring the reply."""

    error: Message
    earlier: list[_Call]


class ReplyInbox:
    """Asks the grid for replies, in threads if there are any."""

    def __init__(self, grid: Grid, threads: int = THREADS) -> None:
        """threads: how many calls may be under way; 0: each call is waited for."""
        self._grid, self._threads = grid, threads
        self._calls: list[_Call] = []  # under way, the earliest first
        self._doubts: dict[str, _Doubt] = {}  # message → the error

    def collect(self, messages: Sequence[str]) -> list[Message]:
        """Return the replies to these messages that have come since the last call, in the order of the messages."""
        asked = frozenset(messages) - self._doubts.keys()
        if asked and not self._threads:
            replies = list(self._grid.pull_messages(sorted(asked)))
        else:
            if asked and len(self._calls) < self._threads:
                self._begin(_Call(asked))
            replies = self._finished()
        order = {message: at for at, message in enumerate(messages)}
        return sorted(replies, key=lambda each: order.get(each.metadata.reply_to_message_id, 0))

    def _begin(self, call: _Call) -> None:
        # A daemon, because a run may end while a node that has died is still waited for.
        threading.Thread(target=call.run, args=(self._grid,), daemon=True).start()
        self._calls.append(call)
        call.done.wait(PROMPT)

    def _finished(self) -> list[Message]:
        """Return the replies of the calls that are done, and the errors that no earlier call can refute any more."""
        found: list[Message] = []
        for call in [call for call in self._calls if call.done.is_set()]:
            earlier = self._calls[: self._calls.index(call)]
            self._calls.remove(call)
            if call.error:
                raise call.error
            for reply in call.replies:
                message = reply.metadata.reply_to_message_id
                rivals = [each for each in earlier if message in each.asked]
                if reply.has_error() and rivals:
                    self._doubts.setdefault(message, _Doubt(reply, rivals))
                else:
                    self._doubts.pop(message, None)
                    found.append(reply)
        for message, doubt in list(self._doubts.items()):
            if not any(call in self._calls for call in doubt.earlier):
                del self._doubts[message]
                found.append(doubt.error)
        return found
