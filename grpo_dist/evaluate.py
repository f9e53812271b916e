"""pass@1 and pass@k on held-out prompts, over the same two functions that training uses: generate and score.

    prompts -> generate (n samples each) -> score -> EvalResult

pass@k is the unbiased estimator of Chen et al. 2021 (equation 1), averaged over prompts. A sample without a verdict is
no evidence either way: it is left out of its prompt's n and counted in ``errors``. Nothing here touches training state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.metrics import pass_at_k
from grpo_dist.rollout.seeds import group_seed
from grpo_dist.types import GroupRequest, Prompt, RolloutGroup, ScoredGroup

Generate = Callable[[GroupRequest], Awaitable[RolloutGroup]]
Score = Callable[[RolloutGroup], Awaitable[ScoredGroup]]

_EPOCH = 2**31 - 1  # no training epoch: evaluation never repeats a training seed


@dataclass(frozen=True, slots=True)
class EvalResult:
    """``pass_at_1`` and ``pass_at_k`` are None when nothing could be judged."""

    prompts: int  # that were sampled
    judged: int  # that had at least one verdict on their answer
    k: int
    pass_at_1: float | None
    pass_at_k: float | None
    short: int  # prompts left out of pass@k: fewer than k verdicts
    reward_mean: float | None
    completion_tokens_mean: float
    truncated_fraction: float
    errors: int  # samples without a verdict
    groups: tuple[ScoredGroup, ...]

    def values(self) -> dict[str, float]:
        """The eval/* metrics; those that nothing was known of are left out."""
        values: dict[str, float | None] = {
            "eval/pass@1": self.pass_at_1,
            "eval/pass@k": self.pass_at_k,
            "eval/k": self.k,
            "eval/reward_mean": self.reward_mean,
            "eval/completion_tokens_mean": self.completion_tokens_mean,
            "eval/truncated_fraction": self.truncated_fraction,
            "eval/errors": self.errors,
            "eval/prompts": self.prompts,
        }
        return {name: float(value) for name, value in values.items() if value is not None}

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """The first ``limit`` samples, for people."""
        rows = (
            {
                "prompt_id": group.rollout.prompt.id, "index": index, "prompt": group.rollout.prompt.text,
                "completion": completion.text, "answer": group.rollout.prompt.answer, "reward": verdict.reward,
                "correct": verdict.correct, "error": verdict.error, "finish_reason": completion.finish_reason,
            }
            for group in self.groups
            for index, (completion, verdict) in enumerate(zip(group.rollout.completions, group.verdicts, strict=True))
        )  # fmt: skip
        return [row for row, _ in zip(rows, range(limit), strict=False)]


async def evaluate(
    prompts: Sequence[Prompt],
    generate: Generate,
    score: Score,
    *,
    samples: int,
    k: int | None = None,
    seed: int = 0,
    concurrency: int = 512,
) -> EvalResult:
    """Sample each prompt once as a group and count what is right.

    Args:
        generate: returns ``samples`` completions for a request (the caller has bound the evaluation sampling).
        k: of pass@k, at most ``samples``; by default ``samples``.
        seed: fixes every evaluation of a run to the same seeds, so that two differ by their weights only.
    """
    k = samples if k is None else k
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {samples}")
    room = asyncio.Semaphore(concurrency)

    async def one(number: int, prompt: Prompt) -> ScoredGroup:
        async with room:
            return await score(
                await generate(GroupRequest(number, 0, prompt, group_seed(seed, _EPOCH, prompt.id, samples)))
            )

    groups = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    return summarise(groups, k)


def summarise(groups: Sequence[ScoredGroup], k: int) -> EvalResult:
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    completions = [completion for group in groups for completion in group.rollout.completions]
    # A completion without any opinion on correctness (a recipe of rewards only) is not a judged one.
    tallies = [
        (len(known), sum(known))
        for group in groups
        if (known := [bool(v.correct) for v in group.verdicts if v.reward is not None and v.correct is not None])
    ]
    full = [(n, c) for n, c in tallies if n >= k]
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    return EvalResult(
        prompts=len(groups),
        judged=len(tallies),
        k=k,
        pass_at_1=_mean([c / n for n, c in tallies]),
        pass_at_k=_mean([pass_at_k(n, c, k) for n, c in full]),
        short=len(tallies) - len(full),
        reward_mean=_mean(rewards),
        completion_tokens_mean=_mean([float(len(completion.token_ids)) for completion in completions]) or 0.0,
        truncated_fraction=_mean([float(completion.finish_reason == "length") for completion in completions]) or 0.0,
        errors=sum(verdict.reward is None for verdict in verdicts),
        groups=tuple(groups),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
