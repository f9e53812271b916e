"""Surrogate objectives: what each trained token is worth, to be maximised. One small function per objective.

    TokenTerms (log-ratio to the old policy, advantage, mask, sequence of each token)  ->  Surrogate (value per token)

``objective.policy_loss`` prepares the terms, weighs the values by the divisor and sums them. Off the mask every term is
0 and the value is discarded. rho(t) = pi(t) / pi_old(t) is always ``kl.clamped_exp``'s.

An objective on whole sequences (gspo, sequence_ratio, gmpo) gives each token of a sequence the sequence's value. With
``divisor: sequence`` the sum is then the mean over sequences, which is the formula of its paper.
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
    """All (L,) but ``lengths``; 0 or False off the mask. No gradient but through ``logprobs`` and ``log_ratio``."""

    logprobs: Tensor
    log_ratio: Tensor  # logprobs - log-probabilities of the old policy, not clamped
    advantages: Tensor
    mask: Tensor
    segment_ids: Tensor  # which sequence of the micro-batch, 0..S-1
    lengths: Tensor  # (S,) trained tokens of each sequence

    def segment_sum(self, values: Tensor) -> Tensor:
        """(L,) at each token the sum over its sequence, added up in fp64: sequences are long."""
        totals = torch.zeros(len(self.lengths), dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.segment_ids, values.double())[self.segment_ids].to(values.dtype)

    def segment_mean(self, values: Tensor) -> Tensor:
        """(L,) at each token the mean over the trained tokens of its sequence."""
        return self.segment_sum(values) / self.lengths.clamp(min=1)[self.segment_ids]

    def segment_rest(self, values: Tensor) -> Tensor:
        """(L,) at each token the sum from it to the end of its sequence. Sequences lie one after the other."""
        wide = values.double()
        running = wide.cumsum(0)
        totals = torch.zeros(len(self.lengths), dtype=torch.float64, device=values.device)
        ends = totals.index_add(0, self.segment_ids, wide).cumsum(0)
        return (ends[self.segment_ids] - running + wide).to(values.dtype)


@dataclass(frozen=True, slots=True)
class Surrogate:
    value: Tensor  # (L,) with gradient
    ratio: Tensor  # (L,) as used, without gradient
    low: Tensor  # (L,) bool: the lower bound decides
    high: Tensor  # (L,) bool: the upper bound decides
    clamped: Tensor  # (L,) bool: |log-ratio| was cut to keep exp finite


Objective = Callable[[TokenTerms, AlgorithmSection], Surrogate]


def clip(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) per token.

    PPO (arXiv:1707.06347, eq. 7) as used by DeepSeekMath (arXiv:2402.03300, eq. 3); separate bounds: DAPO
    (arXiv:2503.14476, eq. 10, "clip-higher").
    """
    return _clipped(terms, algorithm, terms.log_ratio)


def gspo(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """min(s A, clip(s) A), s = (pi(o) / pi_old(o))^(1/|o|), the geometric mean of rho.

    Group Sequence Policy Optimization (arXiv:2507.18071, eq. 5 and 7).
    """
    return _clipped(terms, algorithm, terms.segment_mean(terms.log_ratio))


def sequence_ratio(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """min(r A, clip(r) A), r = pi(o) / pi_old(o): the ratio of whole outputs, not normalised by length.

    (1/G) sum_i min(r_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) A_i): GRPO as DeepSeek-R1 prints it
    (arXiv:2501.12948, eq. 1).
    """
    return _clipped(terms, algorithm, terms.segment_sum(terms.log_ratio))


def cispo(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, never the gradient.

    MiniMax-M1 (arXiv:2506.13585, eq. 4-5), which leaves the lower bound off: clip_low 1.
    """
    ratio, clamped = clamped_exp(terms.log_ratio.detach())
    low, high = _bounds(algorithm)
    value = ratio.clamp(low, high) * terms.advantages * terms.logprobs
    return Surrogate(value, ratio, ratio < low, ratio > high, clamped)


def sapo(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """(4 / tau) sigmoid(tau (rho - 1)) A: a smooth gate in place of the clip, tau by the sign of A.

    Soft Adaptive Policy Optimization (arXiv:2511.20347). Its gradient at rho = 1 is that of rho A.
    """
    ratio, clamped = clamped_exp(terms.log_ratio)
    positive, negative = ratio.new_tensor([algorithm.sapo_tau_positive, algorithm.sapo_tau_negative])
    tau = torch.where(terms.advantages > 0, positive, negative)
    value = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * terms.advantages
    never = torch.zeros_like(terms.mask)
    return Surrogate(value, ratio.detach(), never, never, clamped)


def gmpo(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """A times the geometric mean of rho over the sequence, each rho clipped first, on the side that A asks for.

    Geometric-Mean Policy Optimization (arXiv:2507.20673). The bounds are those of log rho: -clip_low and clip_high.
    """
    sign = terms.advantages.sign()
    bounded = terms.log_ratio.clamp(-algorithm.clip_low, algorithm.clip_high)
    chosen = sign * torch.minimum(sign * terms.log_ratio, sign * bounded)
    ratio, clamped = clamped_exp(terms.segment_mean(chosen))
    beyond = terms.log_ratio.detach() - bounded.detach()
    return Surrogate(
        ratio * terms.advantages, ratio.detach(), (beyond < 0) & (sign < 0), (beyond > 0) & (sign > 0), clamped
    )


def reinforce(terms: TokenTerms, algorithm: AlgorithmSection) -> Surrogate:
    """A log pi: the plain policy gradient (Williams 1992), no ratio, no trust region."""
    ratio, clamped = clamped_exp(terms.log_ratio.detach())
    never = torch.zeros_like(terms.mask)
    return Surrogate(terms.logprobs * terms.advantages, ratio, never, never, clamped)


def _bounds(algorithm: AlgorithmSection) -> tuple[float, float]:
    return 1 - algorithm.clip_low, 1 + algorithm.clip_high


def _clipped(terms: TokenTerms, algorithm: AlgorithmSection, log_ratio: Tensor) -> Surrogate:
    """min(r A, clip(r) A); with dual clip (arXiv:1912.09729) at least clip_dual x A where A is negative."""
    low, high = _bounds(algorithm)
    ratio, clamped = clamped_exp(log_ratio)
    advantages, seen = terms.advantages, ratio.detach()
    value = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    at_high = (seen > high) & (advantages > 0)
    if algorithm.clip_dual is not None:
        negative = advantages < 0
        value = torch.where(negative, torch.maximum(value, algorithm.clip_dual * advantages), value)
        at_high = at_high | (negative & (seen > algorithm.clip_dual))
    return Surrogate(value, seen, (seen < low) & (advantages < 0), at_high, clamped)


OBJECTIVES: dict[str, Objective] = {
    "clip": clip,
    "gspo": gspo,
    "sequence_ratio": sequence_ratio,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "reinforce": reinforce,
}
