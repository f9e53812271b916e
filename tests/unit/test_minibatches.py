"""Which samples go into which update of a step."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_dist.data.batching import build_batch
from grpo_dist.data.minibatches import build_batches
from grpo_dist.types import Sample, TrainBatch


def sample(group: int, index: int, *, trains: bool = True) -> Sample:
    mask = np.array([False, trains, trains])
    zeros = np.zeros(3, np.float32)
    return Sample(group, index, np.array([1, 2, 3]), mask, zeros, zeros)


def groups_of(batch: TrainBatch) -> list[int]:
    return sorted({int(g) for shard in batch.shards for m in shard for g in m.group_ids})


SAMPLES = [sample(g, i) for g in (5, 3, 9, 4, 8) for i in range(2)]


def build(samples: list[Sample], **keys: int) -> tuple[TrainBatch, ...]:
    defaults = {"updates": 1, "epochs": 1, "ranks": 2, "micro_batch_tokens": 100, "seed": 0}
    return build_batches(samples, **(defaults | keys))


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


@pytest.mark.parametrize("keys", [{"updates": 0}, {"epochs": 0}])
def test_at_least_one_update(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one update and one epoch"):
        build(SAMPLES, **keys)
