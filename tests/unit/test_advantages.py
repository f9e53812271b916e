"""Rewards to advantages: hand-worked values, slow loops from the formulas, and what must not change them."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms.advantages import ADVANTAGES, assign_advantages
from grpo_dist.config import AdvantageName, AlgorithmSection
from grpo_dist.errors import GrpoDistError
from grpo_dist.types import Completion, Verdict
from tests.unit.samples import completion, group

NAN = float("nan")
GLOBAL_BASELINE = {"reinforce_pp"}  # a group of equal rewards is not 0 by design


def advantages(name: str, rewards: list[float], groups: list[int] | None = None, **options: int) -> list[float]:
    ids = np.asarray(groups if groups is not None else [0] * len(rewards))
    return ADVANTAGES[name](np.asarray(rewards, dtype=np.float64), ids, **options).tolist()


def test_the_recipe_lists_exactly_the_registry() -> None:
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)


# --- values worked out by hand --------------------------------------------------------------------------------------

# Two groups: [1, 0, 0, 0] has mean 1/4, std sqrt(3)/4; [1, 1, 0, 0] has mean 1/2, std 1/2.
# The batch has mean 3/8 and std sqrt(15)/8. Centred rewards: squares 9/16 + 3/16, 4/4; mean over 8: 7/32.
REWARDS, GROUPS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1, 1, 1]
BATCH, CENTRED = math.sqrt(15) / 8, math.sqrt(7 / 32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [math.sqrt(3), *[-1 / math.sqrt(3)] * 3, 1, 1, -1, -1]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ("batch_std", [v / BATCH for v in (0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5)]),
        ("reinforce_pp", [(v - 0.375) / BATCH for v in REWARDS]),
        ("reinforce_pp_baseline", [v / CENTRED for v in (0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5)]),
        ("maxrl", [3, -1, -1, -1, 1, 1, -1, -1]),
        # k = 2 of 4: of the 6 pairs, the one right answer gains 1 in 3 (1/2); two right ones gain 1 in 2 each (1/3).
        ("pass_at_k", [0.5, 0, 0, 0, 1 / 3, 1 / 3, 0, 0]),
    ],
)
def test_worked_out_by_hand(name: str, expected: list[float]) -> None:
    options = {"k": 2} if name == "pass_at_k" else {}
    assert advantages(name, REWARDS, GROUPS, **options) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.3] * 6, [1 / 3] * 7, [1e-12] * 5, [1e6 + 0.1] * 9, [0.0] * 4])
def test_equal_rewards_give_exactly_zero(name: str, rewards: list[float]) -> None:
    assert advantages(name, rewards) == [0.0] * len(rewards)


def test_rewards_that_differ_by_the_rounding_of_a_weighted_sum_are_equal() -> None:
    assert 0.1 + 0.2 != 0.3
    assert advantages("grpo", [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]) == [0.0] * 4


def test_rewards_that_differ_by_little_are_not_equal() -> None:
    assert advantages("grpo", [1.0, 1.0 + 1e-9]) == pytest.approx([-1, 1])
    assert advantages("grpo", [0.0, 1e-300]) == pytest.approx([-1, 1])
    assert advantages("grpo", [-1e200, 1e200]) == pytest.approx([-1, 1])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("missing", [NAN, math.inf, -math.inf])
def test_a_reward_that_is_missing_is_masked_and_poisons_nobody(name: str, missing: float) -> None:
    with_it = advantages(name, [1.0, missing, 0.0, 0.0])
    without = advantages(name, [1.0, 0.0, 0.0])
    assert with_it == [without[0], 0.0, *without[1:]]


def test_mean_and_std_of_a_group_leave_out_the_masked() -> None:
    assert advantages("grpo", [1.0, NAN, 0.0, 0.0]) == pytest.approx(
        [math.sqrt(2), 0, -math.sqrt(0.5), -math.sqrt(0.5)]
    )


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - GLOBAL_BASELINE))
def test_a_group_of_one_gives_zero(name: str) -> None:
    assert advantages(name, [1.0]) == [0.0]
    assert advantages(name, [1.0, NAN, NAN, NAN, 0.0, 1.0], [0, 0, 0, 0, 1, 1])[:4] == [0.0] * 4


def test_everything_masked_and_nothing_at_all() -> None:
    for name in ADVANTAGES:
        assert advantages(name, [NAN, NAN]) == [0.0, 0.0]
        assert advantages(name, []) == []


def test_a_group_with_spread_is_not_shifted_by_the_rest_of_the_batch() -> None:
    assert advantages("grpo", [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]) == [1.0, -1.0, 0.0, 0.0]


def test_a_global_baseline_keeps_groups_of_equal_rewards() -> None:
    # Batch [1, 0, 1, 1]: mean 3/4, std sqrt(3)/4.
    third = 1 / math.sqrt(3)
    assert advantages("reinforce_pp", [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]) == pytest.approx(
        [third, -math.sqrt(3), third, third]
    )


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(GrpoDistError, match="may be negative; got -1"):
        advantages("maxrl", [-1.0, 1.0])


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 rewards, but 3 group ids"):
        advantages("grpo", [1.0, 0.0], [0, 0, 0])


# --- slow loops from the formulas -----------------------------------------------------------------------------------


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def best_of_k(i: int, rewards: dict[int, float], k: int) -> float:
    subsets = list(itertools.combinations(rewards, min(k, len(rewards))))
    gains = [max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in subsets if i in s]
    return sum(gains) / len(subsets)


def slow(name: str, rewards: list[float], groups: list[int], k: int) -> list[float]:
    known = {i: r for i, r in enumerate(rewards) if math.isfinite(r)}
    everyone = list(known.values())
    own = {i: {j: q for j, q in known.items() if groups[j] == groups[i]} for i in known}
    mean = {i: sum(peers.values()) / len(peers) for i, peers in own.items()}
    centred = [r - mean[i] for i, r in known.items()]
    out = [0.0] * len(rewards)
    for i, r in known.items():
        peers = list(own[i].values())
        if len(set(everyone if name == "reinforce_pp" else peers)) < 2:
            continue
        match name:
            case "grpo":
                out[i] = (r - mean[i]) / std(peers)
            case "dr_grpo":
                out[i] = r - mean[i]
            case "rloo":
                out[i] = r - (sum(peers) - r) / (len(peers) - 1)
            case "batch_std":
                out[i] = (r - mean[i]) / std(everyone)
            case "reinforce_pp":
                out[i] = (r - sum(everyone) / len(everyone)) / std(everyone)
            case "reinforce_pp_baseline":
                out[i] = (r - mean[i]) / std(centred)
            case "maxrl":
                out[i] = (r - mean[i]) / mean[i]
            case "pass_at_k":
                out[i] = best_of_k(i, own[i], k)
            case _:
                raise AssertionError(name)
    return out


reward = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, NAN]), st.integers(0, 1000).map(lambda i: i / 8))
batches = st.lists(st.tuples(reward, st.integers(0, 3)), min_size=1, max_size=20)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(batch=batches, k=st.integers(2, 5))
def test_equals_a_slow_loop_written_from_the_formula(name: str, batch: list[tuple[float, int]], k: int) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    options = {"k": k} if name == "pass_at_k" else {}
    assert advantages(name, rewards, groups, **options) == pytest.approx(slow(name, rewards, groups, k), abs=1e-9)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(batch=batches, data=st.data())
def test_order_of_samples_and_names_of_groups_do_not_matter(
    name: str, batch: list[tuple[float, int]], data: st.DataObject
) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    order = data.draw(st.permutations(range(len(batch))))
    renamed = data.draw(st.permutations(range(4)))
    plain = advantages(name, rewards, groups)
    moved = advantages(name, [rewards[i] for i in order], [renamed[groups[i]] for i in order])
    assert moved == pytest.approx([plain[i] for i in order], abs=1e-9)


@given(batch=batches, shift=st.integers(-100, 100), scale=st.sampled_from([0.25, 0.6, 3.0, 1e3]))
def test_group_normalised_advantages_ignore_shift_and_scale_of_rewards(
    batch: list[tuple[float, int]], shift: int, scale: float
) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    moved = advantages("grpo", [r * scale + shift for r in rewards], groups)
    assert moved == pytest.approx(advantages("grpo", rewards, groups), abs=1e-6)


@given(rewards=st.lists(st.integers(0, 50).map(lambda i: i / 7), min_size=2, max_size=30))
def test_group_normalised_advantages_have_mean_zero_and_unit_variance(rewards: list[float]) -> None:
    found = np.asarray(advantages("grpo", rewards))
    assert abs(found.mean()) < 1e-12
    assert found.var() == pytest.approx(1.0 if len(set(rewards)) > 1 else 0.0, abs=1e-12)


# --- from groups to samples -----------------------------------------------------------------------------------------

GRPO = AlgorithmSection(advantage="grpo")


def test_identical_prompts_with_different_answers_stay_two_groups_in_any_order() -> None:
    first, second = group([1.0, 0.0], group_id=7, prompt="same"), group([1.0, 1.0], group_id=9, prompt="same")
    in_order = {(s.group_id, s.index): s.advantages.tolist() for s in assign_advantages([first, second], GRPO)}
    swapped = {(s.group_id, s.index): s.advantages.tolist() for s in assign_advantages([second, first], GRPO)}
    assert in_order == swapped
    assert [in_order[7, 0][-1], in_order[7, 1][-1], in_order[9, 0][-1], in_order[9, 1][-1]] == [1, -1, 0, 0]


def test_a_sample_holds_prompt_and_completion_and_trains_on_the_completion_alone() -> None:
    (sample, _) = assign_advantages([group([1.0, 0.0])], GRPO)
    assert sample.token_ids.tolist() == [1, 2, 10, 11, 12]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert sample.behavior_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3])
    assert sample.advantages.tolist() == [0, 0, 1, 1, 1]


def test_the_mask_goes_by_position_so_a_stop_token_that_is_also_the_pad_token_trains() -> None:
    pad = stop = 0
    ends = [Completion((5,) * (n - 1) + (stop,), (-0.1,) * n, "", "stop", ()) for n in (3, 6)]
    samples = assign_advantages([group([1.0, 0.0], completions=ends)], GRPO)
    assert [int(s.loss_mask.sum()) for s in samples] == [3, 6]
    assert all(s.token_ids[-1] == pad and s.loss_mask[-1] for s in samples)


def test_a_failed_verdict_masks_its_sample_and_is_not_a_zero() -> None:
    samples = assign_advantages([group([1.0, None, 0.0, NAN])], GRPO)
    assert [bool(s.loss_mask.any()) for s in samples] == [True, False, True, False]
    assert [float(s.advantages[-1]) for s in samples] == [1, 0, -1, 0]
    assert not samples[1].behavior_logprobs.any()


def test_an_aborted_completion_trains_nothing_and_counts_for_nothing() -> None:
    parts = [completion(), completion(), completion(2, finish="abort")]
    samples = assign_advantages([group([1.0, 0.0, 5.0], completions=parts)], GRPO)
    assert [s.advantages[-1] for s in samples] == [1, -1, 0]
    assert not samples[2].loss_mask.any()


def test_a_completion_without_tokens_counts_in_its_group_and_reaches_no_token() -> None:
    parts = [completion(0), completion(1), completion(2), completion(2)]
    samples = assign_advantages([group([10.0, 0.0, 0.0, 0.0], completions=parts)], GRPO)
    assert [len(s.token_ids) for s in samples] == [2, 3, 4, 4]
    assert not samples[0].loss_mask.any()
    assert not samples[0].advantages.any()
    assert [float(s.advantages[-1]) for s in samples[1:]] == pytest.approx([-1 / math.sqrt(3)] * 3)


def test_logprobs_must_cover_the_completion() -> None:
    broken = Completion((5, 6, 7), (-0.1, -0.2), "", "stop", ())
    with pytest.raises(ValueError, match=r"3 token_ids, but 2 logprobs \(group 4, 0\)"):
        assign_advantages([group([1.0, 0.0], group_id=4, completions=[broken, broken])], GRPO)


def test_no_groups_give_no_samples() -> None:
    assert assign_advantages([], GRPO) == []


def test_k_of_pass_at_k_comes_from_the_recipe() -> None:
    samples = assign_advantages([group([1.0, 0.0, 0.0, 0.0])], AlgorithmSection(advantage="pass_at_k", pass_k=2))
    assert [float(s.advantages[-1]) for s in samples] == [0.5, 0, 0, 0]


def test_rewards_of_groups_in_order() -> None:
    verdicts = [Verdict(1.0), Verdict(None, error="timeout")]
    groups = [group([0.5, 0.25]), group([0, 0], verdicts=verdicts)]
    assert [r for g in groups for r in g.rewards] == pytest.approx([0.5, 0.25, 1.0, NAN], nan_ok=True)
