"""``exact``: the completion, or what follows a marker in it, is the gold answer character by character."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import text_after
from grpo_dist.verifiers.golds import found, gold_forms
from grpo_dist.verifiers.registry import Options, Part, register, right_or_wrong


class ExactOptions(Options):
    after: str | None = Field(
        None, min_length=1, description="Compare what follows the last one of these; without it: wrong."
    )
    require_stop: bool = Field(False, description="A completion that was cut off at its length limit is wrong.")
    strip: bool = Field(True, description="White space at both ends does not count.")
    ignore_case: bool = Field(False, description="Upper and lower case are the same.")


def exact_gold(answer: Any, options: ExactOptions) -> str | None:
    return None if gold_forms(answer) else f"a text or a number, not {found(answer)}"


@register("exact", ExactOptions, gold=exact_gold)
def exact(item: VerifyItem, options: ExactOptions) -> Part:
    if problem := exact_gold(item.answer, options):
        raise ValueError(f"the gold answer had to be {problem}")
    if options.require_stop and item.finish_reason != "stop":
        return right_or_wrong(False)
    said = item.completion if options.after is None else text_after(item.completion, options.after)
    if said is None:
        return right_or_wrong(False)
    return right_or_wrong(any(_normal(said, options) == _normal(form, options) for form in gold_forms(item.answer)))


def _normal(text: str, options: ExactOptions) -> str:
    text = text.strip() if options.strip else text
    return text.casefold() if options.ignore_case else text
