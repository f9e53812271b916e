"""Several optimizer updates from the samples of one step: epochs over mini-batches of whole groups.

    samples -> groups in submission order -> [later epochs: another order] -> equal parts -> TrainBatch per part

With one update and one epoch this is ``build_batch``. A part without a trained sample is left out: it would move
weights by momentum alone. Advantages and filters look at the whole batch, before it is split; divisors are those of the
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_dist.config import LearnerSection
from grpo_dist.data.batching import build_batch
from grpo_dist.types import Sample, TrainBatch


def build_batches(
    samples: Sequence[Sample], learner: LearnerSection, *, ranks: int, seed: tuple[int, int]
) -> tuple[TrainBatch, ...]:
    """``learner.updates_per_batch`` x ``learner.epochs`` batches, fewer when parts train nothing, never none.

    ``seed`` (the run's, the step) fixes the order of later epochs; the first keeps the order of submission.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.loss_mask.any():
            groups.setdefault(sample.group_id, []).append(sample)
    ids, parts = sorted(groups), learner.updates_per_batch
    chosen: list[list[int]] = []
    for epoch in range(learner.epochs):
        order = ids if epoch == 0 else [ids[i] for i in np.random.default_rng((*seed, epoch)).permutation(len(ids))]
        chosen += [order[k * len(order) // parts : (k + 1) * len(order) // parts] for k in range(parts)]
    return tuple(
        build_batch([s for g in part for s in groups[g]], ranks=ranks, micro_batch_tokens=learner.micro_batch_tokens)
        for part in [part for part in chosen if part] or [[]]
    )
