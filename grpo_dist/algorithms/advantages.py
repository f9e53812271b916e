"""Rewards of groups become advantages, and scored groups become samples.

    ScoredGroup (rewards)  ->  rewards (N,), group ids (N,)  ->  ADVANTAGES[name]  ->  Sample (advantage on each token)

fp64 numpy. A sample without a reward (NaN) is masked: it gets 0, and counts in nobody's statistics. Groups are told
apart by id, never by place or text. Rewards are equal when their spread is no more than rounding leaves (a sum of
weighted parts may end in another last bit), and equal rewards give exactly 0: no epsilon in a denominator decides that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from grpo_dist.config import AlgorithmSection
from grpo_dist.errors import GrpoDistError
from grpo_dist.metrics import equal_rewards
from grpo_dist.types import Completion, Prompt, Sample, ScoredGroup

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Estimator = Callable[..., Floats]  # (rewards (N,), group ids (N,), options) -> advantages (N,)


def grpo(rewards: Floats, group_ids: Ints) -> Floats:
    """(r - mean) / std over the group, population std: mean 0, variance 1 (DeepSeekMath, arXiv:2402.03300, 4.1.2)."""
    return _per_group(rewards, group_ids, lambda r: _standard(r - r.mean()))


def dr_grpo(rewards: Floats, group_ids: Ints) -> Floats:
    """r - mean over the group: no std, which weighs very easy and very hard prompts up (Dr. GRPO, arXiv:2503.20783)."""
    return _per_group(rewards, group_ids, lambda r: r - r.mean())


def rloo(rewards: Floats, group_ids: Ints) -> Floats:
    """r - mean of the others of the group (RLOO, arXiv:2402.14740) = n / (n - 1) (r - mean)."""
    return _per_group(rewards, group_ids, lambda r: (r - r.mean()) * (len(r) / (len(r) - 1)))


def batch_std(rewards: Floats, group_ids: Ints) -> Floats:
    """(r - mean over the group) / std over the batch ("Tricks or traps", arXiv:2508.08221)."""
    centred = dr_grpo(rewards, group_ids)
    known = rewards[np.isfinite(rewards)]
    return centred if equal_rewards(known) else centred / known.std()


def reinforce_pp(rewards: Floats, group_ids: Ints) -> Floats:
    """(r - mean) / std, both over the batch (REINFORCE++, arXiv:2501.03262).

    The baseline is global: a group of equal rewards is only 0 when its reward is the mean of the batch.
    """
    return _per_group(rewards, np.zeros_like(group_ids), lambda r: _standard(r - r.mean()))


def reinforce_pp_baseline(rewards: Floats, group_ids: Ints) -> Floats:
    """r - mean over the group, then / std of these over the batch (REINFORCE++ with baseline, arXiv:2501.03262)."""
    centred = dr_grpo(rewards, group_ids)
    known = np.isfinite(rewards)
    return centred if not centred.any() else np.where(known, centred / centred[known].std(), 0.0)


def maxrl(rewards: Floats, group_ids: Ints) -> Floats:
    """(r - mean) / mean over the group: the gradient of the log of the success rate, up to order G.

    Maximum Likelihood Reinforcement Learning (arXiv:2602.02710). Weighs hard prompts up, by 1 / pass rate. Rewards must
    not be negative.
    """

    def estimate(r: Floats) -> Floats:
        if r.min() < 0:
            raise GrpoDistError(
                "algorithm.advantage: maxrl divides by the mean reward of a group, so no reward may be negative; "
                f"got {r.min()}"
            )
        return r / r.mean() - 1

    return _per_group(rewards, group_ids, estimate)


def pass_at_k(rewards: Floats, group_ids: Ints, k: int = 4) -> Floats:
    """What a sample adds to the best of k: the mean, over the subsets of k that hold it, of max with - max without.

    Pass@K Policy Optimization (arXiv:2505.15201, eq. 33): the sum over those subsets / C(n, k). A group with fewer than
    k known rewards takes all of them. Never negative: a sample that is the best of no subset gets 0.
    """

    def estimate(r: Floats) -> Floats:
        n, size = len(r), min(k, len(r))
        order = np.argsort(r, kind="stable")
        ascending, total = r[order], math.comb(n, size)
        # The sample at rank i is the best of a subset whose second best is at rank m < i: C(m, k - 2) such subsets.
        share = np.asarray([math.comb(m, size - 2) / total for m in range(n)])
        out = np.zeros(n)
        for i in range(n):
            out[order[i]] = ((ascending[i] - ascending[:i]) * share[:i]).sum()
        return out

    if k < 2:
        raise ValueError(f"pass_at_k needs k of at least 2, got {k}: with 1 there is no baseline")
    return _per_group(rewards, group_ids, estimate)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "batch_std": batch_std,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
}


def _per_group(rewards: Floats, group_ids: Ints, estimate: Callable[[Floats], Floats]) -> Floats:
    """``estimate`` on the known rewards of each group that has a spread; 0 everywhere else."""
    if rewards.shape != group_ids.shape:
        raise ValueError(f"{len(rewards)} rewards, but {len(group_ids)} group ids")
    out = np.zeros(len(rewards))
    known = np.isfinite(rewards)
    for group in np.unique(group_ids):
        members = known & (group_ids == group)
        if not equal_rewards(rewards[members]):
            out[members] = estimate(rewards[members])
    return out


def _standard(centred: Floats) -> Floats:
    """Unit variance. Scaled by the largest first, so that squares neither overflow nor vanish."""
    scaled = centred / np.abs(centred).max()
    return scaled / np.sqrt(np.mean(scaled**2))


def assign_advantages(groups: Sequence[ScoredGroup], algorithm: AlgorithmSection) -> list[Sample]:
    """Samples in the order of groups and completions.

    One without a verdict, or aborted, trains nothing: its mask is all False. A completion without tokens has nothing to
    train either, but its reward counts in the group.
    """
    ids = np.asarray([g.group_id for g in groups for _ in g.verdicts], dtype=np.int64)
    rewards = np.asarray([r for g in groups for r in g.rewards], dtype=np.float64)
    options = {"k": algorithm.pass_k} if algorithm.advantage == "pass_at_k" else {}
    advantages = ADVANTAGES[algorithm.advantage](rewards, ids, **options)
    completions = [(g, i, c) for g in groups for i, c in enumerate(g.rollout.completions)]
    return [
        _sample(g.group_id, i, g.rollout.prompt, c, advantage=float(a), trains=bool(np.isfinite(r)))
        for (g, i, c), a, r in zip(completions, advantages, rewards, strict=True)
    ]


def _sample(
    group_id: int, index: int, prompt: Prompt, completion: Completion, *, advantage: float, trains: bool
) -> Sample:
    if len(completion.logprobs) != len(completion.token_ids):
        raise ValueError(
            f"completion has {len(completion.token_ids)} token_ids, but {len(completion.logprobs)} logprobs "
            f"(group {group_id}, {index})"
        )
    start = len(prompt.token_ids)
    token_ids = np.asarray(prompt.token_ids + completion.token_ids, dtype=np.int64)
    mask = np.zeros(len(token_ids), dtype=np.bool_)
    mask[start:] = trains
    behavior, spread = np.zeros(len(token_ids), np.float32), np.zeros(len(token_ids), np.float32)
    if trains:
        behavior[start:], spread[start:] = completion.logprobs, advantage
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=behavior,
        advantages=spread,
    )
