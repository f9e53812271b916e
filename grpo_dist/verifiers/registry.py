"""The registry of verifiers, and the Judge that combines several of them into one verdict.

    recipe (verifiers.use)  ->  build  ->  Judge.judge(VerifyItem)  ->  Verdict

A verifier is a pure function ``(item, options) -> Part | None``: a value inside its declared range and, when it can
tell, whether the answer is correct. None means "not applicable to this row". It never decides what its own failure is
worth: whatever it raises becomes a verdict without a reward, which masks the sample. Time and memory limits are not
here but around the child process that runs the Judge (child.py, pool.py).
"""

from __future__ import annotations

import difflib
import importlib
import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grpo_dist.config import VerifierUse
from grpo_dist.errors import RecipeError
from grpo_dist.types import Verdict, VerifyItem


class Options(BaseModel):
    """Base of every verifier's options: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RangedOptions(Options):
    """Of a verifier whose range the recipe declares."""

    low: float = Field(0.0, description="Smallest value the part may have; one below it is refused.")
    high: float = Field(1.0, description="Largest value the part may have; one above it is refused.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be less than high {self.high}")
        return self


@dataclass(frozen=True, slots=True)
class Part:
    """What one verifier says. ``correct`` is None when it does not judge the answer (format, length)."""

    value: float
    correct: bool | None = None


def right_or_wrong(correct: bool) -> Part:
    return Part(1.0 if correct else 0.0, correct)


AnyOptions = TypeVar("AnyOptions", bound=Options)
JudgeFunction = Callable[[VerifyItem, Any], Part | None]
GoldCheck = Callable[[Any, Any], str | None]


@dataclass(frozen=True, slots=True)
class Verifier:
    name: str
    judge: JudgeFunction
    options: type[Options]
    low: float
    high: float
    gold: GoldCheck | None  # (answer, options) -> what was wanted, None when the gold will do; None: judges no answer
    prepare: Callable[[Any], Options] | None  # options checked against the world; raises ValueError
    warm: Callable[[], None] | None = None  # what every first verdict would have to do, done before children are forked


VERIFIERS: dict[str, Verifier] = {}

# Where a verifier lives. Loaded on first use, so that a recipe without `math` never imports sympy.
MODULES = {
    "exact": "grpo_dist.verifiers.exact",
    "numeric": "grpo_dist.verifiers.numeric",
    "math": "grpo_dist.verifiers.math",
    "choice": "grpo_dist.verifiers.choice",
    "code": "grpo_dist.verifiers.code",
    "judge": "grpo_dist.verifiers.judge",
    "reward_model": "grpo_dist.verifiers.reward_model",
    "regex": "grpo_dist.verifiers.form",
    "format": "grpo_dist.verifiers.form",
    "length": "grpo_dist.verifiers.form",
    "json_schema": "grpo_dist.verifiers.form",
    "reasoning_gym": "grpo_dist.verifiers.gym",
}
PREFIXES = {"python": "grpo_dist.verifiers.user", "command": "grpo_dist.verifiers.user"}  # "python:MODULE:FUNCTION"


def register(
    name: str,
    options: type[AnyOptions],
    *,
    low: float = 0.0,
    high: float = 1.0,
    gold: Callable[[Any, AnyOptions], str | None] | None = None,
    prepare: Callable[[AnyOptions], AnyOptions] | None = None,
    warm: Callable[[], None] | None = None,
) -> Callable[[Callable[[VerifyItem, AnyOptions], Part | None]], Callable[[VerifyItem, AnyOptions], Part | None]]:
    """Enter a function under ``name``; a part outside ``[low, high]`` will be refused as an error."""

    def enter(
        function: Callable[[VerifyItem, AnyOptions], Part | None],
    ) -> Callable[[VerifyItem, AnyOptions], Part | None]:
        VERIFIERS[name] = Verifier(name, function, options, low, high, gold, prepare, warm)
        return function

    return enter


def names() -> tuple[str, ...]:
    """Every verifier that can be named, those not loaded yet included."""
    return (*sorted(set(MODULES) | set(VERIFIERS)), "python:MODULE:FUNCTION", "command:PROGRAM")


def find(name: str) -> Verifier:
    """Raises KeyError for an unknown name, ValueError for a known kind that cannot be had."""
    if name in VERIFIERS:
        return VERIFIERS[name]
    kind, colon, _ = name.partition(":")
    if colon and kind in PREFIXES:
        verifier: Verifier = importlib.import_module(PREFIXES[kind]).resolve(name)
        return verifier
    if name in MODULES:
        importlib.import_module(MODULES[name])
    return VERIFIERS[name]


@dataclass(frozen=True, slots=True)
class Entry:
    """One verifier of a recipe, with its options read and its place in the sum."""

    label: str
    verifier: Verifier
    options: Options
    weight: float
    requires: str | None
    audit: float | None = None


def build(uses: Sequence[VerifierUse]) -> Judge:
    """The Judge of a recipe's ``verifiers.use``. Raises RecipeError with every problem at once."""
    entries: list[Entry] = []
    problems: list[str] = []
    for place, use in enumerate(uses):
        entry, wrong = _entry(use, f"verifiers.use.{place}")
        problems += wrong
        if entry is not None:
            entries.append(entry)
    problems += _wrong_labels([use.label or use.name for use in uses], uses)
    if problems:
        raise RecipeError("\n".join(problems))
    return Judge(tuple(entries))


