"""The loop. One direction, one loop: how far rollouts run ahead is one number, ``rollout.max_staleness``.

    prompts ─► rollout ─► verify ─► advantages ─► batch ─► learn ─► publish weights
       ▲                                                                │
       └──────────────── slots freed only after publication ◄──────────┘

What each verb means is in ``run.py``; what it moves is in ``types.py``.
"""

from __future__ import annotations

import asyncio

from grpo_dist.algorithms.advantages import assign_advantages
from grpo_dist.config import Recipe
from grpo_dist.data.minibatches import build_batches
from grpo_dist.run import Run, reached_step


async def train(recipe: Recipe) -> None:
    async with Run.open(recipe) as run:
        await run.publish_first()  # an identity publication: every engine proves that it holds the learner's weights
        await run.maybe_evaluate(force=run.state.step == 0)
        run.stop_if_asked()
        async with run.pipeline() as pipeline, run.saving_on_failure(pipeline):
            for step in run.remaining_steps():
                groups = await run.take(pipeline)
                samples = assign_advantages(groups.trained, recipe.algorithm)
                batches = build_batches(
                    samples, recipe.learner, ranks=run.fleet.learner.size, seed=(recipe.run.seed, step)
                )
                learned = await run.learn(batches)
                run.commit(step, groups, samples, batches, learned)
                sent = await run.publish()
                pipeline.release(groups.slots)
                run.record(sent, pipeline)
                await run.maybe_evaluate()
                await run.maybe_save(pipeline)
                run.stop_if_asked()


def run(recipe: Recipe) -> int:
    """Train to the end of the recipe; the exit status. Errors travel: the command line turns them into messages."""
    if recipe.run.resume and (reached := reached_step(recipe)) >= recipe.run.steps:
        print(f"run {recipe.run_dir} has reached step {reached} of {recipe.run.steps}: nothing to do")
        return 0
    asyncio.run(train(recipe))
    return 0
