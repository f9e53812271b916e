"""Statistics merge exactly, whatever the split; metrics of rollouts and batches by hand."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.data.batching import build_batch
from grpo_dist.metrics import (
    Max,
    Mean,
    Min,
    Quantile,
    Stats,
    Std,
    Sum,
    batch_metrics,
    equal_rewards,
    has_spread,
    merge_stats,
    merge_updates,
    pass_at_k,
    percentile,
    rollout_metrics,
    stat_values,
)
from grpo_dist.types import Verdict
from tests.unit.samples import completion, group, sample


def stats_of(values: list[float]) -> Stats:
    return {
        "sum": Sum(math.fsum(values)),
        "mean": Mean.of(values),
        "max": Max(max(values, default=-math.inf)),
        "min": Min(min(values, default=math.inf)),
        "std": Std.of(values),
        "median": Quantile(0.5, tuple(values)),
    }


def test_a_mean_over_ranks_is_the_mean_over_tokens() -> None:
    ranks = [{"x": Mean.of([1.0] * 2)}, {"x": Mean.of([0.0] * 8)}]
    assert stat_values(merge_stats(ranks)) == {"x": 0.2}  # the mean of the ranks' means is 0.5


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_any_split_merges_to_the_whole(values: list[float], cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    merged = stat_values(merge_stats([stats_of(values[a:b]) for a, b in itertools.pairwise(edges)]))
    assert merged == pytest.approx(stat_values(stats_of(values)), rel=1e-9, abs=1e-6)
    if values:
        assert merged["std"] == pytest.approx(float(np.std(values)), rel=1e-9, abs=1e-6)
        assert merged["median"] == float(np.quantile(values, 0.5))


def test_what_has_no_data_is_left_out() -> None:
    assert stat_values(stats_of([])) == {"sum": 0.0}


def test_std_of_equal_values_is_exactly_zero() -> None:
    assert Std.of([0.1] * 8).value == 0.0
    assert Std.of([0.1] * 3).merge(Std.of([0.1] * 5)).value == 0.0


def test_a_nan_shows_whatever_the_order() -> None:
    for kind in (Max, Min):
        assert math.isnan(kind(math.nan).merge(kind(1.0)).value)
        assert math.isnan(kind(1.0).merge(kind(math.nan)).value)
    assert Max().merge(Max(math.inf)).value == math.inf


def test_kinds_do_not_mix() -> None:
    with pytest.raises(ValueError, match="x: a Sum in one part, a Max in another"):
        merge_stats([{"x": Sum(1)}, {"x": Max(1)}])
    with pytest.raises(ValueError, match="quantile"):
        merge_stats([{"x": Quantile(0.5, (1,))}, {"x": Quantile(0.9, (1,))}])


def test_names_may_be_absent_from_some_parts() -> None:
    assert stat_values(merge_stats([{"a": Sum(1)}, {"b": Sum(2)}, {}])) == {"a": 1, "b": 2}
    assert merge_stats([]) == {}


def test_statistics_travel_between_processes() -> None:
    stats = stats_of([1.0, 2.0])
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_the_loss_of_a_step_with_two_updates_is_their_mean_and_not_their_sum() -> None:
    updates = [
        {"train/loss": Sum(1.0), "train/clamped_tokens": Sum(2), "ratio": Max(2.0), "kl": Mean(3, 1)},
        {"train/loss": Sum(2.0), "train/clamped_tokens": Sum(1), "ratio": Max(1.0), "kl": Mean(1, 3)},
    ]
    wanted = {"train/loss": 1.5, "train/clamped_tokens": 3, "ratio": 2.0, "kl": 1.0}
    assert stat_values(merge_updates(updates)) == wanted
    ranks = merge_stats([merge_updates(updates), merge_updates(updates)])  # each rank has its share of every loss
    assert stat_values(ranks) == {"train/loss": 3, "train/clamped_tokens": 6, "ratio": 2.0, "kl": 1.0}


@pytest.mark.parametrize(
    ("n", "c", "k", "value"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 0, 4, 0), (4, 4, 1, 1), (4, 2, 3, 1)]
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value)


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


def test_pass_at_k_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples, got 4"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="5 of 4 samples"):
        pass_at_k(4, 5, 1)


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 1.0], 0.99) == pytest.approx(0.99)
    assert math.isnan(percentile([], 0.5))
    with pytest.raises(ValueError, match="between 0 and 1"):
        percentile([1.0], 50)


def test_spread_of_a_group() -> None:
    assert not has_spread([0.1] * 8)
    assert not has_spread([0.1 + 0.2, 0.3])
    assert not has_spread([1.0, None, math.nan])
    assert has_spread([1.0, None, 0.0])
    assert equal_rewards([])
    assert equal_rewards([5.0])


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_metrics_of_two_groups_by_hand() -> None:
    first = group(
        [0, 0, 0, 0],
        group_id=0,
        completions=[
            completion(2, versions=[(3, 0, 2)]),
            completion(4, finish="length", versions=[(2, 0, 1), (3, 1, 4)]),
            completion(6, versions=[(3, 0, 6)]),
            completion(0, finish="abort"),
        ],
        verdicts=[
            Verdict(1.0, correct=True, parts={"exact": 1.0, "format": 0.5}, seconds=0.1),
            Verdict(0.0, correct=False, parts={"exact": 0.0}, seconds=0.2),
            Verdict(0.0, parts={"exact": 0.0}, seconds=0.3),
            Verdict(None, error="timeout", seconds=10.0, timed_out=True),
        ],
    )
    second = group([0.1] * 8, group_id=1)
    values = stat_values(rollout_metrics([first, second], current_version=3))
    assert values == pytest.approx(
        {
            "rollout/reward_mean": 1.8 / 11,
            "rollout/reward_std": float(np.std([1.0, 0.0, 0.0] + [0.1] * 8)),
            "rollout/reward_group_std_mean": (math.sqrt(2) / 3 + 0) / 2,
            "rollout/correct_mean": 0.5,
            "rollout/groups": 2,
            "rollout/groups_zero_variance": 1,
            "rollout/zero_variance_fraction": 0.5,
            "rollout/completion_tokens": 12 + 24,
            "rollout/completion_tokens_mean": 3,
            "rollout/completion_tokens_max": 6,
            "rollout/truncated_fraction": 1 / 12,
            "rollout/staleness_mean": (1 + 8 * 3) / 11,
            "rollout/staleness_max": 3,
            "rollout/mixed_version_fraction": 1 / 12,
            "rollout/errors": 1,
            "verify/seconds_p50": 0.0,
            "verify/seconds_p99": percentile([0.1, 0.2, 0.3, 10.0] + [0.0] * 8, 0.99),
            "verify/errors": 1,
            "verify/timeouts": 1,
            "reward/exact_mean": 1 / 3,
            "reward/format_mean": 0.5,
        }
    )


def test_a_group_with_one_verdict_left_has_no_spread() -> None:
    values = stat_values(rollout_metrics([group([1.0, None, None])], 0))
    assert values["rollout/groups_zero_variance"] == 1


def test_no_groups_give_counts_of_zero_and_no_means() -> None:
    values = stat_values(rollout_metrics([], 0))
    assert values["rollout/groups"] == 0
    assert "rollout/reward_mean" not in values


def test_rollout_metrics_of_two_halves_merge_to_those_of_the_whole() -> None:
    groups = [group([1.0, 0.0], group_id=0), group([0.5, 0.5], group_id=1), group([0.0, None], group_id=2)]
    halves = merge_stats([rollout_metrics(groups[:1], 0), rollout_metrics(groups[1:], 0)])
    assert stat_values(halves) == pytest.approx(stat_values(rollout_metrics(groups, 0)))


def test_metrics_of_a_batch() -> None:
    batch = build_batch(
        [sample(6, 4, index=0, advantage=2.0), sample(3, 2, index=1, advantage=-1.0), sample(3, 0, index=2)],
        ranks=2,
        micro_batch_tokens=10,
    )
    assert stat_values(batch_metrics(batch)) == pytest.approx(
        {
            "train/tokens": 6,
            "batch/sequences": 2,
            "batch/packed_tokens": 9,
            "batch/micro_batches": 1,
            "batch/empty_micro_batches": 0,
            "batch/advantage_abs_mean": (4 * 2 + 2 * 1) / 6,
            "batch/imbalance": 6 * 2 / 9,
        }
    )


def test_metrics_of_a_batch_without_samples() -> None:
    values = stat_values(batch_metrics(build_batch([], ranks=2, micro_batch_tokens=8)))
    assert values["train/tokens"] == 0
    assert values["batch/empty_micro_batches"] == 2
    assert "batch/imbalance" not in values
