"""``math``: the answer equals the gold as mathematics: numbers, expressions, equations, intervals, sets, words.

    extract.py finds the answer -> numbers decide numbers -> words decide words -> math-verify decides the rest

A gold in words ("Tuesday", "B", "no solution") is compared as words: math-verify would read it as a product of letters.
Everything else goes to math-verify 0.9, gold first (its comparison is not symmetric), without its own time-outs: they
use a signal and raise off the main thread, and the pool holds the clock anyway. The table of decisions (units, percent,
sets, …) is in docs/verifiers.md and held by tests/unit/test_verifier_tables.py. Parsed forms are never printed.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import math_verify
from pydantic import Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.extract import marked_answer
from grpo_dist.verifiers.golds import found, gold_forms
from grpo_dist.verifiers.numbers import ascii_digits, parse_number
from grpo_dist.verifiers.registry import Options, Part, register, right_or_wrong

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off, which is meant

_SEARCHED = 4000  # characters at the end of a text without a marked answer
_LONGEST = 2000  # characters of an answer; a longer one is no answer
_DEEPEST = 40  # brackets inside each other; the parser's time explodes with them
_CHECKED_GOLDS = 2000  # golds parsed while data are loaded; later ones are parsed when they are used

_DELIMITERS = re.compile(r"^(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])$", re.DOTALL)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textit|textrm)\s*\{([^{}]*)\}")
_GROUP_MARK = re.compile(r"(?<=\d)\\[,;:! ](?=\d{3}(?!\d))")
_WORDS = re.compile(r"[^\W\d_]+(?:[ '\-][^\W\d_]+)*")
_LATEX = (
    math_verify.LatexExtractionConfig(boxed_match_priority=0),
    math_verify.ExprExtractionConfig(),
)


class MathOptions(Options):
    fallback: Literal["search", "none"] = Field(
        "search", description="For a text without a marked answer: what math-verify finds at its end, or nothing."
    )
    digits: int = Field(
        6, ge=0, le=15, description="Decimals that must agree when a decimal stands for an exact value."
    )
    require_stop: bool = Field(False, description="A completion that was cut off at its length limit is wrong.")


def bare(text: str) -> str:
    """An answer without what surrounds it in a text: dollar signs, bold marks, the full stop."""
    text = text.strip()
    while True:
        shorter = text.strip().removesuffix(".").strip().strip("*").strip()
        if inner := _DELIMITERS.match(shorter):
            shorter = inner.group(1)
        if shorter == text:
            return text
        text = shorter


def in_words(text: str) -> str | None:
    """The words of an answer that is nothing but words, for comparison; None for anything else."""
    plain = bare(_TEXT_COMMAND.sub(r" \1 ", text)).strip("()[]{}\"'`: ")
    plain = " ".join(plain.split())
    return plain.casefold() if _WORDS.fullmatch(plain) else None


def parsed(text: str, config: Any = _LATEX) -> list[Any]:
    return math_verify.parse(text, config, fallback_mode="no_fallback", parsing_timeout=None)


def is_word(text: str) -> bool:
    """Whether letters are a word; one or two may be variables, whose product has no order."""
    return len(text) > 2 or text == "no"


def readable(text: str) -> str:
    """The text without what math-verify 0.9 does not read: 12\\,000, other scripts' digits, another empty set."""
    return ascii_digits(_GROUP_MARK.sub("", text)).replace(r"\varnothing", r"\emptyset")


@lru_cache(maxsize=4096)
def parsed_answer(text: str) -> tuple[Any, ...]:
    """The mathematics of one answer; empty when it is none."""
    plain = readable(bare(text))
    balanced = plain.count("{") - plain.count(r"\{") == plain.count("}") - plain.count(r"\}")
    return tuple(parsed(f"\\boxed{{{plain}}}" if balanced else f"${plain}$"))


def gold_text(answer: Any) -> str | None:
    """The gold as the text to compare with; a marked gold is unwrapped by the rule for completions."""
    if isinstance(answer, bool):
        return None
    for form in gold_forms(answer)[:1]:
        return marked_answer(form).text or form
    return None


