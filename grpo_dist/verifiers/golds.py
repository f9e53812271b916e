"""What a gold answer may be: the forms of a JSON value that count as the same answer.

A number and its digits are one answer (3, "3"); a float with a whole value is also that whole number (3.0 is 3).
0 and false are golds like any other; null, lists and objects are not answers.
"""

from __future__ import annotations

import math
from typing import Any


def gold_forms(answer: Any) -> tuple[str, ...]:
    """The texts that stand for this gold, most usual first; empty when the value is not an answer."""
    if isinstance(answer, bool):
        return (str(answer), str(answer).lower())
    if isinstance(answer, int):
        return (str(answer),)
    if isinstance(answer, float):
        if not math.isfinite(answer):
            return ()
        return (str(int(answer)), repr(answer)) if answer.is_integer() and abs(answer) < 1e15 else (repr(answer),)
    if isinstance(answer, str) and answer.strip():
        return (answer.strip(),)
    return ()


def found(value: Any) -> str:
    """How a value is shown in a message: its JSON-like form and type, short."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
