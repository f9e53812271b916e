"""What the learner computes, the plain way: one sequence at a time, nothing packed, sharded or chunked, formula by formula.

Written from the formulas of docs/algorithms.md with ordinary PyTorch; shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.config import AlgorithmSection
from grpo_dist.types import Sample


def plain_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def plain_logits(model: Any, sample: Sample, temperature: float = 1.0) -> Tensor:
    """(T - 1, V): row t predicts token t + 1."""
    ids = torch.tensor(sample.token_ids)
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return (logits if logits.dtype == torch.float64 else logits.float())[:-1] / temperature


def plain_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> Tensor:
    """(T,) with 0 for the first token."""
    scores = torch.log_softmax(plain_logits(model, sample, temperature), -1)
    logp = scores.gather(1, torch.tensor(sample.token_ids)[1:, None])[:, 0]
    return torch.cat([torch.zeros(1, dtype=logp.dtype), logp])


def invented_reference(token_ids: Tensor) -> Tensor:
    """Log-probabilities of a reference that nobody had to train: a function of the token alone, away from the policy's."""
    return -3.5 + 0.4 * torch.sin(token_ids.float() * 1.7)


def plain_gradients(path: Path, batch: Sequence[Sample], algorithm: AlgorithmSection) -> dict[str, np.ndarray]:
    """In fp64, of the whole batch's loss by every parameter."""
    model = plain_model(path, torch.float64)
    plain_backward(model, batch, algorithm)
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def plain_backward(model: Any, batch: Sequence[Sample], algorithm: AlgorithmSection) -> None:
    tokens, count = sum(int(s.loss_mask.sum()) for s in batch), len(batch)
    for s in batch:
        on = torch.tensor(s.loss_mask)
        log_policy = plain_logprobs(model, s)[on]
        scores = torch.log_softmax(plain_logits(model, s), -1)
        entropy = -(scores.exp() * scores).sum(-1)[on[1:]]
        behavior = torch.tensor(s.behavior_logprobs)[on].double()
        reference = invented_reference(torch.tensor(s.token_ids))[on].double()
        advantage = float(s.advantages[s.loss_mask][0])
        value = _value(log_policy, behavior, reference, advantage, algorithm) + algorithm.entropy_bonus * entropy
        weight = {
            "token": tokens,
            "sequence": len(log_policy) * count,
            "constant": (algorithm.divisor_tokens or 0) * count,
        }
        (-value.sum() / weight[algorithm.divisor]).backward()


def _value(log_policy: Tensor, behavior: Tensor, reference: Tensor, advantage: float, a: AlgorithmSection) -> Tensor:
    """(C,) what each token adds to the objective, before the divisor."""
    now = log_policy.detach()
    old = now if a.old_policy == "learner" else behavior
    per_token = torch.full_like(now, advantage)
    if a.kl.beta and a.kl.place == "reward":  # what is still to come counts, from this token on
        per_token = per_token - a.kl.beta * (now - reference).flip(0).cumsum(0).flip(0)
    value = _surrogate(log_policy, old, per_token, a) * _correction(now, behavior, a)
    if a.kl.beta and a.kl.place == "loss":
        x = reference - log_policy
        third = x.exp() - x - 1
        ratio = (log_policy - old).exp()
        value = value - a.kl.beta * {"k1": -x, "k2": x**2 / 2, "k3": third, "unbiased": ratio * third}[a.kl.estimator]
    return value


def _surrogate(log_policy: Tensor, old: Tensor, advantage: Tensor, a: AlgorithmSection) -> Tensor:
    logs = log_policy - old
    low, high = 1 - a.clip_low, 1 + a.clip_high
    if a.objective == "reinforce":
        return advantage * log_policy
    if a.objective == "cispo":
        return logs.exp().clamp(low, high).detach() * advantage * log_policy
    if a.objective == "sapo":
        tau = torch.where(advantage > 0, a.sapo_tau_positive, a.sapo_tau_negative)
        return 4 / tau * torch.sigmoid(tau * (logs.exp() - 1)) * advantage
    if a.objective == "gmpo":
        side = torch.where(advantage > 0, logs.clamp(max=a.clip_high), logs.clamp(min=-a.clip_low))
        return side.mean().exp() * advantage
    ratio = {"clip": logs, "gspo": logs.mean().expand_as(logs), "sequence_ratio": logs.sum().expand_as(logs)}
    r = ratio[a.objective].exp()
    value = torch.minimum(r * advantage, r.clamp(low, high) * advantage)
    if a.clip_dual is not None:
        value = torch.where(advantage < 0, torch.maximum(value, a.clip_dual * advantage), value)
    return value


def _correction(now: Tensor, behavior: Tensor, a: AlgorithmSection) -> Tensor:
    gap, c = now - behavior, a.correction
    ratios = {"token": gap.exp(), "sequence": gap.sum().exp(), "geometric": gap.mean().exp()}
    weight = torch.ones_like(now) if c.weight == "none" else ratios[c.weight].clamp(max=c.cap).expand_as(now)
    if c.mask == "none":
        return weight
    kept = (ratios[c.mask] >= c.low) & (ratios[c.mask] <= c.high)
    return torch.where(kept, weight, 0.0)


def relative(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """|difference| / |wanted| over all parameters together."""
    assert found.keys() == wanted.keys()
    difference = np.sqrt(sum(((found[n].astype(np.float64) - wanted[n]) ** 2).sum() for n in wanted))
    return float(difference / np.sqrt(sum((wanted[n].astype(np.float64) ** 2).sum() for n in wanted)))
