"""Which source a group's prompt comes from: a fixed schedule that keeps to the weights at every length.

The sources take turns in a cycle (by largest deficit), so any stretch of groups holds each source in its share, and the
n-th group's source and how often that source came before are known without counting from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

_LONGEST_CYCLE = 10_000


class Mixture:
    """Args: a positive weight per source."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight).limit_denominator(1_000_000) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        parts = [int(weight * scale) for weight in exact]
        divisor = math.gcd(*parts)
        shares = [part // divisor for part in parts]
        if (total := sum(shares)) > _LONGEST_CYCLE:
            shares = [max(1, round(share * _LONGEST_CYCLE / total)) for share in shares]
        self.shares = tuple(shares)  # turns per cycle
        self._cycle = _turns(self.shares)
        counts = [0] * len(shares)
        self._before: list[int] = []  # turns of the same source earlier in the cycle
        for source in self._cycle:
            self._before.append(counts[source])
            counts[source] += 1

    def draw(self, number: int) -> tuple[int, int]:
        """(source, how often it was drawn before) of draw ``number``, from 0."""
        cycle, place = divmod(number, len(self._cycle))
        source = self._cycle[place]
        return source, cycle * self.shares[source] + self._before[place]


def _turns(shares: Sequence[int]) -> list[int]:
    total = sum(shares)
    credit = [0] * len(shares)
    turns = []
    for _ in range(total):
        credit = [one + share for one, share in zip(credit, shares, strict=True)]
        source = credit.index(max(credit))
        credit[source] -= total
        turns.append(source)
    return turns
