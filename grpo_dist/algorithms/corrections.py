"""Weights that make up for engine and learner disagreeing on the log-probability of the same token.

    w(t) = pi_learner(t) / pi_engine(t), both before the update  ->  per token, per sequence, or its geometric mean
        ->  weight of the policy term (truncated at ``cap``), 0 where a mask drops it

Samples come from the engine's policy (other kernels, other precision, and with staleness older weights), the gradient
is taken at the learner's. Sources: truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl);
two-sided masking, IcePop (ringtech.notion.site/icepop); sequence-level weights and masks (Liu, Li et al. 2025,
richardli.xyz/rl-collapse); masking of off-policy negatives (DeepSeek-V3.2, arXiv:2512.02556).

Dropped tokens still count in the divisor, which is known before the first micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_dist.algorithms.kl import clamped_exp
from grpo_dist.algorithms.surrogates import TokenTerms
from grpo_dist.config import CorrectionSection


@dataclass(frozen=True, slots=True)
class Correction:
    weight: Tensor  # (L,) of the policy term, no gradient
    dropped: Tensor  # (L,) bool: the weight is 0 because a mask says so
    truncated: Tensor  # (L,) bool: the weight was cut to ``cap``


def correct(terms: TokenTerms, before: Tensor, behavior: Tensor, correction: CorrectionSection) -> Correction:
    """``before``: what the learner says before the update, ``behavior``: what the engine said. (L,), 0 off the mask."""
    gap = before - behavior
    ratios = {
        "none": torch.ones_like(gap),
        "token": clamped_exp(gap)[0],
        "sequence": clamped_exp(terms.segment_sum(gap))[0],
        "geometric": clamped_exp(terms.segment_mean(gap))[0],
    }
    weight = ratios[correction.weight]
    dropped = torch.zeros_like(terms.mask)
    if correction.mask != "none":
        seen = ratios[correction.mask]
        dropped = terms.mask & ((seen < correction.low) | (seen > correction.high))
    if correction.negative_limit is not None:
        drift = terms.segment_mean(behavior - terms.logprobs.detach())  # mean log pi_engine / pi over the sequence
        dropped = dropped | (terms.mask & (terms.advantages < 0) & (drift > correction.negative_limit))
    truncated = torch.zeros_like(terms.mask)
    if correction.weight != "none":
        truncated = terms.mask & ~dropped & (weight > correction.cap)
        weight = weight.clamp(max=correction.cap)
    return Correction(weight.masked_fill(dropped, 0.0), dropped, truncated)
