"""Surrogate objectives: what each trained token is worth, to be maximised. One small function per objective.

    TokenTerms (log-ratio to the old policy, advantage, mask, sequence of each token)  ->  Surrogate (value per token)

``objective.policy_loss`` prepares the terms, weighs the values by the divisor and sums them. At positions where the
mask is False every term is 0 and the value is discarded. rho = pi_theta / pi_old is always ``kl.clamped_exp``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_dist.algorithms.kl import clamped_exp
from grpo_dist.config import AlgorithmSection


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """All (L,); 0 or False off the mask."""

    logprobs: Tensor  # with gradient
    log_ratio: Tensor  # logprobs - log-probabilities of the old policy, with gradient, not clamped
    advantages: Tensor
    mask: Tensor
    segment_ids: Tensor  # which sequence of the micro-batch, 0..S-1
    lengths: Tensor  # (S,) trained tokens of each sequence

    def segment_sum(self, values: Tensor) -> Tensor:
        """(S,) sums over the tokens of each sequence."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.segment_ids, values)

    def segment_mean(self, values: Tensor) -> Tensor:
        """(S,) means over the trained tokens of each sequence; 0 for a sequence without any."""
        return self.segment_sum(values) / self.lengths.clamp(min=1)


@dataclass(frozen=True, slots=True)
class Surrogate:
    value: Tensor  # (L,) with gradient
    ratio: Tensor  # (L,) as used, without gradient
    low: Tensor  # (L,) bool: the lower bound decides, the token has no gradient
    high: Tensor  # (L,) bool: the upper bound decides
    clamped: Tensor  # (L,) bool: |log-ratio| was cut to keep exp finite


Objective = Callable[[TokenTerms, AlgorithmSection], Surrogate]


def clip(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) per token.

    PPO (arXiv:1707.06347, eq. 7) as used by DeepSeekMath (arXiv:2402.03300, eq. 3); separate bounds: DAPO
    (arXiv:2503.14476, eq. 10, "clip-higher").
    """
    ratio, clamped = clamped_exp(terms.log_ratio)
    return _clipped(ratio, clamped, terms.advantages, algorithm)


def _clipped(ratio: Tensor, clamped: Tensor, advantages: Tensor, algorithm: AlgorithmSection) -> Surrogate:
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    value = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    ratio = ratio.detach()
    return Surrogate(value, ratio, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0), clamped)


OBJECTIVES: dict[str, Objective] = {"clip": clip}
