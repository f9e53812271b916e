"""The toy task: add four digits, with the working shown or not.

    prompt  7+5+8+6=      worked answer  12,20,26#26      guessed answer  #26 (or near it)

Reward 1 when the text after the last ``#`` is the sum and the completion was ended by the model, else 0. There are
9^4 = 6,561 prompts; 256 of them are held out from the warm-up and from GRPO. (Other orders of the same digits are not
held out: the policy must add, but it has seen most sums.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

DIGITS = range(1, 10)
TERMS = 4
HELD_OUT = 256
HELD_OUT_SEED = 20_000
GUESS_SPREAD = 5

Terms = tuple[int, ...]


def all_terms() -> list[Terms]:
    """Every prompt's digits, in order."""
    return list(itertools.product(DIGITS, repeat=TERMS))


def split_terms() -> tuple[list[Terms], list[Terms]]:
    """(training, held out), the same in every run."""
    shuffled = all_terms()
    random.Random(HELD_OUT_SEED).shuffle(shuffled)
    return sorted(shuffled[HELD_OUT:]), shuffled[:HELD_OUT]


def prompt(terms: Terms) -> str:
    return "+".join(map(str, terms)) + "="


def worked_answer(terms: Terms) -> str:
    """The partial sums, then the sum."""
    sums = list(itertools.accumulate(terms))[1:]
    return ",".join(map(str, sums)) + f"#{sums[-1]}"


def guessed_answer(terms: Terms, rng: random.Random) -> str:
    """A number near the sum: right once in eleven times."""
    return f"#{sum(terms) + rng.randint(-GUESS_SPREAD, GUESS_SPREAD)}"


def quickstart_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training, held out) rows with the columns prompt and answer."""
    training, held_out = split_terms()
    return rows(training), rows(held_out)


def rows(terms: Sequence[Terms]) -> list[dict[str, str]]:
    return [{"prompt": prompt(t), "answer": str(sum(t))} for t in terms]