def _entry(use: VerifierUse, key: str) -> tuple[Entry | None, list[str]]:
    try:
        verifier = find(use.name)
    except KeyError:
        near = difflib.get_close_matches(use.name, names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return None, [f"{key}.name: no verifier is called {use.name!r} (there are: {', '.join(names())}){hint}"]
    except ValueError as error:
        return None, [f"{key}.name: {error}"]
    try:
        options = verifier.options.model_validate(use.options)
    except ValidationError as error:
        return None, [_option_problem(key, verifier, detail) for detail in error.errors()]
    if verifier.prepare is not None:
        try:
            options = verifier.prepare(options)
        except ValueError as error:
            return None, [f"{key} ({use.name}): {error}"]
    return Entry(use.label or use.name, verifier, options, use.weight, use.requires, use.audit), []


def _option_problem(key: str, verifier: Verifier, detail: Any) -> str:
    where = ".".join(str(step) for step in detail["loc"])
    known = ", ".join(verifier.options.model_fields) or "none"
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where, verifier.options.model_fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{key}.{where}: {verifier.name!r} has no such option (it has: {known}){hint}"
    return f"{key}.{where or 'options'}: {detail['msg']}, got {detail.get('input')!r}"


def _wrong_labels(labels: list[str], uses: Sequence[VerifierUse]) -> list[str]:
    problems = [
        f"verifiers.use: {label!r} is there {labels.count(label)} times; give each a label of its own"
        for label in sorted(set(labels))
        if labels.count(label) > 1
    ]
    for place, use in enumerate(uses):
        before = labels[:place]
        if use.requires is not None and use.requires != "correct" and use.requires not in before:
            problems.append(
                f"verifiers.use.{place}.requires: {use.requires!r} is not the label of a verifier before it "
                f"(before it: {', '.join(before) or 'none'})"
            )
        if use.requires == "correct" and not before:
            problems.append(f"verifiers.use.{place}.requires: nothing before it can say 'correct'")
    return problems


class Judge:
    """Several verifiers, one verdict: ``reward = sum of weight x part`` over those that apply to the row.

    A row may name one verifier: then, of those that compare with a gold answer, only that one applies; those that do
    not look at the gold (format, length) always do. A part whose ``requires`` is not met is 0.
    """

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries

    def applicable(self, chosen: str | None) -> tuple[Entry, ...]:
        """The entries for a row that chose ``chosen``. Raises KeyError if nothing of that name can judge it."""
        if chosen is None:
            return self.entries
        answering = [entry for entry in self.entries if entry.verifier.gold is not None and entry.audit is None]
        taken = [entry for entry in answering if chosen in (entry.label, entry.verifier.name)]
        if not taken:
            verifier = find(chosen)
            options = verifier.options.model_validate({})
            if verifier.prepare is not None:
                options = verifier.prepare(options)
            taken = [Entry(chosen, verifier, options, 1.0, None)]
        return (*taken, *(entry for entry in self.entries if entry not in answering))

    def warm(self) -> None:
        """Bring what the verifiers need into memory; for the process that children are forked from."""
        for entry in self.entries:
            if entry.verifier.warm is not None:
                entry.verifier.warm()

    def gold_problem(self, answer: Any, chosen: str | None = None) -> str | None:
        """What a gold answer had to be, if this one will not do for the verifiers of its row."""
        try:
            entries = self.applicable(chosen)
        except KeyError:
            return f"one of the verifiers {', '.join(names())}, not {chosen!r}"
        except ValueError as error:
            return f"a verifier that can be used without options ({chosen}: {error})"
        for entry in entries:
            if entry.verifier.gold is not None and (problem := entry.verifier.gold(answer, entry.options)) is not None:
                return f"{problem} (verifier {entry.label})"
        return None

    def judge(self, item: VerifyItem) -> Verdict:
        started = time.perf_counter()
        parts: dict[str, float] = {}
        audits: dict[str, float] = {}
        said: dict[str, bool | None] = {}
        reward = 0.0
        try:
            for entry in self.applicable(item.verifier):
                if entry.audit is not None:
                    if is_audited(item, entry.audit):
                        _audit(item, entry, audits)
                    continue
                part = _open_gate(entry, said)
                if part is None:
                    part = entry.verifier.judge(item, entry.options)
                    if part is None:
                        continue
                    _refuse_out_of_range(entry, part.value)
                said[entry.label] = part.correct
                parts[entry.label] = part.value
                reward += entry.weight * part.value
        # A verifier is anybody's code: whatever it raises is a failed verdict of this sample, never a reward of 0.
        except Exception as error:
            return Verdict(None, error=_short(error), seconds=time.perf_counter() - started)
        seconds = time.perf_counter() - started
        if not parts:
            return Verdict(None, error="no verifier applies to this row", seconds=seconds)
        opinions = [correct for correct in said.values() if correct is not None]
        return Verdict(reward, all(opinions) if opinions else None, parts | audits, seconds=seconds)


def is_audited(item: VerifyItem, share: float) -> bool:
    """The same answer for the same sample, in every process and on every replay."""
    return zlib.crc32(f"{item.id}/{item.completion}".encode(errors="replace")) < share * 2**32


def _audit(item: VerifyItem, entry: Entry, audits: dict[str, float]) -> None:
    # An audit only watches: when it fails, the sample is as good as if it had not been drawn.
    with suppress(Exception):
        if (part := entry.verifier.judge(item, entry.options)) is not None:
            _refuse_out_of_range(entry, part.value)
            audits[entry.label] = part.value


def _open_gate(entry: Entry, said: dict[str, bool | None]) -> Part | None:
    """None when the entry may judge; otherwise the part that a closed gate gives."""
    if entry.requires is None:
        return None
    if entry.requires == "correct":
        opinions = [correct for correct in said.values() if correct is not None]
        is_open = bool(opinions) and all(opinions)
    else:
        is_open = said.get(entry.requires) is True
    return None if is_open else Part(0.0)


def _refuse_out_of_range(entry: Entry, value: float) -> None:
    options = entry.options
    low, high = entry.verifier.low, entry.verifier.high
    if isinstance(options, RangedOptions):
        low, high = options.low, options.high
    if not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{entry.label} gave {value}, outside its declared range [{low}, {high}]")


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else text[:297] + "..."
