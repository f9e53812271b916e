"""Statistics that merge exactly, and the metrics that rollouts and batches yield.

    per rank, per micro-batch: Stats  ->  merge_stats  ->  stat_values  ->  tracker

A mean travels as (total, count), so a mean of means cannot happen: two tokens of 1 on one rank and eight tokens of 0
on another give 0.2. Metric names are those that scripts rely on; what only the driver's clock knows (tokens per second,
time shares) is added by the driver. Nothing here touches torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from grpo_dist.types import Completion, ScoredGroup, TrainBatch


class Stat(Protocol):
    """One statistic of a part of the data. ``merge`` with that of another part gives that of both, exactly."""

    @property
    def value(self) -> float: ...

    @property
    def empty(self) -> bool: ...

    def merge(self, other: Self, /) -> Self: ...


Stats = dict[str, Stat]

ROUNDING = 2.0**-49  # eight units in the last place: what a sum of weighted parts may be off by


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    @property
    def value(self) -> float:
        return self.total

    @property
    def empty(self) -> bool:
        return False

    def merge(self, other: Sum, /) -> Sum:
        return Sum(self.total + other.total)


@dataclass(frozen=True, slots=True)
class Mean:
    total: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        kept = list(values)
        return cls(math.fsum(kept), len(kept))

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan

    @property
    def empty(self) -> bool:
        return self.count == 0

    def merge(self, other: Mean, /) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Max:
    largest: float = -math.inf

    @property
    def value(self) -> float:
        return self.largest

    @property
    def empty(self) -> bool:
        return self.largest == -math.inf

    def merge(self, other: Max, /) -> Max:
        # max() drops a NaN or keeps it depending on the order; a NaN must show.
        either_nan = math.isnan(self.largest) or math.isnan(other.largest)
        return Max(math.nan if either_nan else max(self.largest, other.largest))


@dataclass(frozen=True, slots=True)
class Min:
    smallest: float = math.inf

    @property
    def value(self) -> float:
        return self.smallest

    @property
    def empty(self) -> bool:
        return self.smallest == math.inf

    def merge(self, other: Min, /) -> Min:
        either_nan = math.isnan(self.smallest) or math.isnan(other.smallest)
        return Min(math.nan if either_nan else min(self.smallest, other.smallest))


@dataclass(frozen=True, slots=True)
class Std:
    """Population standard deviation: count, mean and sum of squared distances from it (Chan et al. 1979)."""

    count: int
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Std:
        array = np.asarray(list(values), dtype=np.float64)
        if not len(array):
            return cls(0, 0.0, 0.0)
        if array.max() == array.min():  # the mean of equal values may differ from them in the last bit
            return cls(len(array), float(array[0]), 0.0)
        mean = float(array.mean())
        return cls(len(array), mean, float(((array - mean) ** 2).sum()))

    @property
    def value(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    @property
    def empty(self) -> bool:
        return self.count == 0

    def merge(self, other: Std, /) -> Std:
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap * gap * self.count * other.count / count
        return Std(count, self.mean + gap * other.count / count, squares)


@dataclass(frozen=True, slots=True)
class Quantile:
    """Keeps its values: a quantile of quantiles means nothing."""

    q: float
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        return percentile(self.values, self.q)

    @property
    def empty(self) -> bool:
        return not self.values

    def merge(self, other: Quantile, /) -> Quantile:
        if self.q != other.q:
            raise ValueError(f"quantile {self.q} cannot merge with quantile {other.q}")
        return Quantile(self.q, self.values + other.values)


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """The statistics of all parts together. A name may be absent from some parts."""
    merged: Stats = {}
    for part in parts:
        for name, stat in part.items():
            known = merged.get(name)
            if known is not None and type(known) is not type(stat):
                raise ValueError(f"{name}: a {type(known).__name__} in one part, a {type(stat).__name__} in another")
            merged[name] = stat if known is None else known.merge(stat)
    return merged


LOSSES = ("train/loss", "train/policy_loss")


def merge_updates(updates: Sequence[Stats]) -> Stats:
    """The statistics of a step with several optimizer updates, of one rank or of all.

    A loss becomes its mean over updates, counts add up, means are over all tokens, extremes over all updates.
    """
    shared = [
        {name: Sum(s.total / len(updates)) if name in LOSSES and isinstance(s, Sum) else s for name, s in part.items()}
        for part in updates
    ]
    return merge_stats(shared)


def stat_values(stats: Stats) -> dict[str, float]:
    """Plain numbers for the tracker. What has no data (a mean of nothing) is left out."""
    return {name: float(stat.value) for name, stat in stats.items() if not stat.empty}


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile, 0 <= q <= 1, linear between neighbours; NaN for no values."""
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile lies between 0 and 1, got {q}")
    return float(np.quantile(np.asarray(values, dtype=np.float64), q)) if len(values) else math.nan


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right, from c right ones of n.

    1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1), as a product that cannot overflow.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} of {n} samples cannot be right")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples, got {n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def staleness(completion: Completion, current_version: int) -> int | None:
    """Versions from the oldest weights that sampled one of its tokens to ``current_version``; None without tokens."""
    if not completion.versions:
        return None
    return current_version - min(span.version for span in completion.versions)


