"""The loss of one packed micro-batch, and what is measured on the way.

    log-probabilities now / before the update / of the engine / of the reference, advantages, mask
        ->  surrogate x correction - beta x KL + entropy bonus, per token  ->  x weight per token (the divisor)  ->  sum

The divisor is a count over the whole optimizer step, known before the first micro-batch, so the sum over any split
into micro-batches and ranks has the same gradient. Left out: how log-probabilities come about (logprobs.py), the
average that DeepSpeed takes over ranks (learner/zero3.py undoes it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_dist.algorithms.corrections import Correction, correct
from grpo_dist.algorithms.kl import ESTIMATORS, clamped_exp, k1, k3
from grpo_dist.algorithms.surrogates import OBJECTIVES, Surrogate, TokenTerms
from grpo_dist.config import AlgorithmSection
from grpo_dist.metrics import Max, Mean, Min, Stats, Sum

__all__ = ["DIVISORS", "OBJECTIVES", "LossInputs", "policy_loss", "token_weights"]


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed micro-batch. All (L,); values off the mask are ignored, whatever they are."""

    logprobs: Tensor  # of the policy being trained, with gradient
    advantages: Tensor
    mask: Tensor  # bool
    segment_ids: Tensor  # int64, 0..S-1, ascending
    old_logprobs: Tensor | None = None  # learner's own, before the step's first update; None: equal to logprobs now
    behavior_logprobs: Tensor | None = None  # as the engine sampled them
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # with gradient when algorithm.entropy_bonus is not 0


def policy_loss(
    inputs: LossInputs, algorithm: AlgorithmSection, *, loss_tokens: int, loss_sequences: int
) -> tuple[Tensor, Stats]:
    """(sum over this micro-batch of the loss / global divisor, train/* and mismatch/*).

    Added over all micro-batches and ranks it is the loss of the step. A micro-batch without a trained token yields a 0
    that can be back-propagated. ``loss_tokens`` and ``loss_sequences`` are those of the whole step (TrainBatch).
    """
    _check(inputs, algorithm)
    mask = inputs.mask
    before = _on(mask, inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs).detach()
    behavior = None if inputs.behavior_logprobs is None else _on(mask, inputs.behavior_logprobs).to(before.dtype)
    reference = None if inputs.reference_logprobs is None else _on(mask, inputs.reference_logprobs).to(before.dtype)
    old = behavior if behavior is not None and algorithm.old_policy == "engine" else before
    terms = _terms(inputs, algorithm, old=old, before=before, reference=reference)
    weights = token_weights(terms, algorithm, loss_tokens=loss_tokens, loss_sequences=loss_sequences)
    stats = _Collector(mask)

    surrogate = OBJECTIVES[algorithm.objective](terms, algorithm)
    value = surrogate.value
    if behavior is not None:
        correction = correct(terms, before, behavior, algorithm.correction)
        value = value * correction.weight
        _mismatch_stats(stats, before, behavior, correction)
    loss = policy = -_sum(value, weights, mask)
    if reference is not None:
        kl = ESTIMATORS[algorithm.kl.estimator](terms.logprobs, reference, terms.log_ratio)
        stats.mean("train/kl", kl)
        if algorithm.kl.beta and algorithm.kl.place == "loss":
            loss = loss + algorithm.kl.beta * _sum(kl, weights, mask)
    if inputs.entropy is not None:
        stats.mean("train/entropy", inputs.entropy)
        if algorithm.entropy_bonus:
            loss = loss - algorithm.entropy_bonus * _sum(inputs.entropy, weights, mask)
    _ratio_stats(stats, surrogate)
    return loss, stats.done({"train/loss": loss, "train/policy_loss": policy})


# --- divisors -------------------------------------------------------------------------------------------------------


def _token(terms: TokenTerms, algorithm: AlgorithmSection, loss_tokens: int, loss_sequences: int) -> Tensor:
    """Every token counts alike: 1 / tokens of the step (DAPO, arXiv:2503.14476, eq. 8)."""
    return torch.full_like(terms.advantages, 1 / max(loss_tokens, 1))


def _sequence(terms: TokenTerms, algorithm: AlgorithmSection, loss_tokens: int, loss_sequences: int) -> Tensor:
    """Every sequence counts alike: 1 / (its tokens x sequences of the step) (DeepSeekMath, arXiv:2402.03300, eq. 3)."""
    per_sequence = 1 / (terms.lengths.to(terms.advantages.dtype).clamp(min=1) * max(loss_sequences, 1))
    return per_sequence[terms.segment_ids]


def _constant(terms: TokenTerms, algorithm: AlgorithmSection, loss_tokens: int, loss_sequences: int) -> Tensor:
    """1 / (constant x sequences of the step): no length bias (Dr. GRPO, arXiv:2503.20783)."""
    if algorithm.divisor_tokens is None:
        raise ValueError("algorithm.divisor: constant needs algorithm.divisor_tokens (rollout.sampling.max_tokens)")
    return torch.full_like(terms.advantages, 1 / (algorithm.divisor_tokens * max(loss_sequences, 1)))


