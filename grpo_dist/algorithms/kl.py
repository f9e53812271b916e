"""Estimators of KL(policy || reference) per token, from the log-probabilities of sampled tokens.

With x = log pi_ref(t) - log pi(t), rho = pi(t) / pi_old(t), t sampled from pi_old (Schulman, "Approximating KL
Divergence", 2020, http://joschu.net/blog/kl-approx.html):

    k1 = -x                unbiased value, high variance, may be negative; as a loss its gradient averages to nothing
    k2 = x^2 / 2           biased value, low variance; its gradient is on average that of the KL
    k3 = exp(x) - 1 - x    unbiased value, never negative; what GRPO uses (DeepSeekMath, arXiv:2402.03300, eq. 4)
    unbiased = rho k3      value and gradient unbiased, also off policy (DeepSeek-V3.2, arXiv:2512.02556)

Value and gradient are finite for any log-ratio. All arguments (L,), all results (L,).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# (log-probabilities of the policy, of the reference, log rho) -> estimate per token
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]

MAX_LOG_RATIO = 20.0  # exp(20) is 4.9e8: far beyond any honest ratio, far below the overflow of any float but fp16


def clamped_exp(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """exp within +-20, and where it was cut: there the value stays finite and the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), log_ratio.detach().abs() > MAX_LOG_RATIO


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Exact up to x = 20; beyond it exp goes on as its tangent: the gradient stays finite *and* keeps its sign."""
    x = reference - logprobs
    inside = x.clamp(max=MAX_LOG_RATIO)
    # expm1 keeps the digits of a small x, where exp(x) - 1 - x cancels to noise. (x - inside) is 0 inside the limit.
    return inside.expm1() - x + (x - inside) * inside.detach().exp()


def unbiased(logprobs: Tensor, reference: Tensor, log_ratio: Tensor) -> Tensor:
    return clamped_exp(log_ratio)[0] * k3(logprobs, reference)


ESTIMATORS: dict[str, Estimator] = {
    "k1": lambda logprobs, reference, _: k1(logprobs, reference),
    "k2": lambda logprobs, reference, _: k2(logprobs, reference),
    "k3": lambda logprobs, reference, _: k3(logprobs, reference),
    "unbiased": unbiased,
}