_checked: set[str] = set()


def math_gold(answer: Any, options: MathOptions) -> str | None:
    text = gold_text(answer)
    if text is None:
        return f"a mathematical answer, not {found(answer)}"
    if parse_number(text) is not None or in_words(text) is not None or text in _checked:
        return None
    if len(_checked) < _CHECKED_GOLDS:
        if not parsed_answer(text):
            return f"an answer that math-verify can read, not {found(answer)}"
        _checked.add(text)
    return None


_FIRST = (
    (r"\frac{1}{2}x^2+1", r"1+\frac{x^2}{2}"), (r"2\sqrt{3}", r"\sqrt{12}"), ("(1,2]", "(1,2]"),
    (r"\{1,2\}", r"\{2,1\}"), ("(1,2,3)", "(1,2,3)"), ("x<5", r"(-\infty,5)"), ("y=2x", "y=x+x"),
)  # fmt: skip


def warm() -> None:
    """The parser and sympy fill their tables at first use, which takes as long as a hundred answers."""
    for gold, said in _FIRST:
        _verified(gold, parsed_answer(said), 6)


@register("math", MathOptions, gold=math_gold, warm=warm)
def math(item: VerifyItem, options: MathOptions) -> Part:
    gold = gold_text(item.answer)
    if gold is None:
        raise ValueError(f"the gold had to be a mathematical answer, not {found(item.answer)}")
    if options.require_stop and item.finish_reason != "stop":
        return right_or_wrong(False)
    marked = marked_answer(item.completion)
    if marked.text is not None:
        return right_or_wrong(_is_readable(marked.text) and equal(gold, marked.text, options.digits))
    if marked.opened or options.fallback == "none":
        return right_or_wrong(False)
    return right_or_wrong(_equal_to_what_is_found(gold, item.completion.rstrip()[-_SEARCHED:], options.digits))


def _is_readable(text: str) -> bool:
    depth = deepest = 0
    for character in text if len(text) <= _LONGEST else "":
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(text) <= _LONGEST and deepest <= _DEEPEST


def equal(gold: str, said: str, digits: int) -> bool:
    """Whether an answer is the gold. Raises ValueError when the gold is not an answer."""
    gold_number, said_number = parse_number(gold), parse_number(said)
    both_name_it = "=" in gold and "=" in said  # x = 7 is not y = 7
    if gold_number is not None and said_number is not None and not both_name_it:
        percent = ("%" in gold) != ("%" in said)  # 35% is 35, and it is 0.35
        scales = (Fraction(1), Fraction(100), Fraction(1, 100)) if percent else (Fraction(1),)
        return any(close(gold_number * scale, said_number, digits) for scale in scales)
    gold_words, said_words = in_words(gold), in_words(said)
    if gold_words is not None and (gold_words == said_words or is_word(gold_words)):
        return gold_words == said_words
    return _verified(gold, parsed_answer(said), digits)


def close(gold: Fraction, said: Fraction, digits: int) -> bool:
    """Equal, or a decimal that stands for the gold to ``digits`` decimals (and never 0 for something small)."""
    difference = abs(gold - said)
    return difference == 0 or (difference <= Fraction(1, 2 * 10**digits) and difference <= abs(gold) / 10**4)


def _equal_to_what_is_found(gold: str, text: str, digits: int) -> bool:
    if (words := in_words(gold)) is not None and is_word(words):
        last = re.split(r"(?:answer|result|solution)\s*(?:is|:|=)\s*", text.strip(), flags=re.IGNORECASE)[-1]
        return in_words(last) == words
    return _verified(gold, tuple(parsed(readable(text))), digits)


def _verified(gold: str, said: tuple[Any, ...], digits: int) -> bool:
    wanted = parsed_answer(gold)
    if not wanted:
        raise ValueError(f"math-verify cannot read the gold {found(gold)}")
    if not said:
        return False
    return bool(
        math_verify.verify(list(wanted), list(said), float_rounding=digits, timeout_seconds=None, raise_on_error=True)
    )
