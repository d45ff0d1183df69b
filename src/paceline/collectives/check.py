"""A proof that a schedule is an all-reduce: whose contributions does each server have, element by element?"""

from __future__ import annotations

import numpy as np

from paceline.collectives.schedule import ANY, Schedule, ScheduleProcess, Step
from paceline.collectives.topology import Topology


class ScheduleError(ValueError):
    """The schedule is not an all-reduce. The message says where it goes wrong."""


def check(schedule: Schedule, net: Topology | None = None) -> None:
    """ScheduleError unless every server ends with the sum of all, each once, and nothing is sent in vain. With a
    network, also unless those who send to each other at a level are peers there."""
    end = 0
    for process in sorted(schedule.processes, key=lambda each: each.start):
        if process.start != end:
            raise ScheduleError(
                f"Elements {min(end, process.start)} to {max(end, process.start)} are not of one process."
            )
        end = process.stop
        for number, step in enumerate(process.steps):
            _check_ends(number, step, schedule.servers, net)
        _check(schedule.servers, process)
    if end != schedule.elements:
        raise ScheduleError(f"Elements {end} to {schedule.elements} are of no process.")


def _check_ends(number: int, step: Step, servers: int, net: Topology | None) -> None:
    for sender, receiver, level in zip(step.sender.tolist(), step.receiver.tolist(), step.level.tolist(), strict=True):
        if not (0 <= sender < servers and 0 <= receiver < servers) or sender == receiver:
            raise ScheduleError(f"Step {number}: server {sender} sends to server {receiver}.")
        if net and level != ANY and receiver not in net.peers(sender, level):
            raise ScheduleError(f"Step {number}: servers {sender} and {receiver} are no peers at level {level}.")


def _check(servers: int, process: ScheduleProcess) -> None:
    if process.start == process.stop:
        if process.steps:
            raise ScheduleError("A process without elements sends some.")
        return
    ends = [column for step in process.steps for column in (step.start, step.stop)]
    cuts = np.unique(np.concatenate([np.array([process.start, process.stop]), *ends]))
    if cuts[0] != process.start or cuts[-1] != process.stop:
        raise ScheduleError("A process sends what is not its own.")
    # counts[server, piece, contributor]: how often it is in what the server has of that piece
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
                raise ScheduleError(f"Step {number}: server {receiver} is sent what it has.")
            if written[receiver, begin:end].any():
                raise ScheduleError(f"Step {number}: server {receiver} is sent the same elements by two.")
            if sending[receiver, begin:end].any():
                raise ScheduleError(f"Step {number}: server {receiver} is sent elements that it is sending.")
            written[receiver, begin:end] = True
            target[:] = what
    wrong = np.argwhere(counts != 1)
    if len(wrong):
        server, piece, of = (int(each) for each in wrong[0])
        raise ScheduleError(
            f"Server {server} ends with the contribution of server {of} {counts[server, piece, of]} times in elements "
            f"{cuts[piece]} to {cuts[piece + 1]}; once is right."
        )
