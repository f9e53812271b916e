"""Scores a file of completions with the same pool, children and rules that training uses: ``grpo-dist score``.

    JSONL rows {completion, answer, prompt?, verifier?, …}  ->  checked  ->  pool  ->  one verdict per row, in row order

Rows are read twice, once to list every bad one and once to score, so a file of any length takes little memory.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from grpo_dist.config import VerifierUse
from grpo_dist.errors import DataError, RecipeError
from grpo_dist.metrics import percentile
from grpo_dist.types import Verdict, VerifyItem
from grpo_dist.verifiers.golds import found
from grpo_dist.verifiers.pool import VerifierPool
from grpo_dist.verifiers.registry import build
from grpo_dist.verifiers.reward_scorer import Rewards, local_rewards

_BATCH = 16  # rows of one call
_OPEN = 4  # calls in work per worker
_WAITING = 1000  # calls, finished ones included, whose verdicts wait for one before them
_KNOWN = {"completion", "answer", "prompt", "verifier", "finish_reason", "tokens", "id", "extra"}


@dataclass(slots=True)
class Summary:
    rows: int = 0
    correct: int = 0
    errors: int = 0
    timeouts: int = 0
    first_error: str | None = None
    seconds: array[float] = field(default_factory=lambda: array("d"))  # of each verdict
    slowest: list[tuple[float, str]] = field(default_factory=list)  # (seconds, row id), slowest first

    def lines(self) -> list[str]:
        """For people."""
        first = f"; the first: {self.first_error}" if self.first_error else ""
        said = [f"{self.rows} rows, {self.correct} correct, {self.errors} without a verdict{first}"]
        if self.rows:
            p50, p99 = percentile(self.seconds, 0.5), percentile(self.seconds, 0.99)
            rows = ", ".join(f"{name} ({seconds:.2g} s)" for seconds, name in self.slowest[:3])
            said.append(f"one verdict took p50 {p50:.2g} s, p99 {p99:.2g} s; the slowest rows: {rows}")
        return said


def score_file(
    path: Path,
    out: TextIO,
    *,
    verifier: str | None = None,
    uses: Sequence[VerifierUse] = (),
    workers: int = 1,
    timeout: float = 10.0,
) -> Summary:
    """Write one JSON verdict {reward, correct, parts, error, seconds} per row to ``out``.

    Args:
        verifier: judges the rows that name none.
        uses: a recipe's ``verifiers.use``, instead of ``verifier``; a row's own choice then picks among them.
        workers: answers judged at a time.
        timeout: seconds for one verdict.

    Raises:
        DataError: the file cannot be read, or lists its bad rows.
        RecipeError: a verifier cannot be built.
    """
    named = _check(path, verifier, bool(uses))
    chosen = tuple(uses) or tuple(VerifierUse(name=name) for name in sorted(named))
    build(chosen)
    return asyncio.run(_score(path, out, chosen, None if uses else verifier, workers, timeout))


async def _score(
    path: Path, out: TextIO, uses: Sequence[VerifierUse], default: str | None, workers: int, timeout: float
) -> Summary:
    summary = Summary()
    if not uses:  # an empty file
        return summary
    pool = VerifierPool(uses, timeout=timeout, children=workers)
    try:
        await pool.start()
        items = (_item(number, row, default) for number, row in _rows(path))
        async for verdict in verdicts(pool, items, workers, local_rewards(uses)):
            _count(summary, verdict)
            print(json.dumps(plain(verdict)), file=out)
        out.flush()
        summary.slowest = list(pool.counts.slowest)
        return summary
    finally:
        await pool.close()


async def verdicts(
    pool: VerifierPool, items: Iterator[VerifyItem], workers: int, rewards: Rewards | None = None
) -> AsyncIterator[Verdict]:
    """Verdicts in the order of the items, which are read as they are needed.

    Few items are in work at a time. Verdicts that wait for a slow one before them are bounded too, much more widely:
    they are small, and a stuck answer should not hold up those behind it.
    """
    room = asyncio.Semaphore(workers * _OPEN)
    calls: deque[asyncio.Task[list[Verdict]]] = deque()

    async def score(batch: list[VerifyItem]) -> list[Verdict]:
        try:
            return await pool.score(batch if rewards is None else await rewards.attach(batch))
        finally:
            room.release()

    try:
        while batch := list(islice(items, _BATCH)):
            await room.acquire()
            calls.append(asyncio.ensure_future(score(batch)))
            while calls and (calls[0].done() or len(calls) >= _WAITING):
                for verdict in await calls.popleft():
                    yield verdict
        while calls:
            for verdict in await calls.popleft():
                yield verdict
    finally:
        for call in calls:
            call.cancel()


def plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "reward": verdict.reward,
        "correct": verdict.correct,
        "parts": verdict.parts,
        "error": verdict.error,
        "seconds": round(verdict.seconds, 6),
    }


def _count(summary: Summary, verdict: Verdict) -> None:
    summary.rows += 1
    summary.correct += verdict.correct is True
    summary.errors += verdict.reward is None
    summary.timeouts += verdict.timed_out
    summary.seconds.append(verdict.seconds)
    if verdict.reward is None and summary.first_error is None:
        summary.first_error = verdict.error


def _item(number: int, row: dict[str, Any], default: str | None) -> VerifyItem:
    prompt = row.get("prompt", "")
    others = {key: value for key, value in row.items() if key not in _KNOWN}
    return VerifyItem(
        id=str(row.get("id", number)),
        prompt=prompt if isinstance(prompt, str) else json.dumps(prompt),
        completion=row["completion"],
        finish_reason=row.get("finish_reason", "stop"),
        answer=row.get("answer"),
        tokens=row.get("tokens", 0),
        verifier=row.get("verifier") or default,
        extra=row.get("extra") or others,
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, json.loads(line.decode("utf-8-sig"))


def _check(path: Path, verifier: str | None, has_recipe: bool) -> set[str]:
    """The verifiers that the rows will need. Raises DataError with every bad row."""
    problems: list[str] = []
    named = set() if verifier is None or has_recipe else {verifier}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    problem, choice = _look(line, verifier, has_recipe)
                    if problem is not None:
                        problems.append(f"{path.name}:{number}: {problem}")
                    elif choice is not None:
                        named.add(choice)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if problems:
        more = [f"… and {len(problems) - 50} more rows"] if len(problems) > 50 else []
        raise DataError("\n".join([*problems[:50], *more]))
    return named


def _look(line: bytes, verifier: str | None, has_recipe: bool) -> tuple[str | None, str | None]:
    """(what is wrong with a row, the verifier that it names)."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return f"wanted one JSON object per line, found {found(line[:80])} ({error})", None
    if not isinstance(row, dict):
        return f"wanted an object, found {found(row)}", None
    if not isinstance(row.get("completion"), str):
        column = (
            f"found {found(row['completion'])}" if "completion" in row else f"found only {', '.join(row) or 'nothing'}"
        )
        return f"column 'completion': wanted a text, {column}", None
    choice = row.get("verifier")
    if choice is not None and not isinstance(choice, str):
        return f"column 'verifier': wanted a name, found {found(choice)}", None
    if row.get("finish_reason", "stop") not in ("stop", "length", "abort"):
        return f"column 'finish_reason': wanted stop, length or abort, found {found(row['finish_reason'])}", None
    if not isinstance(row.get("tokens", 0), int) or not isinstance(row.get("extra") or {}, dict):
        return "columns 'tokens' and 'extra': wanted a whole number and an object", None
    if not choice and verifier is None and not has_recipe:
        return "column 'verifier': wanted the name of a verifier, found none, and no default was given", None
    try:
        if choice and not has_recipe:
            build([VerifierUse(name=choice)])
    except RecipeError as error:
        return f"column 'verifier': {error}", None
    return None, choice or None
