"""``numeric``: the answer is a number, equal to the gold however either is written.

The answer is found by extract.py; a text without any mark is judged by its last number (``fallback: none`` turns that
off). Comparison is exact, in fractions, unless a tolerance is given.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import marked_answer, text_after
from grpo_dist.verifiers.golds import found, gold_forms
from grpo_dist.verifiers.numbers import last_number, parse_number
from grpo_dist.verifiers.registry import Options, Part, register, right_or_wrong


class NumericOptions(Options):
    after: str | None = Field(None, min_length=1, description="Only what follows the last one of these is searched.")
    fallback: Literal["last_number", "none"] = Field("last_number", description="For a text without a marked answer.")
    tolerance: float = Field(0.0, ge=0, description="Absolute difference that still counts as equal.")
    relative_tolerance: float = Field(0.0, ge=0, lt=1, description="Difference as a share of the gold.")
    require_stop: bool = Field(False, description="A completion that was cut off at its length limit is wrong.")


def gold_number(answer: Any) -> Fraction | None:
    """The gold as a number; a marked gold (\\boxed{5}, '… #### 5') is unwrapped by the same rule as a completion."""
    if isinstance(answer, bool):
        return None
    if isinstance(answer, int):
        return Fraction(answer)
    for form in gold_forms(answer):
        marked = marked_answer(form)
        number = parse_number(marked.text if marked.text is not None else form)
        if number is not None:
            return number
    return None


def numeric_gold(answer: Any, options: NumericOptions) -> str | None:
    return f"a number, not {found(answer)}" if gold_number(answer) is None else None


@register("numeric", NumericOptions, gold=numeric_gold)
def numeric(item: VerifyItem, options: NumericOptions) -> Part:
    gold = gold_number(item.answer)
    if gold is None:
        raise ValueError(f"the gold answer had to be a number, not {found(item.answer)}")
    if options.require_stop and item.finish_reason != "stop":
        return right_or_wrong(False)
    said = said_number(item.completion, options)
    if said is None:
        return right_or_wrong(False)
    allowed = max(Fraction(options.tolerance), Fraction(options.relative_tolerance) * abs(gold))
    return right_or_wrong(abs(said - gold) <= allowed)


def said_number(completion: str, options: NumericOptions) -> Fraction | None:
    text = completion if options.after is None else text_after(completion, options.after)
    if text is None:
        return None
    marked = marked_answer(text)
    if marked.text is not None:
        return parse_number(marked.text)
    if marked.opened or options.fallback == "none":
        return None
    return last_number(text)
