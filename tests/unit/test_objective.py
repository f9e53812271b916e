"""The loss: values by hand, a slow loop from the formulas, finite differences, and what must not change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_dist.algorithms.objective import DIVISORS, OBJECTIVES, LossInputs, policy_loss, token_weights
from grpo_dist.algorithms.surrogates import TokenTerms
from grpo_dist.config import AlgorithmSection, DivisorName, ObjectiveName
from grpo_dist.metrics import Stats, merge_stats, stat_values


@dataclass(frozen=True)
class Sequence_:
    """One sequence, as plain floats. Prompt tokens have mask False."""

    logprobs: list[float]
    old: list[float]
    behavior: list[float]
    reference: list[float]
    advantage: float
    mask: list[bool]
    entropy: list[float] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        return [i for i, m in enumerate(self.mask) if m]


def pack(sequences: Sequence[Sequence_], dtype: torch.dtype = torch.float64) -> LossInputs:
    def flat(name: str) -> Tensor:
        return torch.tensor([v for s in sequences for v in getattr(s, name)], dtype=dtype)

    mask = torch.tensor([m for s in sequences for m in s.mask], dtype=torch.bool)
    return LossInputs(
        logprobs=flat("logprobs").requires_grad_(),
        advantages=torch.tensor([s.advantage for s in sequences for _ in s.mask], dtype=dtype),
        mask=mask,
        segment_ids=torch.tensor([i for i, s in enumerate(sequences) for _ in s.mask], dtype=torch.int64),
        old_logprobs=flat("old"),
        behavior_logprobs=flat("behavior"),
        reference_logprobs=flat("reference"),
        entropy=flat("entropy").requires_grad_(),
    )


def counts(sequences: Sequence[Sequence_]) -> dict[str, int]:
    return {
        "loss_tokens": sum(len(s.trained) for s in sequences),
        "loss_sequences": sum(bool(s.trained) for s in sequences),
    }


def loss_and_gradient(inputs: LossInputs, algorithm: AlgorithmSection, **divisor: int) -> tuple[Tensor, Tensor, Stats]:
    loss, stats = policy_loss(inputs, algorithm, **divisor)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss, gradient, stats


def random_sequences(
    seed: int, lengths: Sequence[tuple[int, int]] = ((2, 3), (1, 5), (3, 1), (2, 2))
) -> list[Sequence_]:
    """(prompt, completion) lengths; log-ratios wide enough that every bound is met."""
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int, scale: float) -> list[float]:
        return (torch.randn(n, generator=generator, dtype=torch.float64) * scale).tolist()

    out = []
    for prompt, trained in lengths:
        n = prompt + trained
        old = [-1 - abs(v) for v in noise(n, 1)]
        out.append(
            Sequence_(
                logprobs=[o + d for o, d in zip(old, noise(n, 0.4), strict=True)],
                old=old,
                behavior=[o + d for o, d in zip(old, noise(n, 0.5), strict=True)],
                reference=[o + d for o, d in zip(old, noise(n, 0.8), strict=True)],
                advantage=noise(1, 1)[0],
                mask=[False] * prompt + [True] * trained,
                entropy=[abs(v) for v in noise(n, 1)],
            )
        )
    return out


def section(**keys: Any) -> AlgorithmSection:
    return AlgorithmSection(**({"divisor_tokens": 7, "old_logprobs": "learner"} | keys))


def test_the_recipe_lists_exactly_the_registries() -> None:
    assert set(get_args(ObjectiveName)) == set(OBJECTIVES)
    assert set(get_args(DivisorName)) == set(DIVISORS)


# --- worked out by hand ---------------------------------------------------------------------------------------------


def one_token(ratio: float, advantage: float, **keys: Any) -> tuple[float, float, dict[str, float]]:
    """(objective, its gradient by the log-probability, metrics) of a single token; the objective is minus the loss."""
    inputs = LossInputs(
        logprobs=torch.tensor([0.0, math.log(ratio)], dtype=torch.float64, requires_grad=True),
        advantages=torch.tensor([0.0, advantage], dtype=torch.float64),
        mask=torch.tensor([False, True]),
        segment_ids=torch.tensor([0, 0]),
        old_logprobs=torch.zeros(2, dtype=torch.float64),
    )
    loss, gradient, stats = loss_and_gradient(inputs, section(**keys), loss_tokens=1, loss_sequences=1)
    return -loss.item(), -gradient[1].item(), stat_values(stats)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "low", "high"),
    [
        (1.0, 2.0, 2.0, 2.0, 0, 0),
        (1.25, 2.0, 2.5, 2.5, 0, 0),  # under 1 + 0.3
        (1.5, 2.0, 2.6, 0.0, 0, 1),
        (0.5, 2.0, 1.0, 1.0, 0, 0),  # the lower bound does not hold back a good token
        (0.5, -2.0, -1.6, 0.0, 1, 0),
        (0.9, -2.0, -1.8, -1.8, 0, 0),
        (5.0, -2.0, -10.0, -10.0, 0, 0),  # nor the upper one a bad token
        (5.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_clip(ratio: float, advantage: float, value: float, gradient: float, low: float, high: float) -> None:
    found = one_token(ratio, advantage, objective="clip", clip_low=0.2, clip_high=0.3)
    assert found[:2] == pytest.approx((value, gradient))
    assert found[2]["train/clip_low_fraction"] == low
    assert found[2]["train/clip_high_fraction"] == high
    assert found[2]["train/clip_fraction"] == low + high


def test_the_two_bounds_are_separate() -> None:
    assert one_token(1.25, 1.0, clip_low=0.2, clip_high=0.28)[0] == pytest.approx(1.25)
    assert one_token(1.25, 1.0, clip_low=0.28, clip_high=0.2)[0] == pytest.approx(1.2)
    assert one_token(0.75, -1.0, clip_low=0.28, clip_high=0.2)[0] == pytest.approx(-0.75)
    assert one_token(0.75, -1.0, clip_low=0.2, clip_high=0.28)[0] == pytest.approx(-0.8)


@pytest.mark.parametrize("objective", ["clip", "gspo", "sequence_ratio"])
def test_dual_clip_bounds_what_a_bad_token_can_cost(objective: str) -> None:
    assert one_token(5.0, -2.0, objective=objective, clip_dual=3.0)[:2] == pytest.approx((-6.0, 0.0))
    assert one_token(2.5, -2.0, objective=objective, clip_dual=3.0)[:2] == pytest.approx((-5.0, -5.0))
    assert one_token(5.0, 2.0, objective=objective, clip_dual=3.0)[0] == pytest.approx(2.4)
    assert one_token(5.0, -2.0, objective=objective, clip_dual=3.0)[2]["train/clip_high_fraction"] == 1


def test_cispo_clips_the_weight_and_never_the_gradient() -> None:
    for ratio, weight in ((0.5, 0.8), (1.1, 1.1), (9.0, 1.3)):
        value, gradient, _ = one_token(ratio, -2.0, objective="cispo", clip_low=0.2, clip_high=0.3)
        assert gradient == pytest.approx(-2 * weight)
        assert value == pytest.approx(-2 * weight * math.log(ratio))
    assert one_token(0.01, 1.0, objective="cispo", clip_low=1.0)[1] == pytest.approx(0.01)


def test_sapo_gates_softly() -> None:
    value, gradient, _ = one_token(1.0, 1.0, objective="sapo")
    assert (value, gradient) == pytest.approx((2.0, 1.0))  # 4 sigmoid(0), and the on-policy gradient of rho A
    value, gradient, _ = one_token(2.0, -1.0, objective="sapo", sapo_tau_negative=2.0)
    gate = 1 / (1 + math.exp(-2.0))
    assert value == pytest.approx(-2 * gate)
    assert gradient == pytest.approx(-4 * gate * (1 - gate) * 2.0)


def test_reinforce_ignores_the_ratio() -> None:
    value, gradient, _ = one_token(3.0, -2.0, objective="reinforce")
    assert (value, gradient) == pytest.approx((-2 * math.log(3), -2.0))


def two_tokens(objective: str, ratios: tuple[float, float], advantage: float, **keys: Any) -> float:
    sequence = Sequence_(
        [math.log(r) for r in ratios], [0.0] * 2, [0.0] * 2, [0.0] * 2, advantage, [True] * 2, [0.0] * 2
    )
    algorithm = section(objective=objective, divisor="sequence", **keys)
    return -policy_loss(pack([sequence]), algorithm, loss_tokens=2, loss_sequences=1)[0].item()


def test_sequence_objectives_take_the_mean_or_the_product_of_ratios() -> None:
    # Ratios 2 and 1/2: the product and the geometric mean are 1. Ratios 4 and 1: 4 and 2, both over 1.2.
    assert two_tokens("gspo", (2.0, 0.5), 3.0) == pytest.approx(3.0)
    assert two_tokens("sequence_ratio", (2.0, 0.5), 3.0) == pytest.approx(3.0)
    assert two_tokens("gspo", (4.0, 1.0), -3.0) == pytest.approx(-6.0)
    assert two_tokens("sequence_ratio", (4.0, 1.0), -3.0) == pytest.approx(-12.0)
    assert two_tokens("gspo", (4.0, 1.0), 3.0) == pytest.approx(3.6)


def test_gmpo_clips_each_log_ratio_on_the_side_of_the_advantage() -> None:
    # Bounds of log rho -0.3 and 0.4. A > 0: log 4 is cut to 0.4, log 1/4 stays; A < 0: the other way round.
    keys = {"clip_low": 0.3, "clip_high": 0.4}
    assert two_tokens("gmpo", (4.0, 0.25), 2.0, **keys) == pytest.approx(2 * math.exp((0.4 - math.log(4)) / 2))
    assert two_tokens("gmpo", (4.0, 0.25), -2.0, **keys) == pytest.approx(-2 * math.exp((math.log(4) - 0.3) / 2))


# --- divisors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("divisor", "short", "long"),
    [("token", 1 / 10, 1 / 10), ("sequence", 1 / 4, 1 / 16), ("constant", 1 / 32, 1 / 32)],
)
def test_what_a_token_of_a_short_and_of_a_long_sample_weighs(divisor: str, short: float, long: float) -> None:
    """Two samples of 2 and 8 tokens, constant 16: the table in docs/algorithms.md."""
    mask = torch.ones(10, dtype=torch.bool)
    zeros, ids = torch.zeros(10, dtype=torch.float64), torch.tensor([0] * 2 + [1] * 8)
    terms = TokenTerms(zeros, zeros, zeros, mask, ids, torch.tensor([2, 8]))
    weights = token_weights(terms, section(divisor=divisor, divisor_tokens=16), loss_tokens=10, loss_sequences=2)
    assert weights.tolist() == pytest.approx([short] * 2 + [long] * 8)


def test_one_token_of_4_and_three_of_0_weigh_the_same_in_any_split() -> None:
    """Micro-batches of 1 and 3 tokens: the mean of means would be 2, the right gradient is 4 / 4 = 1."""

    def part(advantages: list[float]) -> LossInputs:
        n = len(advantages)
        return LossInputs(
            logprobs=torch.zeros(n, requires_grad=True),
            advantages=torch.tensor(advantages),
            mask=torch.ones(n, dtype=torch.bool),
            segment_ids=torch.zeros(n, dtype=torch.int64),
        )

    for split in ([[4.0], [0.0, 0.0, 0.0]], [[4.0, 0.0, 0.0, 0.0]], [[4.0], [0.0], [0.0], [0.0]]):
        gradients = [loss_and_gradient(part(p), section(), loss_tokens=4, loss_sequences=2)[1] for p in split]
        assert sum(float(-g.sum()) for g in gradients) == 1.0


def test_a_constant_divisor_needs_its_constant() -> None:
    with pytest.raises(ValueError, match="divisor_tokens"):
        policy_loss(pack(random_sequences(0)), AlgorithmSection(divisor="constant"), loss_tokens=1, loss_sequences=1)


# --- slow loops from the formulas -----------------------------------------------------------------------------------


def clip_to(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def slow_surrogate(
    s: Sequence_, base: Sequence_, t: int, advantage: float, old: list[float], a: AlgorithmSection
) -> float:
    """Objective of token t. ``base`` has the values at which gradients are stopped."""
    logs = {i: s.logprobs[i] - old[i] for i in s.trained}
    low, high = 1 - a.clip_low, 1 + a.clip_high
    match a.objective:
        case "clip":
            ratio = math.exp(logs[t])
        case "gspo":
            ratio = math.exp(sum(logs.values()) / len(logs))
        case "sequence_ratio":
            ratio = math.exp(sum(logs.values()))
        case "cispo":
            return clip_to(math.exp(base.logprobs[t] - old[t]), low, high) * advantage * s.logprobs[t]
        case "sapo":
            tau = a.sapo_tau_positive if advantage > 0 else a.sapo_tau_negative
            return 4 / tau / (1 + math.exp(-tau * (math.exp(logs[t]) - 1))) * advantage
        case "gmpo":
            side = [min(x, a.clip_high) if advantage > 0 else max(x, -a.clip_low) for x in logs.values()]
            return math.exp(sum(side) / len(side)) * advantage
        case _:
            return advantage * s.logprobs[t]
    value = min(ratio * advantage, clip_to(ratio, low, high) * advantage)
    return max(value, a.clip_dual * advantage) if a.clip_dual is not None and advantage < 0 else value


def slow_correction(s: Sequence_, base: Sequence_, t: int, a: AlgorithmSection) -> float:
    gaps = {i: s.old[i] - s.behavior[i] for i in s.trained}
    ratios = {
        "none": 1.0,
        "token": math.exp(gaps[t]),
        "sequence": math.exp(sum(gaps.values())),
        "geometric": math.exp(sum(gaps.values()) / len(gaps)),
    }
    c = a.correction
    if c.mask != "none" and not c.low <= ratios[c.mask] <= c.high:
        return 0.0
    drift = sum(base.behavior[i] - base.logprobs[i] for i in base.trained) / len(base.trained)
    if c.negative_limit is not None and s.advantage < 0 and drift > c.negative_limit:
        return 0.0
    return min(ratios[c.weight], c.cap) if c.weight != "none" else 1.0


def slow_kl(s: Sequence_, t: int, old: list[float], estimator: str) -> float:
    x = s.reference[t] - s.logprobs[t]
    third = math.exp(x) - x - 1
    return {"k1": -x, "k2": x * x / 2, "k3": third, "unbiased": math.exp(s.logprobs[t] - old[t]) * third}[estimator]


def slow_loss(sequences: Sequence[Sequence_], base: Sequence[Sequence_], a: AlgorithmSection) -> float:
    tokens = sum(len(s.trained) for s in sequences)
    count = sum(bool(s.trained) for s in sequences)
    total = 0.0
    for s, b in zip(sequences, base, strict=True):
        old = s.behavior if a.old_logprobs == "engine" else s.old
        for t in s.trained:
            advantage = s.advantage
            if a.kl.place == "reward":
                advantage -= a.kl.beta * sum(s.old[i] - s.reference[i] for i in s.trained if i >= t)
            value = slow_surrogate(s, b, t, advantage, old, a) * slow_correction(s, b, t, a)
            if a.kl.place == "loss":
                value -= a.kl.beta * slow_kl(s, t, old, a.kl.estimator)
            value += a.entropy_bonus * s.entropy[t]
            divisor = {"token": tokens, "sequence": len(s.trained) * count, "constant": (a.divisor_tokens or 0) * count}
            total -= value / divisor[a.divisor]
    return total


SETTINGS = [
    *({"objective": o, "divisor": d} for o in OBJECTIVES for d in DIVISORS),
    *({"objective": o, "clip_low": 0.15, "clip_high": 0.35} for o in OBJECTIVES),
    *({"objective": o, "clip_dual": 1.3} for o in ("clip", "gspo", "sequence_ratio")),
    *({"objective": o, "old_logprobs": "engine"} for o in OBJECTIVES),
    *({"kl": {"beta": 0.3, "estimator": e}} for e in ("k1", "k2", "k3", "unbiased")),
    *(
        {"objective": o, "kl": {"beta": 0.3, "place": "reward"}, "divisor": "sequence"}
        for o in OBJECTIVES
        if o != "gmpo"
    ),
    {"entropy_bonus": 0.2, "divisor": "constant"},
    *({"correction": c} for c in ("tis", "seq_tis", "icepop", "seq_mis", "geo_mask")),
    *({"objective": o, "correction": {"preset": "tis", "cap": 1.1}} for o in OBJECTIVES),
    {"correction": {"mask": "geometric", "low": 0.9, "high": 1.3, "weight": "token", "cap": 1.2}},
    {"correction": {"mask": "token", "low": 0.8, "high": 1.25}},
    {"correction": {"negative_limit": 0.05}},
]


@pytest.mark.parametrize("keys", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_a_slow_loop_in_value_and_by_finite_differences_in_gradient(keys: dict[str, Any], seed: int) -> None:
    sequences, algorithm = random_sequences(seed), section(**keys)
    inputs = pack(sequences)
    loss, gradient, _ = loss_and_gradient(inputs, algorithm, **counts(sequences))
    assert loss.item() == pytest.approx(slow_loss(sequences, sequences, algorithm), rel=1e-9, abs=1e-12)
    position, step = 0, 1e-6
    for i, s in enumerate(sequences):
        for t in range(len(s.mask)):

            def moved(by: float, i: int = i, t: int = t, s: Sequence_ = s) -> float:
                changed = replace(s, logprobs=[v + by * (j == t) for j, v in enumerate(s.logprobs)])
                return slow_loss([*sequences[:i], changed, *sequences[i + 1 :]], sequences, algorithm)

            slope = (moved(step) - moved(-step)) / (2 * step)
            assert gradient[position].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)
            position += 1


def test_the_entropy_bonus_reaches_the_entropy() -> None:
    sequences = random_sequences(0)
    inputs = pack(sequences)
    loss, _ = policy_loss(inputs, section(entropy_bonus=0.5), **counts(sequences))
    (gradient,) = torch.autograd.grad(loss, inputs.entropy)
    assert gradient.tolist() == pytest.approx([-0.5 / 11 if m else 0.0 for s in sequences for m in s.mask])


# --- what must not change the loss ----------------------------------------------------------------------------------

ALL_ON = {"kl": {"beta": 0.1}, "correction": "icepop", "entropy_bonus": 0.01}
shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)).filter(lambda n: sum(n) > 0), min_size=1, max_size=6)


@pytest.mark.parametrize("divisor", sorted(DIVISORS))
@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@given(lengths=shapes, seed=st.integers(0, 99), data=st.data())
@settings(max_examples=15)
def test_any_split_and_order_of_samples_gives_the_same_loss_gradient_and_metrics(
    objective: str, divisor: str, lengths: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    sequences = random_sequences(seed, lengths)
    algorithm = section(objective=objective, divisor=divisor, **ALL_ON)
    whole_loss, whole_gradient, whole_stats = loss_and_gradient(pack(sequences), algorithm, **counts(sequences))
    starts = [sum(map(sum, lengths[:i])) for i in range(len(lengths))]

    order = data.draw(st.permutations(range(len(sequences))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]  # some of them empty
    total, gradient, stats = 0.0, torch.zeros_like(whole_gradient), []
    for part in parts:
        loss, own, measured = loss_and_gradient(pack([sequences[i] for i in part]), algorithm, **counts(sequences))
        total += loss.item()
        stats.append(measured)
        for i, piece in zip(part, own.split([sum(lengths[i]) for i in part]), strict=True):
            gradient[starts[i] : starts[i] + len(piece)] = piece
    assert total == pytest.approx(whole_loss.item(), rel=1e-9, abs=1e-12)
    assert torch.allclose(gradient, whole_gradient, rtol=1e-9, atol=1e-12)
    assert stat_values(merge_stats(stats)) == pytest.approx(stat_values(whole_stats), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_whatever_stands_off_the_mask_is_ignored(objective: str, garbage: float) -> None:
    sequences, algorithm = random_sequences(3), section(objective=objective, **ALL_ON)
    clean = pack(sequences)

    def spoil(values: Tensor | None) -> Tensor:
        assert values is not None
        return torch.where(clean.mask, values.detach(), garbage)

    dirty = replace(
        clean,
        logprobs=spoil(clean.logprobs).requires_grad_(),
        advantages=spoil(clean.advantages),
        old_logprobs=spoil(clean.old_logprobs),
        behavior_logprobs=spoil(clean.behavior_logprobs),
        reference_logprobs=spoil(clean.reference_logprobs),
        entropy=spoil(clean.entropy).requires_grad_(),
    )
    expected = loss_and_gradient(clean, algorithm, **counts(sequences))
    found = loss_and_gradient(dirty, algorithm, **counts(sequences))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert stat_values(found[2]) == stat_values(expected[2])


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 100.0, -100.0])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_loss_and_gradient_are_finite_for_any_log_ratio(
    objective: str, advantage: float, log_ratio: float, place: str
) -> None:
    place = "loss" if objective == "gmpo" else place
    zeros = [0.0] * 3
    sequence = Sequence_([0.0, log_ratio, 0.1], zeros, zeros, zeros, advantage, [False, True, True], zeros)
    keys = {"kl": {"beta": 0.1, "place": place, "estimator": "unbiased"}, "correction": "icepop"}
    inputs = pack([sequence], torch.float32)
    loss, gradient, stats = loss_and_gradient(
        inputs, section(objective=objective, **keys), loss_tokens=2, loss_sequences=1
    )
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(v) for v in stat_values(stats).values())
    whole_sequence = objective in ("gspo", "sequence_ratio")
    if objective != "gmpo" or advantage * log_ratio < 0:  # gmpo clips before it takes the mean
        assert stat_values(stats)["train/clamped_tokens"] == (2 if whole_sequence or objective == "gmpo" else 1)


@pytest.mark.parametrize("log_gap", [1e4, -1e4])
@pytest.mark.parametrize("correction", ["tis", "seq_tis", "icepop", "seq_mis", "geo_mask"])
def test_corrections_and_mismatch_are_finite_for_any_gap(log_gap: float, correction: str) -> None:
    zeros = [0.0] * 3
    sequence = Sequence_([0.0] * 3, zeros, [0.0, log_gap, 0.0], zeros, 1.0, [True] * 3, zeros)
    loss, gradient, stats = loss_and_gradient(
        pack([sequence], torch.float32), section(correction=correction), loss_tokens=3, loss_sequences=1
    )
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(math.isfinite(v) for v in stat_values(stats).values())


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_nothing_to_train_yields_a_zero_that_can_be_back_propagated(objective: str) -> None:
    masked = [replace(s, mask=[False] * len(s.mask)) for s in random_sequences(0)]
    for sequences in ([], masked):
        inputs = pack(sequences)
        loss, gradient, stats = loss_and_gradient(
            inputs, section(objective=objective, **ALL_ON), loss_tokens=9, loss_sequences=2
        )
        assert loss.item() == 0
        assert not gradient.any()
        assert set(stat_values(stats)) == {"train/loss", "train/policy_loss", "train/clamped_tokens"}
    loss, gradient, _ = loss_and_gradient(pack(masked), section(objective=objective), loss_tokens=0, loss_sequences=0)
    assert loss.item() == 0
    assert not gradient.any()


# --- the first update of a step, metrics, refusals ------------------------------------------------------------------


@pytest.mark.parametrize("objective", sorted(set(OBJECTIVES) - {"sapo", "reinforce", "cispo"}))
def test_on_policy_the_ratio_is_exactly_one_the_loss_zero_and_the_gradient_not(objective: str) -> None:
    """Loss 0 at the first step is no fault: advantages of a group sum to 0, and only the gradient moves the weights."""
    pair = [replace(s, advantage=a) for s, a in zip(random_sequences(0, [(1, 4), (2, 4)]), (1.0, -1.0), strict=True)]
    inputs = replace(pack(pair, torch.float32), old_logprobs=None)
    loss, gradient, stats = loss_and_gradient(inputs, section(objective=objective), **counts(pair))
    values = stat_values(stats)
    assert loss.item() == 0
    assert values["train/ratio_max"] == values["train/ratio_min"] == values["train/ratio_mean"] == 1.0
    assert values["train/clip_fraction"] == values["train/clamped_tokens"] == 0
    assert gradient[inputs.mask].abs().min() > 0.1


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_on_policy_every_objective_has_the_gradient_of_the_plain_policy_gradient(objective: str) -> None:
    """Under the sequence divisor, which is the one of the papers of the sequence objectives."""
    sequences = random_sequences(4, [(1, 3), (2, 3)])
    algorithm = section(objective=objective, divisor="sequence")
    inputs = replace(pack(sequences), old_logprobs=None)
    _, gradient, _ = loss_and_gradient(inputs, algorithm, **counts(sequences))
    scale = 3 if objective == "sequence_ratio" else 1  # not normalised by length
    expected = torch.where(inputs.mask, -inputs.advantages * scale / 6, 0.0)
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_metrics_of_a_batch_worked_out_by_hand() -> None:
    half, log2 = 0.5, math.log(2)
    sequence = Sequence_(
        logprobs=[0.0, -1.0, -2.0],
        old=[0.0, -1.0 - log2, -2.0],
        behavior=[0.0, -1.0 - log2, -2.0 - log2],
        reference=[0.0, -1.0 - log2, -2.0],
        advantage=1.0,
        mask=[False, True, True],
        entropy=[9.0, 1.0, 2.0],
    )
    _, stats = policy_loss(pack([sequence]), section(), loss_tokens=2, loss_sequences=1)
    values = stat_values(stats)
    assert values["train/ratio_max"] == pytest.approx(2.0)
    assert values["train/ratio_mean"] == pytest.approx(1.5)
    assert values["train/clip_fraction"] == half
    assert values["train/entropy"] == pytest.approx(1.5)
    assert values["train/kl"] == pytest.approx((half - 1 + log2) / 2)
    assert values["train/loss"] == values["train/policy_loss"] == pytest.approx(-(1.2 + 1.0) / 2)
    assert values["mismatch/logprob_abs_max"] == pytest.approx(log2)
    assert values["mismatch/logprob_abs_mean"] == pytest.approx(log2 / 2)
    assert values["mismatch/ratio_max"] == pytest.approx(2.0)
    # k3 of the engine against the learner: x = 0 at the first token, log 2 at the second.
    assert values["mismatch/kl"] == pytest.approx((2 - 1 - log2) / 2)
    assert values["mismatch/masked_fraction"] == 0


def test_kl_and_mismatch_are_measured_only_when_there_is_something_to_compare_with() -> None:
    sequences = random_sequences(0)
    bare = replace(pack(sequences), reference_logprobs=None, behavior_logprobs=None, entropy=None)
    _, stats = policy_loss(bare, section(), **counts(sequences))
    assert not [name for name in stats if name.startswith("mismatch") or name in ("train/kl", "train/entropy")]
    _, stats = policy_loss(pack(sequences), section(), **counts(sequences))
    assert "train/kl" in stats  # a reference is measured against even at beta 0


def test_mismatch_is_exactly_zero_for_equal_logprobs() -> None:
    sequences = [replace(s, behavior=s.old) for s in random_sequences(5)]
    _, stats = policy_loss(pack(sequences, torch.float32), section(), **counts(sequences))
    values = stat_values(stats)
    assert values["mismatch/logprob_abs_max"] == values["mismatch/kl"] == 0
    assert values["mismatch/ratio_max"] == values["mismatch/weight_mean"] == 1


def test_the_ratio_is_to_the_engine_unless_a_correction_covers_that_way() -> None:
    sequences = random_sequences(0)

    def loss(**keys: Any) -> float:
        return policy_loss(pack(sequences), section(**keys), **counts(sequences))[0].item()

    assert loss(old_logprobs="auto") == loss(old_logprobs="engine") != loss(old_logprobs="learner")
    assert loss(old_logprobs="auto", correction="tis") == loss(old_logprobs="learner", correction="tis")
    without = replace(pack(sequences), behavior_logprobs=None)
    found = policy_loss(without, section(old_logprobs="auto"), **counts(sequences))[0].item()
    assert found == loss(old_logprobs="learner")


def test_gmpo_has_one_advantage_per_completion_so_no_kl_in_the_reward() -> None:
    with pytest.raises(ValueError, match=r"gmpo.*kl\.place"):
        section(objective="gmpo", kl={"beta": 0.1, "place": "reward"})


def test_what_a_setting_needs_and_was_not_given_is_refused() -> None:
    sequences = random_sequences(0)
    for keys, missing, message in (
        ({"kl": {"beta": 0.1}}, {"reference_logprobs": None}, "no reference"),
        ({"entropy_bonus": 0.1}, {"entropy": None}, "no entropy"),
        ({"entropy_bonus": 0.1}, {"entropy": torch.zeros(19)}, "no entropy with a gradient"),
        ({"correction": "tis"}, {"behavior_logprobs": None}, "engine's log-probabilities"),
        ({"old_logprobs": "engine"}, {"behavior_logprobs": None}, "engine's log-probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(replace(pack(sequences), **missing), section(**keys), **counts(sequences))