def equal_rewards(rewards: Sequence[float] | npt.NDArray[np.float64]) -> bool:
    """No spread (also: no or one reward), up to rounding: relative to the rewards' size, not an absolute epsilon."""
    if len(rewards) < 2:
        return True
    low, high = float(min(rewards)), float(max(rewards))
    return high - low <= ROUNDING * max(abs(low), abs(high))


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Whether a group can teach: two rewards that differ. Samples without a verdict do not count."""
    return not equal_rewards([r for r in rewards if r is not None and math.isfinite(r)])


def rollout_metrics(groups: Sequence[ScoredGroup], current_version: int) -> Stats:
    """rollout/*, verify/* and reward/* of the groups of one step, which update the weights ``current_version``.

    Left to the driver: rollout/tokens_per_second (rollout/completion_tokens over its own clock).
    """
    completions = [c for g in groups for c in g.rollout.completions]
    verdicts = [v for g in groups for v in g.verdicts]
    rewards = [v.reward for v in verdicts if v.reward is not None]
    lengths = [len(c.token_ids) for c in completions]
    lags = [lag for c in completions if (lag := staleness(c, current_version)) is not None]
    flat = [not has_spread(g.rewards) for g in groups]
    spread = [Std.of(v.reward for v in g.verdicts if v.reward is not None) for g in groups]
    seconds = tuple(v.seconds for v in verdicts)
    stats: Stats = {
        "rollout/reward_mean": Mean.of(rewards),
        "rollout/reward_std": Std.of(rewards),
        "rollout/reward_group_std_mean": Mean.of(s.value for s in spread if not s.empty),
        "rollout/correct_mean": Mean.of(float(v.correct) for v in verdicts if v.correct is not None),
        "rollout/groups": Sum(len(groups)),
        "rollout/groups_zero_variance": Sum(sum(flat)),
        "rollout/zero_variance_fraction": Mean(sum(flat), len(flat)),
        "rollout/completion_tokens": Sum(sum(lengths)),
        "rollout/completion_tokens_mean": Mean(sum(lengths), len(lengths)),
        "rollout/completion_tokens_max": Max(max(lengths, default=-math.inf)),
        "rollout/truncated_fraction": Mean(sum(c.finish_reason == "length" for c in completions), len(completions)),
        "rollout/staleness_mean": Mean(sum(lags), len(lags)),
        "rollout/staleness_max": Max(max(lags, default=-math.inf)),
        "rollout/mixed_version_fraction": Mean(sum(len(c.versions) > 1 for c in completions), len(completions)),
        "rollout/errors": Sum(sum(c.finish_reason == "abort" for c in completions)),
        "verify/seconds_p50": Quantile(0.5, seconds),
        "verify/seconds_p99": Quantile(0.99, seconds),
        "verify/errors": Sum(sum(v.reward is None for v in verdicts)),
        "verify/timeouts": Sum(sum(v.timed_out for v in verdicts)),
    }
    for part in sorted({name for v in verdicts for name in v.parts}):
        stats[f"reward/{part}_mean"] = Mean.of(v.parts[part] for v in verdicts if part in v.parts)
    return stats


def batch_metrics(batch: TrainBatch) -> Stats:
    """What is trained on, and how evenly it lies over the ranks.

    ``batch/imbalance``: every micro-step waits for its fullest rank; tokens waited for over the ideal share, 1 at best.
    """
    packed = np.asarray([[len(m.token_ids) for m in shard] for shard in batch.shards], dtype=np.int64)  # [ranks, micro]
    total = int(packed.sum())
    micro = [m for shard in batch.shards for m in shard]
    stats: Stats = {
        "train/tokens": Sum(batch.loss_tokens),
        "batch/sequences": Sum(batch.loss_sequences),
        "batch/packed_tokens": Sum(total),
        "batch/micro_batches": Sum(packed.shape[1]),
        "batch/empty_micro_batches": Sum(sum(m.is_empty for m in micro)),
        "batch/advantage_abs_mean": Mean(
            sum(float(np.abs(m.advantages[m.loss_mask].astype(np.float64)).sum()) for m in micro), batch.loss_tokens
        ),
    }
    if total:
        stats["batch/imbalance"] = Mean(float(packed.max(axis=0).sum()) * batch.ranks, total)
    return stats
