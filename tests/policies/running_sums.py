"""Checks of the running sums that a policy's Adds and Applies name."""

from __future__ import annotations

from paceline.policies import Apply, Update


class RunningSums:
    """The sums that a driver would keep, with the updates and weights in each."""

    def __init__(self) -> None:
        self.sums: dict[int, list[tuple[Update, float]]] = {}
        self.spoilt: set[int] = set()  # sums of which an update was discarded

    def add(self, update: Update, number: int, weight: float) -> None:
        self.sums.setdefault(number, []).append((update, weight))

    def discard(self, update: Update) -> None:
        """Remove a discarded update. No Apply may name its sum any more, unless the sum becomes empty."""
        for number, added in list(self.sums.items()):
            for entry in added:
                if entry[0] == update:
                    added.remove(entry)
                    self.spoilt.add(number)
                    if not added:
                        del self.sums[number]
                        self.spoilt.discard(number)
                    return

    def check(self, apply: Apply) -> None:
        """The sums of an Apply must hold its updates, with the same weights."""
        added: list[tuple[Update, float]] = []
        for number, factor in apply.sums:
            assert number in self.sums and number not in self.spoilt, f"{apply}: there is no such sum"
            added += [(update, factor * weight) for update, weight in self.sums.pop(number)]
        expected = sorted(zip(apply.updates, apply.weights, strict=True), key=repr)
        for (update, weight), (expected_update, expected_weight) in zip(sorted(added, key=repr), expected, strict=True):
            same = update == expected_update and abs(weight - expected_weight) <= 1e-9 * expected_weight
            assert same, f"{apply}: the sums hold other updates or weights"
