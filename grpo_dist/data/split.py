"""Which rows are held out for evaluation: chosen by content, so that no training row repeats an evaluation prompt.

The choice depends on the prompts alone, not on the seed, the order or other rows: the same prompts are held out in
every run, and a data set that grows keeps most of its evaluation set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


def content_key(text: str) -> bytes:
    """Same prompt, same key; white space around and between words does not make another prompt."""
    return hashlib.sha256(" ".join(text.split()).encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Split:
    train: list[int]  # row indices, in file order
    evaluation: list[int]
    excluded: int  # rows that are in neither: they repeat an evaluation prompt


def hold_out(keys: Sequence[bytes], size: int) -> Split:
    """``size`` rows (fewer when there are fewer contents) for evaluation, everything of other content for training."""
    if size == 0:
        return Split(list(range(len(keys))), [], 0)
    rank = {key: hashlib.sha256(b"evaluation" + key).digest() for key in set(keys)}
    evaluation = sorted(range(len(keys)), key=lambda row: (rank[keys[row]], row))[:size]
    taken = {keys[row] for row in evaluation}
    train = [row for row in range(len(keys)) if keys[row] not in taken]
    return Split(train, evaluation, len(keys) - len(train) - len(evaluation))
