"""Samples of one step become packed micro-batches, the same number for every rank.

    samples -> drop the untrained -> longest first, to the rank with least tokens -> bins of micro_batch_tokens -> pack

Done by the driver: deterministic, and no collective is needed to agree on counts. Every rank must run the same number
of forward passes (ZeRO-3 gathers parameters in each), so a rank with fewer bins gets empty micro-batches. Cost is
counted in tokens; the quadratic part of attention is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from grpo_dist.types import MicroBatch, Sample, TrainBatch


def build_batch(samples: Sequence[Sample], *, ranks: int, micro_batch_tokens: int) -> TrainBatch:
    """One optimizer step over ``samples``. Those without a True in their mask are left out of it and of the divisors.

    A sample longer than ``micro_batch_tokens`` makes a micro-batch of its own: it cannot be split.
    """
    if ranks < 1 or micro_batch_tokens < 1:
        raise ValueError(f"a batch needs ranks and a token budget, got {ranks} ranks and {micro_batch_tokens} tokens")
    trained = sorted((s for s in samples if s.loss_mask.any()), key=_longest_first)
    if early := [s for s in trained if s.loss_mask[0]]:
        raise ValueError(f"the first token has no prediction, yet trains (group {early[0].group_id}, {early[0].index})")
    per_rank = _spread(trained, ranks)
    count = max(1, *(len(_first_fit(own, micro_batch_tokens)) for own in per_rank))
    return TrainBatch(
        shards=tuple(tuple(_pack(b) for b in _bins(own, count, micro_batch_tokens)) for own in per_rank),
        loss_tokens=sum(int(s.loss_mask.sum()) for s in trained),
        loss_sequences=len(trained),
    )


def empty_micro_batch() -> MicroBatch:
    """A rank's turn with nothing to do."""
    return _pack([])


def _longest_first(sample: Sample) -> tuple[int, int, int]:
    return -len(sample.token_ids), sample.group_id, sample.index


def _spread(longest_first: Sequence[Sample], bins: int) -> list[list[Sample]]:
    """Greedy longest-processing-time: each sample goes to the bin with fewest tokens so far."""
    out: list[list[Sample]] = [[] for _ in range(bins)]
    loads = [(0, i) for i in range(bins)]  # a heap; ties go to the lower bin
    for sample in longest_first:
        load, i = loads[0]
        out[i].append(sample)
        heapq.heapreplace(loads, (load + len(sample.token_ids), i))
    return out


def _first_fit(longest_first: Sequence[Sample], budget: int) -> list[list[Sample]]:
    out: list[list[Sample]] = []
    room: list[int] = []
    for sample in longest_first:
        size = len(sample.token_ids)
        i = next((i for i, free in enumerate(room) if size <= free), None)
        if i is None:
            out.append([sample])
            room.append(budget - size)
        else:
            out[i].append(sample)
            room[i] -= size
    return out


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(s.token_ids) for s in samples)


def _bins(longest_first: Sequence[Sample], count: int, budget: int) -> list[list[Sample]]:
    """Exactly ``count`` bins, even where that keeps the budget; fullest first, so that ranks meet bins of like size."""
    even = _spread(longest_first, count)
    if any(_tokens(b) > budget and len(b) > 1 for b in even):
        tight = _first_fit(longest_first, budget)
        even = tight + [[] for _ in range(count - len(tight))]
    return sorted(even, key=_tokens, reverse=True)


def _pack(samples: Sequence[Sample]) -> MicroBatch:
    ordered = sorted(samples, key=lambda s: (s.group_id, s.index))
    lengths = np.asarray([len(s.token_ids) for s in ordered], dtype=np.int64)

    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)

    return MicroBatch(
        token_ids=joined([s.token_ids for s in ordered], np.int64),
        position_ids=joined([np.arange(n) for n in lengths], np.int64),
        segment_lengths=lengths,
        loss_mask=joined([s.loss_mask for s in ordered], np.bool_),
        behavior_logprobs=joined([s.behavior_logprobs for s in ordered], np.float32),
        advantages=joined([s.advantages for s in ordered], np.float32),
        group_ids=np.asarray([s.group_id for s in ordered], dtype=np.int64),
        sample_indices=np.asarray([s.index for s in ordered], dtype=np.int64),
    )
