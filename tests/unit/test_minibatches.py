"""Which samples go into which update of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_dist.config import LearnerSection, Recipe
from grpo_dist.data.batching import build_batch
from grpo_dist.data.minibatches import build_batches
from grpo_dist.types import Sample, TrainBatch
from tests.conftest import tiny_recipe


def sample(group: int, index: int, *, trains: bool = True) -> Sample:
    mask = np.array([False, trains, trains])
    zeros = np.zeros(3, np.float32)
    return Sample(group, index, np.array([1, 2, 3]), mask, zeros, zeros)


def groups_of(batch: TrainBatch) -> list[int]:
    return sorted({int(g) for shard in batch.shards for m in shard for g in m.group_ids})


SAMPLES = [sample(g, i) for g in (5, 3, 9, 4, 8) for i in range(2)]


def build(samples: list[Sample], *, updates: int = 1, epochs: int = 1, step: int = 1) -> tuple[TrainBatch, ...]:
    learner = LearnerSection(updates_per_batch=updates, epochs=epochs, micro_batch_tokens=100)
    return build_batches(samples, learner, ranks=2, seed=(0, step))


def test_one_update_is_the_whole_batch() -> None:
    (batch,) = build(SAMPLES)
    whole = build_batch(SAMPLES, ranks=2, micro_batch_tokens=100)
    assert (batch.loss_tokens, batch.loss_sequences) == (whole.loss_tokens, whole.loss_sequences) == (20, 10)
    for ours, theirs in zip(batch.shards, whole.shards, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a.group_ids, b.group_ids)
            assert np.array_equal(a.token_ids, b.token_ids)


def test_parts_are_whole_groups_in_order_of_submission() -> None:
    batches = build(SAMPLES, updates=2)
    assert [groups_of(b) for b in batches] == [[3, 4], [5, 8, 9]]
    assert [b.loss_sequences for b in batches] == [4, 6]
    assert [b.loss_tokens for b in batches] == [8, 12]


def test_epochs_see_each_group_once_in_another_order_fixed_by_the_seed() -> None:
    batches = build(SAMPLES, updates=5, epochs=3)
    orders = [[groups_of(b)[0] for b in batches[e * 5 : e * 5 + 5]] for e in range(3)]
    assert orders[0] == [3, 4, 5, 8, 9]
    assert all(sorted(order) == [3, 4, 5, 8, 9] for order in orders)
    assert len({tuple(o) for o in orders}) > 1
    again = [[groups_of(b)[0] for b in build(SAMPLES, updates=5, epochs=3)]]
    assert again[0] == [g for order in orders for g in order]
    other = [groups_of(b)[0] for b in build(SAMPLES, updates=5, epochs=3, step=2)]
    assert (other[:5], other == again[0]) == ([3, 4, 5, 8, 9], False)  # each step has its own


@given(count=st.integers(1, 12), updates=st.integers(1, 6), epochs=st.integers(1, 3))
def test_every_epoch_has_every_sample_once_in_parts_of_nearly_one_size(count: int, updates: int, epochs: int) -> None:
    batches = build([sample(g, i) for g in range(count) for i in range(2)], updates=updates, epochs=epochs)
    parts = min(updates, count)
    assert len(batches) == parts * epochs
    for epoch in range(epochs):
        mine = [groups_of(b) for b in batches[epoch * parts : (epoch + 1) * parts]]
        assert sorted(g for part in mine for g in part) == list(range(count))
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
    assert sum(b.loss_sequences for b in batches) == 2 * count * epochs


def test_advantages_and_masks_are_those_of_the_whole_batch() -> None:
    """Whatever a sample had before the split it has after it: by hand, two groups of two, one update each."""
    made = [
        dataclasses.replace(sample(g, i), advantages=np.array([0, a, a], np.float32))
        for g, i, a in ((0, 0, 1.0), (0, 1, -1.0), (1, 0, 0.5), (1, 1, -0.5))
    ]
    first, second = build(made, updates=2)
    assert sorted(float(v) for s in first.shards for m in s for v in m.advantages) == [-1, -1, 0, 0, 1, 1]
    assert sorted(float(v) for s in second.shards for m in s for v in m.advantages) == [-0.5, -0.5, 0, 0, 0.5, 0.5]
    assert first.loss_tokens == second.loss_tokens == 4


def test_groups_that_do_not_train_make_no_update() -> None:
    mixed = [sample(0, 0), sample(1, 0, trains=False), sample(2, 0, trains=False)]
    assert [groups_of(b) for b in build(mixed, updates=3)] == [[0]]
    (empty,) = build(mixed[1:], updates=3)
    assert (empty.loss_tokens, empty.loss_sequences, empty.ranks) == (0, 0, 2)
    assert all(m.is_empty for shard in empty.shards for m in shard)


def test_share_of_a_rank() -> None:
    (batch,) = build(SAMPLES)
    share = batch.of_rank(1)
    assert share.micro is batch.shards[1]
    assert (share.loss_tokens, share.loss_sequences) == (20, 10)


@pytest.mark.parametrize(
    ("rollout", "learner", "words"),
    [
        ({"groups_per_step": 4}, {"updates_per_batch": 5}, "updates_per_batch 5 is more than rollout.groups_per_step 4"),
        (
            {"groups_per_step": 5, "group_size": 2}, {"updates_per_batch": 3, "ranks": 3},
            r"leaves 2 samples .* for the smallest mini-batch, fewer than learner.ranks 3",
        ),
        ({}, {"epochs": 0}, "greater than 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_in_one_sentence(
    rollout: dict[str, Any], learner: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        Recipe.model_validate(tiny_recipe(rollout=rollout, learner=learner))
    assert caught.value.error_count() == 1


def test_a_group_for_each_update_is_enough() -> None:
    recipe = tiny_recipe(rollout={"groups_per_step": 3, "group_size": 2}, learner={"updates_per_batch": 3, "ranks": 2})
    assert Recipe.model_validate(recipe).learner.updates_per_batch == 3
