"""Learner ranks for tests: the real actor, with a look inside, and groups of them that are started once per module."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection
from grpo_dist.data.batching import build_batch
from grpo_dist.learner.rank import LearnerRank, actor_environment
from grpo_dist.learner.spec import LearnerSpec
from grpo_dist.metrics import merge_stats, stat_values
from grpo_dist.types import MicroBatch, Sample, TrainBatch

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Tiny parameters would all be "persistent", i.e. never sharded after the first gather: switch that off.
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class ProbeRank(LearnerRank):
    """A learner rank that shows and spoils what users cannot reach."""

    def gradients(self, micro: Sequence[MicroBatch], loss_tokens: int, loss_sequences: int) -> dict[str, np.ndarray]:
        """Full gradients by name after all micro-batches; nothing is stepped."""
        policy = self._ready
        for k, batch in enumerate(micro):
            policy.engine.set_gradient_accumulation_boundary(k == len(micro) - 1)
            policy._backward(batch, loss_tokens, loss_sequences)
        found = {
            name: policy.full_gradient(p).cpu().numpy().copy() for name, p in policy.engine.module.named_parameters()
        }
        policy.engine.optimizer.zero_grad()
        return found

    def run(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the policy."""
        return function(self._ready)

    def staged(self) -> dict[str, np.ndarray]:
        assert self._staged is not None
        return {name: t.float().numpy().copy() for name, t in self._staged.tensors.items()}


def fresh(
    policy: Any, *, dtype: str | None = None, algorithm: dict[str, Any] | None = None, sgd: bool = False, **learner: Any
) -> Any:
    """Another policy in the same ranks, from the model folder, some keys changed: starts in a moment. Collective.

    ``sgd``: without Adam, whose first step is the gradient's sign and hides what the gradient is.
    """
    from grpo_dist.learner.zero3 import Zero3Policy

    class WithSGD(Zero3Policy):
        def _optimizer(self, model: Any) -> Any:
            import torch

            return torch.optim.SGD(model.parameters(), lr=1.0)

    if sgd:
        learner["deepspeed"] = SHARDED | {"zero_allow_untested_optimizer": True}
    old = policy.spec
    model = old.model if dtype is None else old.model.model_copy(update={"dtype": dtype})
    section = LearnerSection(**{**old.learner.model_dump(), **learner})
    return (WithSGD if sgd else Zero3Policy)(
        dataclasses.replace(old, model=model, learner=section, algorithm=AlgorithmSection(**(algorithm or {})))
    )


def weights(policy: Any) -> dict[str, np.ndarray] | None:
    """On rank 0. Collective."""
    staged = policy.stage(0)
    return {name: t.float().numpy().copy() for name, t in staged.tensors.items()} if staged else None


def furthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


ProbeActor: Any = ray.remote(concurrency_groups={"control": 2})(ProbeRank)


class Group:
    """Some ranks of one policy."""

    def __init__(
        self, model: Path, world: int, *, dtype: str = "float32", collective_seconds: float = 60, **keys: Any
    ) -> None:
        algorithm = keys.pop("algorithm", {})
        temperature, steps = keys.pop("temperature", 1.0), keys.pop("total_steps", 100)
        learner = {"ranks": world, "learning_rate": 1e-3, "deepspeed": SHARDED} | keys
        env = {"env_vars": actor_environment("cpu")}
        self.ranks = [ProbeActor.options(num_cpus=1, runtime_env=env).remote() for _ in range(world)]
        host, port = ray.get(self.ranks[0].address.remote(), timeout=120)
        self.spec = LearnerSpec(
            model=ModelSection(path=str(model), dtype=dtype), algorithm=AlgorithmSection(**algorithm),
            learner=LearnerSection(**learner), rank=0, world=world, host=host, port=port, temperature=temperature,
            total_steps=steps, seed=0, collective_seconds=collective_seconds,
        )  # fmt: skip
        specs = [(dataclasses.replace(self.spec, rank=r),) for r in range(world)]
        self.info = self.all("setup", specs)

    def all(self, method: str, args: Sequence[tuple[Any, ...]] | None = None, **kwargs: Any) -> list[Any]:
        args = args or [()] * len(self.ranks)
        calls = [getattr(rank, method).remote(*a, **kwargs) for rank, a in zip(self.ranks, args, strict=True)]
        return ray.get(calls, timeout=200)

    def same(self, method: str, *args: Any) -> list[Any]:
        return self.all(method, [args] * len(self.ranks))

    def batch(self, samples: Sequence[Sample], tokens: int = 128) -> TrainBatch:
        return build_batch(samples, ranks=len(self.ranks), micro_batch_tokens=tokens)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        return self.step([batch])

    def step(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """An update per batch."""
        stats = self.all("update", [([b.of_rank(r) for b in batches],) for r in range(len(self.ranks))])
        return stat_values(merge_stats(stats))

    def gradients(self, batch: TrainBatch) -> dict[str, np.ndarray]:
        args = [(s, batch.loss_tokens, batch.loss_sequences) for s in batch.shards]
        return self.all("gradients", args)[0]

    def logprobs(self, batch: TrainBatch) -> dict[tuple[int, int], np.ndarray]:
        """By (group, index), at the trained tokens."""
        out = {}
        values = self.all("logprobs", [(s,) for s in batch.shards])
        for shard, rank_values in zip(batch.shards, values, strict=True):
            for micro, flat in zip(shard, rank_values, strict=True):
                ends = np.cumsum(micro.segment_lengths)
                for s, (end, n) in enumerate(zip(ends, micro.segment_lengths, strict=True)):
                    part = slice(end - n, end)
                    key = (int(micro.group_ids[s]), int(micro.sample_indices[s]))
                    out[key] = flat[part][micro.loss_mask[part]]
        return out

    def digests(self, version: int = 0) -> dict[str, str]:
        self.same("stage", version)
        return ray.get(self.ranks[0].digests.remote())

    def end(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


def samples(count: int, *, seed: int = 0, longest: int = 40, behavior: float = -3.5, vocab: int = 60) -> list[Sample]:
    """Sequences of mixed length with random advantages; behaviour log-probabilities near those of a random model."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        n = int(rng.integers(5, longest))
        prompt = int(rng.integers(1, 4))
        mask = np.arange(n) >= prompt
        out.append(
            Sample(
                group_id=i // 4,
                index=i % 4,
                token_ids=rng.integers(4, vocab, n),
                loss_mask=mask,
                behavior_logprobs=np.where(mask, behavior + rng.normal(0, 0.3, n), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            )
        )
    return out


def with_behavior(samples: Sequence[Sample], logprobs: dict[tuple[int, int], np.ndarray]) -> list[Sample]:
    """The same samples, as if the policy that gave ``logprobs`` had sampled them."""
    out = []
    for s in samples:
        values = np.zeros(len(s.token_ids), np.float32)
        values[s.loss_mask] = logprobs[s.group_id, s.index]
        out.append(dataclasses.replace(s, behavior_logprobs=values))
    return out
