"""Several optimizer updates from the samples of one step: epochs over mini-batches of whole groups.

    samples -> groups in submission order -> [epoch: other order] -> ``updates`` parts of as many groups -> TrainBatch

With one update and one epoch this is ``build_batch``. A part without a trained sample is left out: it would move
weights by momentum alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_dist.data.batching import build_batch
from grpo_dist.types import Sample, TrainBatch


def build_batches(
    samples: Sequence[Sample], *, updates: int, epochs: int, ranks: int, micro_batch_tokens: int, seed: int
) -> tuple[TrainBatch, ...]:
    """``updates`` x ``epochs`` batches, fewer when parts have nothing to train on, never none.

    ``seed`` fixes the order of later epochs; the first keeps the order of submission.
    """
    if updates < 1 or epochs < 1:
        raise ValueError(f"a step needs at least one update and one epoch, got {updates} and {epochs}")
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.loss_mask.any():
            groups.setdefault(sample.group_id, []).append(sample)
    ids = sorted(groups)
    batches = []
    for epoch in range(epochs):
        order = ids if epoch == 0 else [ids[i] for i in np.random.default_rng((seed, epoch)).permutation(len(ids))]
        parts = [order[k * len(order) // updates : (k + 1) * len(order) // updates] for k in range(updates)]
        batches += [
            build_batch([s for g in part for s in groups[g]], ranks=ranks, micro_batch_tokens=micro_batch_tokens)
            for part in parts
            if part
        ]
    return tuple(batches) or (build_batch([], ranks=ranks, micro_batch_tokens=micro_batch_tokens),)
