"""What one learner rank needs to know, and the learning rate as a function of the step. Imports nothing heavy.

The driver builds one ``LearnerSpec`` per rank; everything but ``rank`` is the same on all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection, Recipe


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    model: ModelSection  # path is a local folder or a hub name
    algorithm: AlgorithmSection
    learner: LearnerSection
    rank: int
    world: int
    host: str  # of rank 0
    port: int  # free on rank 0's node
    temperature: float  # of the behaviour policy: logits are divided by it here too
    total_steps: int  # where the learning-rate schedule ends
    seed: int
    backend: Literal["gloo", "nccl"] = "gloo"  # the one switch between CPU and GPU
    collective_seconds: float = 600.0  # limit of one collective between ranks

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def spec_for(
    recipe: Recipe, *, path: str, rank: int, host: str, port: int, backend: Literal["gloo", "nccl"]
) -> LearnerSpec:
    """The spec of one rank; ``path`` is the model folder after names such as 'quickstart' were resolved."""
    return LearnerSpec(
        model=recipe.model.model_copy(update={"path": path}),
        algorithm=recipe.algorithm,
        learner=recipe.learner,
        rank=rank,
        world=recipe.learner.ranks,
        host=host,
        port=port,
        temperature=recipe.rollout.sampling.temperature,
        total_steps=recipe.run.steps,
        seed=recipe.run.seed,
        backend=backend,
        collective_seconds=recipe.faults.collective_seconds,
    )


def learning_rate(step: float, total_steps: int, learner: LearnerSection) -> float:
    """Rate of step ``step`` (1-based): pure, so a resumed run needs no scheduler state.

    Update k of the n of step s is at s - 1 + k / n: the schedule has ``total_steps`` x n points, and the last update of
    a step has the rate that a single one would have. Step s of a warm-up of w steps uses s / w of the peak; after it
    the rate falls to ``final_fraction`` of the peak at ``total_steps`` (linear, cosine) or stays.
    """
    schedule, peak = learner.schedule, learner.learning_rate
    if step <= 0:
        raise ValueError(f"steps count from 1, got {step}")
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    after = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / after)
    shape = 1 - progress if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * shape)
