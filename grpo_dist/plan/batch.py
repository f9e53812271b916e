"""Arithmetic of a step: samples, tokens, micro-batches, what is in flight, epochs. Upper bounds: lengths decide."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.config import Recipe

# Training rows of the data sets that shipped recipes name, from their hub pages.
ROWS = {"openai/gsm8k": 7_473, "agentica-org/DeepScaleR-Preview-Dataset": 40_315, "quickstart": 6_305}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Numbers of one recipe."""

    groups: int  # a step
    samples: int  # a step
    longest: int  # tokens of prompt and completion together
    tokens: int  # a step, at most
    updates: int  # optimizer updates a step
    micro_batches: int  # of one rank in an update, at most
    slots: int  # groups in flight at most
    in_flight: int  # completions of one engine at most
    total_samples: int  # of the run
    rows: int | None  # prompts of an epoch, where known
    steps_per_epoch: float | None


def batch_plan(recipe: Recipe, rows: int | None = None) -> BatchPlan:
    """``rows``: training prompts; by default looked up for data sets that are known."""
    rollout, learner = recipe.rollout, recipe.learner
    samples = rollout.groups_per_step * rollout.group_size
    longest = recipe.data.max_prompt_tokens + rollout.sampling.max_tokens
    share = rank_share(recipe)
    fit = max(1, learner.micro_batch_tokens // longest)  # a micro-batch holds whole samples: of the longest so many
    slots = (rollout.max_staleness + 1) * rollout.groups_per_step
    if rows is None and recipe.data.source is not None:
        rows = ROWS.get(recipe.data.source)
    return BatchPlan(
        groups=rollout.groups_per_step,
        samples=samples,
        longest=longest,
        tokens=samples * longest,
        updates=learner.updates_per_batch * learner.epochs,
        micro_batches=-(-share // fit),
        slots=slots,
        in_flight=-(-slots // rollout.workers) * rollout.group_size,
        total_samples=recipe.run.steps * samples,
        rows=rows,
        steps_per_epoch=None if rows is None else rows / rollout.groups_per_step,
    )


def rank_share(recipe: Recipe) -> int:
    """Samples of one rank in one update, of the largest mini-batch: those hold whole groups."""
    groups = -(-recipe.rollout.groups_per_step // recipe.learner.updates_per_batch)
    return -(-groups * recipe.rollout.group_size // recipe.learner.ranks)


def mixed_share(pass_rate: float, group_size: int) -> float:
    """Share of groups with right and wrong completions: only those have an advantage that is not 0.

    1 - p^G - (1 - p)^G for independent completions of a prompt that is solved at rate p (DAPO, arXiv:2503.14476, 3.2,
    leaves the others out).
    """
    return 1 - pass_rate**group_size - (1 - pass_rate) ** group_size


def group_sizes(samples: int) -> dict[int, dict[float, float]]:
    """Group size -> pass rate -> groups of a step that carry a signal, all with the same budget of samples."""
    sizes = [size for size in (4, 8, 16, 32, 64) if size <= samples]
    return {size: {rate: samples / size * mixed_share(rate, size) for rate in (0.02, 0.1, 0.3, 0.5)} for size in sizes}
