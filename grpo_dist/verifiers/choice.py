"""``choice``: one letter of a multiple-choice question.

Accepted where the answer stands (extract.py, else the last "answer is B" / "answer: (B)", else a short text that is
nothing but the letter): ``B``, ``(B)``, ``[B]``, ``B.``, ``B) Paris``, ``\\text{B}``, ``**B**``, ``option B``.
Two letters are no choice.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import marked_answer
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Options, Part, register, right_or_wrong

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_ALONE = re.compile(
    r"(?:the\s+)?(?:(?:correct\s+)?(?:answer|option|choice)\s*(?:is)?\s*:?\s*)?"
    r"[(\[{]?\s*([A-Za-z])\s*(?:[)\]}](?:\s*[.,:]?\s.*)?|[.,:](?:\s.*)?)?",
    re.IGNORECASE | re.DOTALL,
)
_STATED = re.compile(
    r"(?:answer|option|choice)\s*(?:is|was|must be|should be|:|=)?\s*:?\s*(?:option|choice)?\s*\**\s*"
    r"[(\[{]?\s*([A-Z])\s*[)\]}]?(?![A-Za-z'])",
)
_SECOND = re.compile(r"\W*(?:and|or|&|,|/)\W*[A-Za-z](?![\w'])|\s+[A-Z](?![\w'])")
_CASELESS_WORD = re.compile(r"(?:answer|option|choice)", re.IGNORECASE)


class ChoiceOptions(Options):
    choices: str = Field("ABCDEFGHIJ", min_length=2, pattern=r"^[A-Z]+$", description="The letters that can be chosen.")
    require_stop: bool = Field(False, description="A completion that was cut off at its length limit is wrong.")


def letter(text: str, choices: str) -> str | None:
    """The one letter that an answer names; None when it names none or more than one."""
    plain = _TEXT.sub(r"\1", text).replace("*", "").replace("$", "").strip()
    match = _ALONE.fullmatch(plain)
    if match is None:
        return None
    chosen, after = match.group(1).upper(), plain[match.end(1) :]
    # "A, B": a second lone letter is a second choice; the words of "A. Paris" and of "A. A cat" are not.
    others = re.findall(r"(?<![\w'])[A-Z](?![\w'])", after)
    second = _SECOND.match(after) is not None or any(other in choices and other not in "AI" for other in others)
    return chosen if chosen in choices and not second else None


def said_letter(completion: str, choices: str) -> str | None:
    marked = marked_answer(completion)
    if marked.text is not None:
        return letter(marked.text, choices)
    if marked.opened:
        return None
    # The word in any case, the letter only as a capital: "the answer is a matter of …" chooses nothing.
    stated = _STATED.findall(_CASELESS_WORD.sub(lambda word: word.group().lower(), completion))
    if stated:
        return stated[-1] if stated[-1] in choices else None
    return letter(completion, choices) if len(completion) < 100 else None


def choice_gold(answer: Any, options: ChoiceOptions) -> str | None:
    if isinstance(answer, str) and letter(answer, options.choices) is not None:
        return None
    return f"one of the letters {options.choices}, not {found(answer)}"


@register("choice", ChoiceOptions, gold=choice_gold)
def choice(item: VerifyItem, options: ChoiceOptions) -> Part:
    gold = letter(item.answer, options.choices) if isinstance(item.answer, str) else None
    if gold is None:
        raise ValueError(f"the gold had to be one of the letters {options.choices}, not {found(item.answer)}")
    if options.require_stop and item.finish_reason != "stop":
        return right_or_wrong(False)
    return right_or_wrong(said_letter(item.completion, options.choices) == gold)
