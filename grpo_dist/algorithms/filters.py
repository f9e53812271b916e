"""Which groups and completions of a step train: truncated completions, groups without spread, refilling.

    scored groups -> truncated(mode) -> with spread / without -> Refill says how many more groups are needed

Pure: groups in, groups out. A group that is changed keeps its rollout; only verdicts differ, so metrics and dumps of
what the verifiers said are made from the groups before. Left out: asking for more groups (rollout/selection.py), rest
for prompts that teach nothing (difficulty.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_dist.config import FiltersSection
from grpo_dist.errors import GrpoDistError
from grpo_dist.metrics import has_spread
from grpo_dist.types import Completion, ScoredGroup, Verdict

TruncatedMode = Literal["keep", "mask", "penalise"]


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to limit - buffer tokens, then falling in a line to -1 at the limit (DAPO, arXiv:2503.14476, eq. 13)."""
    if not 0 < buffer <= limit:
        raise ValueError(f"the buffer must lie between 1 and the limit of {limit} tokens, got {buffer}")
    over = length - (limit - buffer)
    return -min(1.0, max(0, over) / buffer)


def truncated(
    groups: Sequence[ScoredGroup], mode: TruncatedMode, *, limit: int, buffer: int, factor: float = 1.0
) -> list[ScoredGroup]:
    """What happens to completions that ran into the token limit.

    * keep: their reward counts like any other (a verifier that wants an answer will have said 0).
    * mask: they do not train and do not count in their group (DAPO's overlong filtering).
    * penalise: to every reward comes factor x ``overlong_penalty`` of the length, which begins before the limit.
    """

    def judge(completion: Completion, verdict: Verdict) -> Verdict:
        if mode == "keep" or verdict.reward is None:
            return verdict
        if mode == "penalise":
            shaped = verdict.reward + factor * overlong_penalty(len(completion.token_ids), limit, buffer)
            return replace(verdict, reward=shaped)
        return replace(verdict, reward=None, error="truncated") if completion.finish_reason == "length" else verdict

    return [
        replace(g, verdicts=tuple(judge(c, v) for c, v in zip(g.rollout.completions, g.verdicts, strict=True)))
        for g in groups
    ]


def shaped(groups: Sequence[ScoredGroup], filters: FiltersSection, max_tokens: int) -> list[ScoredGroup]:
    """``truncated`` as a recipe says it. Left out: groups without spread."""
    buffer = filters.overlong_buffer or max(1, max_tokens // 5)
    return truncated(groups, filters.truncated, limit=max_tokens, buffer=buffer, factor=filters.overlong_factor)


def by_spread(groups: Sequence[ScoredGroup]) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """(groups that can teach, groups whose known rewards are all equal), both in order."""
    teaches = [has_spread(g.rewards) for g in groups]
    return (
        [g for g, t in zip(groups, teaches, strict=True) if t],
        [g for g, t in zip(groups, teaches, strict=True) if not t],
    )


@dataclass(frozen=True, slots=True)
class Refill:
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): more groups until ``wanted`` have a spread, within a cap."""

    wanted: int  # groups that a step should train on
    most: int  # groups that may be sampled for one step; the cap
    seen: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.wanted <= self.most:
            raise ValueError(f"refilling to {self.wanted} groups needs a cap of at least as many, got {self.most}")

    def add(self, groups: Sequence[ScoredGroup]) -> Refill:
        return replace(self, seen=self.seen + len(groups), kept=self.kept + len(by_spread(groups)[0]))

    def missing(self) -> int:
        """How many more groups to ask for; 0 when the step can begin, perhaps with fewer than wanted.

        Raises GrpoDistError when the cap is reached and no group has a spread: no number of tries would help.
        """
        if self.kept >= self.wanted:
            return 0
        if self.seen < self.most:
            return min(self.wanted - self.kept, self.most - self.seen)
        if self.kept == 0:
            raise GrpoDistError(
                f"0 of {self.seen} groups have spread: within each group all rewards are equal, so nothing can be "
                "learned. Look at the rewards in rollouts/: tasks that are far too hard or too easy, a verifier that "
                "never says yes, or completions cut off by rollout.sampling.max_tokens"
            )
        return 0
