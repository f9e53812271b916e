"""Where the answer of a completion is: the one rule that training, evaluation and ``score`` share.

1. An answer is *marked* by ``\\boxed{…}``, ``\\fbox{…}`` or ``<answer>…</answer>``. The last complete mark counts,
   whatever was said before or after it. A mark inside another one (a box in an answer tag) is the later one.
2. Without such a mark, the last line that starts with ``####`` (GSM8K; below boxes, since it is also a heading).
3. A text in which a mark was opened but none completed has no answer: it was cut off.
4. Otherwise nothing is marked, and the verifier's own documented fallback applies.

Linear in the length of the text. Leaves out what an answer means: numbers.py and the verifiers.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOX_WITHOUT_BRACES = re.compile(r"\\(?:boxed|fbox)[ \t]+(\\?[^\s{}\\$]+)")  # "\boxed 7", which TeX takes too
_BRACE = re.compile(r"\\[{}\\]|[{}]")  # escaped braces are text, not structure
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Marked:
    """``text`` is the marked answer; None with ``opened`` True means that a mark was opened and never completed."""

    text: str | None
    opened: bool


def marked_answer(text: str) -> Marked:
    spans, opened = _spans(text)
    for start, end in sorted(spans, reverse=True):
        if content := text[start:end].strip():
            return Marked(content, True)
    lines = [line for line in _HASHES.findall(text) if line.strip()]
    if lines:
        return Marked(lines[-1].strip(), True)
    return Marked(None, opened)


def _spans(text: str) -> tuple[list[tuple[int, int]], bool]:
    """(start, end) of what stands inside each complete mark, and whether any mark was opened."""
    spans: list[tuple[int, int]] = []
    boxes = [box.end() - 1 for box in _BOX.finditer(text)]  # of the opening braces
    if boxes:
        ends = _closing_braces(text)
        spans += [(brace + 1, ends[brace]) for brace in boxes if brace in ends]
    bare = [(box.start(1), box.end(1)) for box in _BOX_WITHOUT_BRACES.finditer(text)]
    tags = [tag.end() for tag in _TAG.finditer(text)]
    closings = [tag.start() for tag in _CLOSING_TAG.finditer(text)]
    for tag in tags:
        if (place := bisect_left(closings, tag)) < len(closings):
            spans.append((tag, closings[place]))
    return spans + bare, bool(boxes or bare or tags)


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each opening brace -> position of the brace that closes it; unclosed ones are left out."""
    ends: dict[int, int] = {}
    waiting: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            waiting.append(brace.start())
        elif brace.group() == "}" and waiting:
            ends[waiting.pop()] = brace.start()
    return ends


def text_after(text: str, marker: str) -> str | None:
    """What follows the last ``marker``; None when it is not there."""
    _, found, after = text.rpartition(marker)
    return after if found else None
