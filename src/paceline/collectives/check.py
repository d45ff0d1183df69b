"""A proof that a schedule is an all-reduce. It counts whose contributions each server has, element by element."""

from __future__ import annotations

import numpy as np

from paceline.collectives.schedule import ANY, Schedule, ScheduleProcess, Step
from paceline.collectives.topology import Topology


class ScheduleError(ValueError):
    """The schedule is not an all-reduce. The message says where it goes wrong."""


def check(schedule: Schedule, net: Topology | None = None) -> None:
    """Raise ScheduleError unless every server ends with the sum of all contributions, each counted once.

    Also raise it if a server is sent elements that it already has. With a network, also raise it if two servers
    exchange elements at a level at which they are not peers.
    """
    end = 0
    for process in sorted(schedule.processes, key=lambda each: each.start):
        if process.start != end:
            raise ScheduleError(
                f"Elements {min(end, process.start)} to {max(end, process.start)} do not belong to exactly one process."
            )
        end = process.stop
        for number, step in enumerate(process.steps):
            _check_transfers(number, step, schedule.servers, net)
        _check_sums(schedule.servers, process)
    if end != schedule.elements:
        raise ScheduleError(f"Elements {end} to {schedule.elements} belong to no process.")


def _check_transfers(number: int, step: Step, servers: int, net: Topology | None) -> None:
    for sender, receiver, level in zip(step.sender.tolist(), step.receiver.tolist(), step.level.tolist(), strict=True):
        if not (0 <= sender < servers and 0 <= receiver < servers) or sender == receiver:
            raise ScheduleError(f"Step {number}: server {sender} sends to server {receiver}.")
        if net and level != ANY and receiver not in net.peers(sender, level):
            raise ScheduleError(f"Step {number}: servers {sender} and {receiver} are not peers at level {level}.")


def _check_sums(servers: int, process: ScheduleProcess) -> None:
    if process.start == process.stop:
        if process.steps:
            raise ScheduleError("A process without elements has transfers.")
        return
    ends = [column for step in process.steps for column in (step.start, step.stop)]
    cuts = np.unique(np.concatenate([np.array([process.start, process.stop]), *ends]))
    if cuts[0] != process.start or cuts[-1] != process.stop:
        raise ScheduleError("A process sends elements that belong to another.")
    # counts[server, piece, contributor]: how often the contribution is in what the server has of the piece
    counts = np.zeros((servers, len(cuts) - 1, servers), dtype=np.int16)
    counts[np.arange(servers), :, np.arange(servers)] = 1
    for number, step in enumerate(process.steps):
        first, last = np.searchsorted(cuts, step.start), np.searchsorted(cuts, step.stop)
        sent = [counts[sender, begin:end].copy() for sender, begin, end in zip(step.sender, first, last, strict=True)]
        sending = np.zeros((servers, len(cuts) - 1), dtype=bool)
        for sender, begin, end in zip(step.sender, first, last, strict=True):
            sending[sender, begin:end] = True
        written = np.zeros_like(sending)
        for receiver, begin, end, what in zip(step.receiver, first, last, sent, strict=True):
            target = counts[receiver, begin:end]
            if step.adds:
                target += what
                continue
            if (target == 1).all(axis=1).any():
                raise ScheduleError(f"Step {number}: server {receiver} is sent elements that it already has.")
            if written[receiver, begin:end].any():
                raise ScheduleError(f"Step {number}: server {receiver} is sent the same elements by two servers.")
            if sending[receiver, begin:end].any():
                raise ScheduleError(f"Step {number}: server {receiver} is sent elements while it is sending them.")
            written[receiver, begin:end] = True
            target[:] = what
    wrong = np.argwhere(counts != 1)
    if len(wrong):
        server, piece, of = (int(each) for each in wrong[0])
        raise ScheduleError(
            f"Server {server} ends with the contribution of server {of} counted {counts[server, piece, of]} times in "
            f"elements {cuts[piece]} to {cuts[piece + 1]}; it must be counted once."
        )
