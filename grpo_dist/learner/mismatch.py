"""Engine against learner on the same tokens: how far two policies, nominally one, are apart. Measured only."""

from __future__ import annotations

from torch import Tensor

from grpo_dist.algorithms.kl import clamped_exp, k3
from grpo_dist.metrics import Max, Mean, Stats


def mismatch_stats(logprobs: Tensor, behavior: Tensor, mask: Tensor) -> Stats:
    """mismatch/*: learner's log-probabilities now against the engine's when it sampled, over trained tokens (L,)."""
    ours, theirs = logprobs.detach()[mask].double(), behavior[mask].double()
    count = ours.numel()
    if not count:
        return {}
    gap = ours - theirs
    return {
        "mismatch/kl": Mean(float(k3(theirs, ours).sum()), count),
        "mismatch/logprob_abs_mean": Mean(float(gap.abs().sum()), count),
        "mismatch/logprob_abs_max": Max(float(gap.abs().max())),
        "mismatch/ratio_max": Max(float(clamped_exp(gap)[0].max())),
        "mismatch/masked_fraction": Mean(0.0, count),
    }
