"""Scores the rollouts of a step again, from the run folder alone, and says whether they agree: ``grpo-dist replay``.

    rollouts/000012.jsonl  ->  the recipe's verifiers  ->  rewards  ->  advantages  ->  compared with what trained

Agreement is exact for rewards (to 1e-9) and to fp32 rounding for advantages. A verdict that was missing and still is
agrees; one that is missing now only is told apart, since a busy machine can cause it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_dist.algorithms.advantages import assign_advantages
from grpo_dist.algorithms.filters import shaped
from grpo_dist.config import AlgorithmSection, VerifiersSection
from grpo_dist.errors import UserError
from grpo_dist.monitor.records import RunFolder, read_jsonl
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, Verdict, VerifyItem
from grpo_dist.verifiers.pool import VerifierPool
from grpo_dist.verifiers.reward_scorer import local_rewards

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Difference:
    group_id: int
    index: int
    what: str  # "reward", "verdict" (missing on one side), "advantage"
    was: float | None
    now: float | None
    error: str | None = None

    def __str__(self) -> str:
        why = f" ({self.error})" if self.error else ""
        return f"group {self.group_id}, sample {self.index}: {self.what} was {self.was}, is {self.now}{why}"


@dataclass(frozen=True, slots=True)
class Replay:
    step: int
    samples: int
    trained: int
    unscored: int  # without a verdict both times
    differences: tuple[Difference, ...]

    @property
    def agrees(self) -> bool:
        return not self.differences

    def lines(self) -> list[str]:
        """For people."""
        kinds = {what: sum(d.what == what for d in self.differences) for what in ("reward", "verdict", "advantage")}
        said = ", ".join(f"{count} {what}s differ" for what, count in kinds.items() if count)
        head = (
            f"step {self.step}: {self.samples} samples, {self.trained} trained, {self.unscored} without a verdict: "
            + (said or "rewards and advantages agree with what was trained on")
        )
        more = [f"… and {len(self.differences) - _SHOWN} more"] if len(self.differences) > _SHOWN else []
        return [head, *map(str, self.differences[:_SHOWN]), *more]


def replay(run_dir: Path, step: int, *, workers: int = 1) -> Replay:
    """Raises UserError when the run or the rollouts of the step are not there."""
    folder = RunFolder.read(run_dir)
    file = folder.rollout_file(step)
    if not file.is_file():
        there = sorted(int(one.stem) for one in folder.rollouts.glob("*.jsonl") if one.stem.isdigit())
        steps = f"steps {there[0]} to {there[-1]} are there" if there else "none are there"
        raise UserError(f"{run_dir} has no rollouts of step {step}: {steps}")
    recipe = folder.recipe()
    rows = list(read_jsonl(file))
    verdicts = asyncio.run(_score([_item(row) for row in rows], recipe.verifiers, workers))
    return compare(step, rows, verdicts, recipe.algorithm, max_tokens=recipe.rollout.sampling.max_tokens)


async def _score(items: Sequence[VerifyItem], section: VerifiersSection, workers: int) -> list[Verdict]:
    pool = VerifierPool(section.use, timeout=section.timeout, children=workers)
    try:
        return await pool.score(await local_rewards(section.use).attach(items))
    finally:
        await pool.close()


def compare(
    step: int,
    rows: Sequence[dict[str, Any]],
    verdicts: Sequence[Verdict],
    algorithm: AlgorithmSection,
    *,
    max_tokens: int,
) -> Replay:
    """What is different between recorded rows and new verdicts on them. ``max_tokens``: the longest completion."""
    differences: list[Difference] = []
    for row, verdict in zip(rows, verdicts, strict=True):
        was, now = row["reward"], verdict.reward
        if (was is None) != (now is None):
            differences.append(
                Difference(row["group_id"], row["index"], "verdict", was, now, verdict.error or row["error"])
            )
        elif was is not None and now is not None and abs(was - now) > 1e-9:
            differences.append(Difference(row["group_id"], row["index"], "reward", was, now))
    groups = shaped(list(_groups(rows, verdicts)), algorithm.filters, max_tokens)
    samples = {(s.group_id, s.index): s for s in assign_advantages(groups, algorithm)} if groups else {}
    for row in rows:
        sample = samples.get((row["group_id"], row["index"]))
        if not row["trained"] or sample is None:
            continue
        values = sample.advantages[sample.loss_mask]
        now = float(values[0]) if len(values) else None
        if now is None or row["advantage"] is None or abs(now - row["advantage"]) > 1e-5 * max(1.0, abs(now)):
            differences.append(Difference(row["group_id"], row["index"], "advantage", row["advantage"], now))
    return Replay(
        step=step,
        samples=len(rows),
        trained=sum(bool(row["trained"]) for row in rows),
        unscored=sum(row["reward"] is None and v.reward is None for row, v in zip(rows, verdicts, strict=True)),
        differences=tuple(differences),
    )


def _groups(rows: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]) -> Iterator[ScoredGroup]:
    """The groups that were trained on. Their tokens are not known and not needed: only how many there were."""
    pairs = zip(rows, verdicts, strict=True)
    for group_id, members in groupby(pairs, key=lambda pair: pair[0]["group_id"]):
        group = list(members)
        if group[0][0].get("dropped") is not None:
            continue
        prompt = Prompt(group[0][0]["prompt_id"], (), group[0][0]["prompt"], group[0][0]["answer"])
        completions = tuple(
            Completion((0,) * row["completion_tokens"], (0.0,) * row["completion_tokens"], "", row["finish_reason"], ())
            for row, _ in group
        )
        rollout = RolloutGroup(GroupRequest(group_id, 0, prompt, 0), completions, 0.0, "")
        yield ScoredGroup(rollout, tuple(verdict for _, verdict in group))


def _item(row: dict[str, Any]) -> VerifyItem:
    return VerifyItem(
        id=f"{row['prompt_id']}/{row['index']}",
        prompt=row["prompt"],
        completion=row["completion"],
        finish_reason=row["finish_reason"],
        answer=row["answer"],
        tokens=row["completion_tokens"],
        verifier=row["verifier"],
        extra=row["extra"],
    )
