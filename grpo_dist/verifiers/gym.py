"""``reasoning_gym``: the scorer that belongs to a procedural task, for rows of a ``reasoning_gym:`` source.

The row carries which task, parameters and index it came from; the task is built again here and its entry scored, so
nothing of the entry has to survive JSON. The answer is found by extract.py, else it is the last line of the text.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from pydantic import Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import marked_answer
from grpo_dist.verifiers.numbers import last_number
from grpo_dist.verifiers.registry import Options, Part, register

KEY = "reasoning_gym"  # of Prompt.extra


class GymOptions(Options):
    right: float = Field(
        0.99, gt=0, le=1, description="A score from here on counts as correct (some tasks give partial ones)."
    )
    partial: bool = Field(True, description="The part is the task's own score; false: 1 when correct, else 0.")
    last_number: bool = Field(
        False, description="For a text without a marked answer: its last number, not its last line."
    )


@lru_cache(maxsize=64)
def task(name: str, parameters: str, size: int, seed: int) -> Any:
    """The data set of a task. Raises ValueError for an unknown task or wrong parameters."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(parameters))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym:{name}: {error or 'wrong parameters'}") from error


def gym_gold(answer: Any, options: GymOptions) -> None:
    """Any will do: the task's own scorer knows what is right, and some tasks have many answers and give none."""


@register("reasoning_gym", GymOptions, gold=gym_gold)
def reasoning_gym(item: VerifyItem, options: GymOptions) -> Part | None:
    origin = item.extra.get(KEY)
    if origin is None:
        return None
    rows = task(origin["task"], origin["parameters"], origin["size"], origin["seed"])
    said = said_answer(item.completion, options)
    score = 0.0 if said is None else float(rows.score_answer(answer=said, entry=rows[origin["index"]]))
    correct = score >= options.right
    return Part(score if options.partial else float(correct), correct)


def said_answer(completion: str, options: GymOptions) -> str | None:
    marked = marked_answer(completion)
    if marked.text is not None or marked.opened:
        return marked.text
    if options.last_number:
        number = last_number(completion)
        return None if number is None else str(number)
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else None
