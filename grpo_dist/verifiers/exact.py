"""``exact``: the completion, or what follows a marker in it, is the gold answer character by character."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import text_after
from grpo_dist.verifiers.golds import found as shown
from grpo_dist.verifiers.golds import gold_forms
from grpo_dist.verifiers.registry import Options, Part, register, right_or_wrong


class ExactOptions(Options):
    after: str | None = Field(
        None, min_length=1, description="Compare what follows the last one of these; without it: wrong."
    )
    pattern: str | None = Field(None, description="Compare the first group of the last match of this; no match: wrong.")
    require_stop: bool = Field(False, description="A completion that was cut off at its length limit is wrong.")
    strip: bool = Field(True, description="White space at both ends does not count.")
    ignore_case: bool = Field(False, description="Upper and lower case are the same.")

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str | None) -> str | None:
        try:
            if pattern is not None and re.compile(pattern).groups < 1:
                raise ValueError("the pattern needs a group, (…), around what is compared")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


def exact_gold(answer: Any, options: ExactOptions) -> str | None:
    return None if gold_forms(answer) else f"a text or a number, not {shown(answer)}"


@register("exact", ExactOptions, gold=exact_gold)
def exact(item: VerifyItem, options: ExactOptions) -> Part:
    if problem := exact_gold(item.answer, options):
        raise ValueError(f"the gold answer had to be {problem}")
    if options.require_stop and item.finish_reason != "stop":
        return right_or_wrong(False)
    said = item.completion if options.after is None else text_after(item.completion, options.after)
    if said is not None and options.pattern is not None:
        said = _last_group(options.pattern, said)
    if said is None:
        return right_or_wrong(False)
    return right_or_wrong(any(_normal(said, options) == _normal(form, options) for form in gold_forms(item.answer)))


def _last_group(pattern: str, text: str) -> str | None:
    found = [match.group(1) for match in re.finditer(pattern, text, re.DOTALL)]
    return found[-1] if found else None


def _normal(text: str, options: ExactOptions) -> str:
    text = text.strip() if options.strip else text
    return text.casefold() if options.ignore_case else text
