"""What one learner rank needs to know, and the learning rate as a function of the step. Imports nothing heavy.

The driver builds one ``LearnerSpec`` per rank; everything but ``rank`` is the same on all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection, Recipe
from grpo_dist.errors import UserError


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


def refuse_on_cpus(model: ModelSection) -> None:
    """What only a GPU can do. For a run whose engines and ranks will live on CPUs.

    Raises:
        UserError: one sentence that names the key.
    """
    if model.attention == "varlen":
        raise UserError("model.attention: wanted auto, segment or eager for a run on CPUs, found varlen: GPUs only")
    if model.dtype == "float16" and not _cpu_has_fp16():
        raise UserError(
            "model.dtype: wanted bfloat16 or float32 for a run on CPUs, found float16: this machine's CPU has no "
            "kernels for it"
        )


def _cpu_has_fp16() -> bool:
    """The question that DeepSpeed asks before it accepts fp16."""
    import torch

    supported: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)  # not in every build
    return supported is not None and bool(supported())


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
