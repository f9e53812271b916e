"""Samples to packed micro-batches: nothing lost, same count on every rank, even loads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.check import CheckReport, _batch
from grpo_dist.config import Recipe
from grpo_dist.data.batching import build_batch, empty_micro_batch
from grpo_dist.metrics import batch_metrics, stat_values
from grpo_dist.types import MicroBatch, Sample, TrainBatch
from tests.conftest import tiny_recipe
from tests.unit.samples import sample


def members(batch: TrainBatch) -> list[tuple[int, int]]:
    return [
        (int(g), int(i))
        for shard in batch.shards
        for m in shard
        for g, i in zip(m.group_ids, m.sample_indices, strict=True)
    ]


def test_two_samples_packed_end_to_end() -> None:
    batch = build_batch([sample(2, 1, index=1), sample(3, 2, index=0, advantage=2.0)], ranks=1, micro_batch_tokens=8)
    ((micro,),) = batch.shards
    assert micro.token_ids.tolist() == [0, 1, 2, 100, 101]
    assert micro.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert micro.segment_lengths.tolist() == [3, 2]
    assert micro.loss_mask.tolist() == [False, True, True, False, True]
    assert micro.behavior_logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert micro.advantages.tolist() == [0, 2, 2, 0, 1]
    assert micro.group_ids.tolist() == [0, 0]
    assert micro.sample_indices.tolist() == [0, 1]
    assert (batch.loss_tokens, batch.loss_sequences, batch.ranks) == (3, 2, 1)


def test_samples_that_train_nothing_are_left_out_of_batch_and_divisors() -> None:
    batch = build_batch([sample(4, 0, index=0), sample(4, 2, index=1)], ranks=1, micro_batch_tokens=8)
    assert members(batch) == [(0, 1)]
    assert (batch.loss_tokens, batch.loss_sequences) == (2, 1)


def test_a_rank_without_work_gets_as_many_micro_batches_as_the_others() -> None:
    batch = build_batch([sample(4, 2, index=i) for i in range(3)], ranks=2, micro_batch_tokens=4)
    assert [len(shard) for shard in batch.shards] == [2, 2]
    assert sum(m.is_empty for shard in batch.shards for m in shard) == 1
    batch = build_batch([sample(4, 2)], ranks=3, micro_batch_tokens=4)
    assert [[m.is_empty for m in shard] for shard in batch.shards] == [[False], [True], [True]]


@pytest.mark.parametrize("samples", [[], [sample(4, 0)]])
def test_nothing_to_train_is_one_empty_turn_for_each_rank(samples: list[Sample]) -> None:
    batch = build_batch(samples, ranks=2, micro_batch_tokens=8)
    assert [[m.is_empty for m in shard] for shard in batch.shards] == [[True], [True]]
    assert (batch.loss_tokens, batch.loss_sequences) == (0, 0)


def test_an_empty_micro_batch_has_typed_arrays_of_length_zero() -> None:
    empty = empty_micro_batch()
    assert empty.is_empty
    assert empty.token_ids.dtype == empty.position_ids.dtype == empty.segment_lengths.dtype == np.int64
    assert empty.loss_mask.dtype == np.bool_
    assert empty.advantages.dtype == empty.behavior_logprobs.dtype == np.float32
    assert all(len(getattr(empty, name)) == 0 for name in MicroBatch.__slots__)


def test_a_sample_over_the_budget_has_a_micro_batch_of_its_own() -> None:
    batch = build_batch(
        [sample(9, 2, index=0), sample(2, 1, index=1), sample(2, 1, index=2)], ranks=1, micro_batch_tokens=4
    )
    assert sorted(m.segment_lengths.tolist() for m in batch.shards[0]) == [[2, 2], [9]]


@pytest.mark.parametrize(("budget", "warnings"), [(79, 1), (80, 0)])
def test_check_says_when_a_sample_may_exceed_the_budget(budget: int, warnings: int) -> None:
    """64 prompt tokens and 16 of a completion; allowed, because such a sample runs alone, and said, because of memory."""
    report = CheckReport()
    _batch(Recipe.model_validate(tiny_recipe(learner={"micro_batch_tokens": budget})), report)
    assert len(report.warnings) == warnings
    assert all("micro_batch_tokens 79 is below the longest sample (80 tokens)" in text for text in report.warnings)
    assert report.problems == []


def test_check_counts_passes_as_plan_does_and_as_packing_needs_them() -> None:
    """80 tokens a sample at most, so two fit into 200; 3 groups of 4 in two mini-batches: the larger one has 8 samples."""
    keys = {"updates_per_batch": 2, "epochs": 3, "micro_batch_tokens": 200, "ranks": 2}
    recipe = Recipe.model_validate(tiny_recipe(learner=keys, rollout={"groups_per_step": 3}))
    report = CheckReport()
    _batch(recipe, report)
    assert "at most 2 training passes a rank in an update, 12 in a step" in report.facts["tokens"]
    longest = [sample(80, 16, group_id=i // 4, index=i % 4) for i in range(8)]
    assert [len(shard) for shard in build_batch(longest, ranks=2, micro_batch_tokens=200).shards] == [2, 2]


def test_a_first_token_cannot_train() -> None:
    with pytest.raises(ValueError, match=r"first token has no prediction, yet trains \(group 0, 3\)"):
        build_batch([sample(4, 4, index=3)], ranks=1, micro_batch_tokens=8)


@pytest.mark.parametrize(("ranks", "budget"), [(0, 8), (1, 0)])
def test_ranks_and_budget_must_be_positive(ranks: int, budget: int) -> None:
    with pytest.raises(ValueError, match=f"got {ranks} ranks and {budget} tokens"):
        build_batch([], ranks=ranks, micro_batch_tokens=budget)


sizes = st.lists(st.tuples(st.integers(2, 40), st.integers(0, 39)), max_size=40)


@given(lengths=sizes, ranks=st.integers(1, 5), budget=st.integers(1, 64), data=st.data())
def test_every_trained_sample_is_there_once_within_the_budget_in_any_order_of_arrival(
    lengths: list[tuple[int, int]], ranks: int, budget: int, data: st.DataObject
) -> None:
    samples = [sample(t, min(n, t - 1), group_id=i // 4, index=i % 4) for i, (t, n) in enumerate(lengths)]
    batch = build_batch(samples, ranks=ranks, micro_batch_tokens=budget)
    trained = [s for s in samples if s.loss_mask.any()]
    assert sorted(members(batch)) == sorted((s.group_id, s.index) for s in trained)
    assert batch.loss_tokens == sum(int(s.loss_mask.sum()) for s in trained)
    assert batch.loss_tokens == sum(int(m.loss_mask.sum()) for shard in batch.shards for m in shard)
    assert batch.loss_sequences == len(trained)
    assert len({len(shard) for shard in batch.shards}) == 1
    for micro in (m for shard in batch.shards for m in shard):
        assert len(micro.token_ids) == micro.segment_lengths.sum()
        assert len(micro.token_ids) <= budget or len(micro.segment_lengths) == 1
    shuffled = build_batch(data.draw(st.permutations(samples)), ranks=ranks, micro_batch_tokens=budget)
    for ours, theirs in zip(batch.shards, shuffled.shards, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_long_tailed_batch_lies_evenly_over_eight_ranks(seed: int) -> None:
    """512 samples, log-normal lengths, 16,384 tokens a micro-batch: within 1 % of the ideal."""
    draw = np.random.default_rng(seed).lognormal(6.7, 0.8, 512).clip(16, 8192).astype(int)
    samples = [sample(int(t), int(t) - 8, group_id=i // 16, index=i % 16) for i, t in enumerate(draw)]
    batch = build_batch(samples, ranks=8, micro_batch_tokens=16384)
    values = stat_values(batch_metrics(batch))
    assert values["batch/imbalance"] <= 1.01
    assert values["batch/empty_micro_batches"] == 0
