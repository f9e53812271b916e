"""KL estimators: values by hand, expectations over a whole distribution, finite for any log-ratio."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from grpo_dist.algorithms.kl import ESTIMATORS, clamped_exp, k1, k2, k3, unbiased
from grpo_dist.config import KLSection


def wide(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_recipe_lists_exactly_the_registry() -> None:
    assert set(get_args(KLSection.model_fields["estimator"].annotation)) == set(ESTIMATORS)


def test_worked_out_by_hand() -> None:
    # The policy says 1/2, the reference 1/4: x = log(1/2).
    logprobs, reference = wide(math.log(0.5)), wide(math.log(0.25))
    assert k1(logprobs, reference).item() == pytest.approx(math.log(2))
    assert k2(logprobs, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(logprobs, reference).item() == pytest.approx(0.5 - 1 + math.log(2))
    assert unbiased(logprobs, reference, wide(math.log(3))).item() == pytest.approx(3 * (0.5 - 1 + math.log(2)))


def test_equal_policies_give_exactly_zero() -> None:
    same = torch.linspace(-9, 0, 50)
    for estimator in ESTIMATORS.values():
        assert not estimator(same, same.clone(), torch.zeros(50)).any()


def categorical() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    policy, reference, old = (torch.randn(7, dtype=torch.float64) for _ in range(3))
    return policy.requires_grad_(), reference.log_softmax(0), old.log_softmax(0)


def test_k1_and_k3_average_to_the_divergence() -> None:
    policy, reference, _ = categorical()
    logp = policy.log_softmax(0).detach()
    exact = (logp.exp() * (logp - reference)).sum().item()
    for estimator in (k1, k3):
        assert (logp.exp() * estimator(logp, reference)).sum().item() == pytest.approx(exact, abs=1e-12)


def loss_gradient(name: str, old: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(expected gradient of the estimator as a loss, gradient of the exact divergence) over a whole distribution."""
    policy, reference, _ = categorical()
    logp = policy.log_softmax(0)
    exact = (logp.exp() * (logp - reference)).sum()
    sampled = logp.detach() if old is None else old  # what tokens are drawn from
    estimate = ESTIMATORS[name](logp, reference, logp - sampled)
    expected = (sampled.exp() * estimate).sum()
    return torch.autograd.grad(expected, policy, retain_graph=True)[0], torch.autograd.grad(exact, policy)[0]


def test_gradient_of_the_unbiased_estimator_is_that_of_the_divergence_also_off_policy() -> None:
    for old in (None, categorical()[2]):
        found, exact = loss_gradient("unbiased", old)
        assert torch.allclose(found, exact, atol=1e-12)


def test_gradient_of_k2_is_right_on_policy_while_that_of_k1_vanishes_and_that_of_k3_is_another_divergence() -> None:
    found, exact = loss_gradient("k2")
    assert torch.allclose(found, exact, atol=1e-12)
    assert loss_gradient("k1")[0].abs().max() < 1e-12
    assert not torch.allclose(loss_gradient("k3")[0], exact, atol=1e-2)


@given(x=st.floats(-19.9, 19.9))
def test_k3_is_exact_inside_the_limit(x: float) -> None:
    value = k3(wide(0.0), wide(x)).item()
    assert value == pytest.approx(math.expm1(x) - x, rel=1e-12, abs=1e-14)
    assert value >= 0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("x", [100.0, 1e4, -100.0, -1e4, 88.8])
@pytest.mark.parametrize("ratio", [0.0, 1e4, -1e4])
def test_finite_for_any_log_ratio(name: str, x: float, ratio: float) -> None:
    logprobs = torch.tensor([0.0], requires_grad=True)
    value = ESTIMATORS[name](logprobs, torch.tensor([x]), logprobs + ratio)
    value.sum().backward()
    assert value.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_beyond_the_limit_the_gradient_of_k3_still_pulls_towards_the_reference() -> None:
    logprobs = torch.tensor([-30.0, -10.0, -1e4], requires_grad=True)
    k3(logprobs, torch.zeros(3)).sum().backward()
    assert logprobs.grad is not None
    assert (logprobs.grad < -1e4).all()  # down the gradient is up in probability


def test_clamped_exp_says_what_it_cut() -> None:
    value, cut = clamped_exp(wide(-1e4, -20, 0, 20, 20.5))
    assert cut.tolist() == [True, False, False, False, True]
    assert value[2].item() == 1.0
    assert value[4].item() == value[3].item() == pytest.approx(math.exp(20))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"refresh_every": 5}, "kl.refresh_every is given, but kl.reference is fixed"),
        ({"ema": 0.1}, "kl.ema is given, but kl.reference is fixed"),
        ({"reference": "refresh"}, r"refresh needs kl.refresh_every \(steps\) and no kl.ema"),
        ({"reference": "refresh", "refresh_every": 5, "ema": 0.1}, "refresh needs kl.refresh_every"),
        ({"reference": "ema"}, "ema needs kl.ema, the policy's share"),
        ({"reference": "ema", "ema": 1.0}, "less than 1"),
    ],
)
def test_a_reference_that_is_half_described_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        KLSection(beta=0.1, **keys)
    assert caught.value.error_count() == 1


def test_when_the_reference_changes() -> None:
    assert KLSection(beta=0.1).every is None
    assert KLSection(beta=0.1, reference="refresh", refresh_every=5).every == 5
    assert KLSection(beta=0.1, reference="ema", ema=0.1).every == 1
    assert KLSection(beta=0.1, reference="ema", ema=0.1, refresh_every=3).every == 3
    assert KLSection(beta=0, reference="ema", ema=0.1).every is None  # nothing is loaded that could change
