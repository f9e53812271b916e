"""A number as people and models write it -> an exact Fraction, or None when the text is not one number.

Read: signs (also the Unicode minus), thousands marks (1,250 · 9{,}500 · 12\\,000 · 12 000 with a thin space), decimals,
fractions (3/4 · \\frac{3}{4}), mixed numbers (2 1/2 · 2\\frac12), powers of ten (1.5e3 · 1.5 \\times 10^{3}), currency
and percent signs and units around the number (dropped: "5 cm" is 5, "35%" is 35), "x = 7", bold and TeX wrappers.
Two numbers in one answer are no number: that would pay for listing guesses.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_MOST_DIGITS = 1000
_MOST_EXPONENT = 400
_SEARCHED = 10_000

# A sign belongs to its number unless something that it could be subtracted from stands before it.
_SIGN = r"(?P<sign>(?<![\w)}\].])[+-]|(?:^|(?<==)|(?<==\s)|(?<=\())[+-]\s)?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_FRAC = r"\\[dtc]?frac\s*"


def _frac(top: str, bottom: str, number: str) -> str:
    """Pattern of \\frac{top}{bottom} or \\frac12, with two names for each part."""
    braces = rf"\{{\s*(?P<{top}>{number})\s*\}}\s*\{{\s*(?P<{bottom}>{number})\s*\}}"
    return rf"{_FRAC}(?:{braces}|(?P<{top}1>\d)\s*(?P<{bottom}1>\d))"


_NUMBER = re.compile(
    rf"""{_SIGN}(?:
        {_frac("top", "bottom", r"[+-]?[ ]*[0-9]+(?:[.][0-9]+)?")}
      | (?P<whole>\d+)\s*(?:{_frac("mtop", "mbottom", "[0-9]+")}|(?<=\d)\s(?P<stop>\d+)\s?/\s?(?P<sbottom>\d+))
      | (?P<digits>{_DIGITS})
        (?:\s?/\s?(?P<under>\d+(?:\.\d+)?)
          |[eE](?P<e>[+-]?\d+)(?![\w])
          |\s?(?:\\times|\\cdot|[*x×·])\s?10\s?(?:\^|\*\*)\s?(?:\{{\s*(?P<p>[+-]?\d+)\s*\}}|(?P<p1>[+-]?\d+)))?
    )""",
    re.VERBOSE,
)
# With "#" where the number was: what makes an expression of it, as opposed to a unit ("# m/s", "# cm").
_ARITHMETIC = re.compile(
    r"[\^!√π<>≤≥≠∞|]|\\(?!quad|qquad|approx)[A-Za-z]|[±∓]|[+*]\s*[#A-Za-z(\\]|/\s*[#(]|#\s*/(?!\s?[A-Za-z])|#\s?[xyz]\b|[A-Za-z)]\s?-\s?#"
)
_SEVERAL = re.compile(r"[,;]|\b(?:or|and)\b")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # one character that is a fraction
_TEN_TO = re.compile(r"10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_UNIT_POWER = re.compile(
    r"(?:(?<=[A-Za-z])|(?<=[A-Za-z]\}))\s?(?:\^\s?(?:\{\s*-?\d\s*\}|-?\d)|[²³])|[²³]"
)  # cm^2: the 2 is not an answer
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°")
_MINUS = re.compile("[\u2212\u2012\u2013\ufe63\uff0d]")
_TEX_GROUP_MARK = re.compile(r"(?<=\d)(?:\{,\}|\\[,!;: ]|[\u00a0\u2009\u202f' _](?=\d{3}(?:\D|$)))(?=\d{3})")
_WRAPPER = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|mathit|mbox|displaystyle|left|right)\b|\*\*|[$€£¥`]|\\[$%!]|\\[,;: ]"
)


def clean(text: str) -> str:
    """The text with the writing around numbers made plain: one minus sign, no thousands marks, no wrappers."""
    text = _VULGAR.sub(lambda one: f" {unicodedata.normalize('NFKC', one.group())} ".replace("\u2044", "/"), text)
    text = _TEN_TO.sub(lambda power: "10^{" + power.group(1).translate(_SUPERSCRIPTS) + "}", text)
    text = _DEGREES.sub(" ", ascii_digits(_MINUS.sub("-", text)))
    text = _TEX_GROUP_MARK.sub("", text)
    return _UNIT_POWER.sub("", _WRAPPER.sub(" ", text))


def ascii_digits(text: str) -> str:
    """The digits of every script as 0-9; superscripts stay."""
    return text if text.isascii() else "".join(_ascii_digit(character) for character in text)


def _ascii_digit(character: str) -> str:
    return character if character.isascii() or not character.isdecimal() else str(unicodedata.decimal(character))


def parse_number(text: str) -> Fraction | None:
    """The one number that a text says; None when it says none, several, or one beyond 1,000 digits."""
    if len(text) < 100 and text.isascii() and text.isdigit():
        return Fraction(int(text))
    before, _, text = clean(text).rpartition("=")  # "x = 7", "2 + 5 = 7": what is claimed stands last
    text = text.strip()
    if _SEVERAL.search(before):  # "x = 3 or x = -3"
        return None
    found = _matches(text)
    if len(found) != 1 or _ARITHMETIC.search(text.replace(found[0].group(), "#", 1)):
        return None
    return _value(found[0])


def last_number(text: str) -> Fraction | None:
    """The last number in the last 10,000 characters of a text."""
    found = _matches(clean(text.rstrip()[-_SEARCHED:]))
    return _value(found[-1]) if found else None


def _matches(text: str) -> list[re.Match[str]]:
    """Numbers that stand by themselves: the 2 of "x2" or of "v1.2.3" is part of a name."""
    return [
        match
        for match in _NUMBER.finditer(text)
        if not (match.start() > 0 and (text[match.start() - 1].isalpha() or text[match.start() - 1] == "_"))
    ]


def _value(match: re.Match[str]) -> Fraction | None:
    parts = {
        name: text.replace(",", "").replace(" ", "") for name, text in match.groupdict().items() if text is not None
    }
    if sum(map(len, parts.values())) > _MOST_DIGITS:
        return None
    sign = -1 if parts.get("sign", "").startswith("-") else 1
    exponent = int(parts.get("e") or parts.get("p") or parts.get("p1") or 0)
    if abs(exponent) > _MOST_EXPONENT:
        return None
    if "whole" in parts:
        top, bottom = (
            parts.get("mtop") or parts.get("mtop1") or parts["stop"],
            (parts.get("mbottom") or parts.get("mbottom1") or parts["sbottom"]),
        )
        value = _divide(top, bottom)
        return None if value is None else sign * (int(parts["whole"]) + value)
    top = parts.get("digits") or parts.get("top") or parts.get("top1")
    assert top is not None
    value = _divide(top, parts.get("under") or parts.get("bottom") or parts.get("bottom1") or "1")
    return None if value is None else sign * value * Fraction(10) ** exponent


def _divide(top: str, bottom: str) -> Fraction | None:
    under = Fraction(bottom)
    return Fraction(top) / under if under else None
