"""Verifiers that the user brings: ``python:MODULE:FUNCTION`` and ``command:PROGRAM ARGUMENTS``.

``python:`` calls ``FUNCTION(item, **options)`` in the child process; ``command:`` starts the program once per
completion, writes the item as one JSON object to its standard input and reads one JSON value from its standard output.
Either answers null (not applicable), true or false (right or wrong), a number (a reward between ``low`` and ``high``),
or an object {"value": number, "correct": true | false | null}. What is raised, or a program that fails, is an error and
no reward.
"""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import subprocess
from dataclasses import asdict
from typing import Any

from pydantic import ConfigDict, Field

from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.registry import Part, RangedOptions, Verifier, right_or_wrong

_MOST_OUTPUT = 1 << 20


class UserOptions(RangedOptions):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    needs_answer: bool = Field(False, description="Rows without an answer are refused when data are loaded.")


class PythonOptions(UserOptions):
    # What is not listed here is passed to the function as a keyword argument.
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


def user_gold(answer: Any, options: UserOptions) -> str | None:
    return "an answer" if options.needs_answer and answer is None else None


def resolve(name: str) -> Verifier:
    """Raises ValueError when nothing of that name can be called."""
    kind, _, rest = name.partition(":")
    if kind == "python":
        module, _, function = rest.partition(":")
        if not module or not function:
            raise ValueError(f"wanted python:MODULE:FUNCTION, found {name!r}")

        def judge(item: VerifyItem, options: PythonOptions) -> Part | None:
            return part_of(_function(module, function)(item, **(options.model_extra or {})))

        def prepare(options: PythonOptions) -> PythonOptions:
            _function(module, function)
            return options

        return Verifier(name, judge, PythonOptions, 0.0, 1.0, user_gold, prepare)
    command = shlex.split(rest)
    if not command:
        raise ValueError(f"wanted command:PROGRAM ARGUMENTS, found {name!r}")

    def run(item: VerifyItem, options: UserOptions) -> Part | None:
        return _run(command, item)

    def find(options: UserOptions) -> UserOptions:
        if shutil.which(command[0]) is None:
            raise ValueError(f"there is no program {command[0]!r}")
        return options

    return Verifier(name, run, UserOptions, 0.0, 1.0, user_gold, find)


def part_of(answer: Any) -> Part | None:
    """Raises TypeError for an answer of another shape than this file's first lines say."""
    if answer is None or isinstance(answer, Part):
        return answer
    if isinstance(answer, bool):
        return right_or_wrong(answer)
    if isinstance(answer, (int, float)):
        return Part(float(answer))
    if isinstance(answer, dict) and set(answer) <= {"value", "correct"} and "value" in answer:
        value, correct = answer["value"], answer.get("correct")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (correct is None or isinstance(correct, bool)):
            return Part(float(value), correct)
    if hasattr(answer, "item") and getattr(answer, "ndim", None) == 0:  # a numpy or torch scalar
        return part_of(answer.item())
    raise TypeError(f"wanted null, true, false, a number or {{value, correct}}, found {found(answer)}")


def _function(module: str, name: str) -> Any:
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"python:{module}:{name} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"python:{module}:{name} is not a function but {found(function)}")
    return function


def _run(command: list[str], item: VerifyItem) -> Part | None:
    # No time limit here: the pool kills the whole process group, this program included.
    done = subprocess.run(command, input=json.dumps(asdict(item)).encode(), capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-200:]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {said or 'nothing on stderr'}")
    if len(done.stdout) > _MOST_OUTPUT:
        raise RuntimeError(f"{command[0]} wrote {len(done.stdout)} bytes, more than {_MOST_OUTPUT}")
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise RuntimeError(f"{command[0]} wrote no JSON value: {found(done.stdout[:200])}") from error
    return part_of(answer)