DIVISORS: dict[str, Callable[[TokenTerms, AlgorithmSection, int, int], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "constant": _constant,
}


def token_weights(terms: TokenTerms, algorithm: AlgorithmSection, *, loss_tokens: int, loss_sequences: int) -> Tensor:
    """(L,) what one trained token weighs in the loss of the step."""
    return DIVISORS[algorithm.divisor](terms, algorithm, loss_tokens, loss_sequences)


# --- terms ----------------------------------------------------------------------------------------------------------


def _check(inputs: LossInputs, algorithm: AlgorithmSection) -> None:
    if algorithm.kl.beta and inputs.reference_logprobs is None:
        raise ValueError(f"algorithm.kl.beta is {algorithm.kl.beta}, but no reference log-probabilities were given")
    if algorithm.entropy_bonus and (
        inputs.entropy is None or inputs.logprobs.requires_grad > inputs.entropy.requires_grad
    ):
        raise ValueError(
            f"algorithm.entropy_bonus is {algorithm.entropy_bonus}, but no entropy with a gradient was given"
        )
    if inputs.behavior_logprobs is None and (algorithm.correction.active or algorithm.old_logprobs == "engine"):
        raise ValueError("algorithm.correction and old_logprobs: engine need the engine's log-probabilities")


def _on(mask: Tensor, values: Tensor) -> Tensor:
    """0 off the mask, whatever was there: a NaN times 0 would stay a NaN."""
    return torch.where(mask, values, torch.zeros_like(values))


def _terms(
    inputs: LossInputs, algorithm: AlgorithmSection, *, old: Tensor, before: Tensor, reference: Tensor | None
) -> TokenTerms:
    mask, ids = inputs.mask, inputs.segment_ids
    logprobs = _on(mask, inputs.logprobs)
    segments = int(ids.max()) + 1 if ids.numel() else 0
    terms = TokenTerms(
        logprobs=logprobs,
        log_ratio=logprobs - old,
        advantages=_on(mask, inputs.advantages).to(logprobs.dtype),
        mask=mask,
        segment_ids=ids,
        lengths=torch.zeros(segments, dtype=torch.int64, device=mask.device).index_add(0, ids, mask.long()),
    )
    if reference is None or not algorithm.kl.beta or algorithm.kl.place == "loss":
        return terms
    # The reward of token t is -beta k1(t), its return the sum from t on (REINFORCE++, arXiv:2501.03262).
    penalty = algorithm.kl.beta * terms.segment_rest(k1(before, reference))
    return replace(terms, advantages=_on(mask, terms.advantages - penalty))


def _sum(values: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return _on(mask, values * weights).sum()


# --- measurements ---------------------------------------------------------------------------------------------------


class _Collector:
    """Sums over trained tokens, in fp64, read from the device in one go."""

    def __init__(self, mask: Tensor) -> None:
        self._mask, self._totals, self._extremes = mask, dict[str, Tensor](), dict[str, Tensor]()

    def mean(self, name: str, values: Tensor) -> None:
        self._totals[name] = _on(self._mask, values.detach().double()).sum()

    def total(self, name: str, values: Tensor) -> None:
        self._totals["sum:" + name] = _on(self._mask, values.detach().double()).sum()

    def extreme(self, name: str, values: Tensor, *, largest: bool = True) -> None:
        blank = -torch.inf if largest else torch.inf
        wide = values.detach().double()
        kept = torch.cat([torch.where(self._mask, wide, blank), wide.new_tensor([blank])])  # never empty
        self._extremes[name if largest else "min:" + name] = kept.max() if largest else kept.min()

    def done(self, sums: dict[str, Tensor]) -> Stats:
        self._totals |= {"sum:" + name: value.detach().double() for name, value in sums.items()}
        names = [*self._totals, *self._extremes]
        tensors = [*self._totals.values(), *self._extremes.values(), self._mask.sum().double()]
        *numbers, count = torch.stack(tensors).tolist()
        stats: Stats = {}
        for name, number in zip(names, numbers, strict=True):
            kind, _, rest = name.rpartition(":")
            if name in self._extremes:
                stats[rest] = Min(number) if kind == "min" else Max(number)
            else:
                stats[rest] = Sum(number) if kind == "sum" else Mean(number, count)
        return stats


def _ratio_stats(stats: _Collector, surrogate: Surrogate) -> None:
    stats.mean("train/clip_fraction", surrogate.low | surrogate.high)
    stats.mean("train/clip_low_fraction", surrogate.low)
    stats.mean("train/clip_high_fraction", surrogate.high)
    stats.mean("train/ratio_mean", surrogate.ratio)
    stats.extreme("train/ratio_max", surrogate.ratio)
    stats.extreme("train/ratio_min", surrogate.ratio, largest=False)
    stats.total("train/clamped_tokens", surrogate.clamped)


def _mismatch_stats(stats: _Collector, before: Tensor, behavior: Tensor, correction: Correction) -> None:
    """Engine against learner on the same tokens, before the update. k3 estimates KL(engine || learner)."""
    gap = before - behavior
    stats.mean("mismatch/kl", k3(behavior, before))
    stats.mean("mismatch/logprob_abs_mean", gap.abs())
    stats.extreme("mismatch/logprob_abs_max", gap.abs())
    stats.extreme("mismatch/ratio_max", clamped_exp(gap)[0])
    stats.mean("mismatch/masked_fraction", correction.dropped)
    stats.mean("mismatch/truncated_fraction", correction.truncated)
    stats.mean("mismatch/weight_mean", correction.weight)
