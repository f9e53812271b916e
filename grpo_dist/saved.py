"""A saved policy without the training loop: evaluate it, or write it as a Hugging Face folder.

evaluate_saved: checkpoint ─► learner ranks load it ─► published to engines ─► pass@k   (the path that training takes)
                model folder ─► engines load it                             ─► pass@k
export_saved:   checkpoint ─► learner ranks load it ─► gathered by layer ─► model folder
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from grpo_dist.config import Recipe
from grpo_dist.errors import CheckpointError, UserError
from grpo_dist.evaluate import evaluate
from grpo_dist.fleet.cluster import cluster
from grpo_dist.fleet.fleet import ROLES, Fleet
from grpo_dist.learner.checkpoint import CheckpointStore, read_state, verify
from grpo_dist.model_folder import load_inputs, resolve_model
from grpo_dist.monitor.records import RunFolder


def evaluate_saved(recipe: Recipe, folder: Path) -> dict[str, float]:
    """pass@1 and pass@k of a checkpoint, or of a model folder, on the recipe's evaluation prompts.

    Raises:
        UserError: neither a checkpoint nor a model folder, or the recipe has no evaluation prompts.
        CheckpointError: the checkpoint is damaged; says which file.
    """
    if (folder / "config.json").is_file():
        exported = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
        return asyncio.run(_evaluate(exported, None))
    if not (folder / "manifest.json").is_file():
        raise UserError(f"{folder} is neither a checkpoint (no manifest.json) nor a model folder (no config.json)")
    verify(folder)
    return asyncio.run(_evaluate(recipe, folder))


async def _evaluate(recipe: Recipe, checkpoint: Path | None) -> dict[str, float]:
    model, prompts = load_inputs(recipe)
    if not prompts.evaluation:
        raise UserError("the recipe has no evaluation prompts: set data.evaluation.size (and data.evaluation.source)")
    roles = ROLES if checkpoint is not None else ROLES - {"learner"}
    async with AsyncExitStack() as stack:
        here = stack.enter_context(cluster())
        fleet = await Fleet.start(recipe, model, here, event=_silent, tell=print, roles=roles)
        stack.push_async_callback(fleet.end)
        if checkpoint is not None:
            await fleet.learner.load(checkpoint)
            await fleet.publish(read_state(checkpoint).step)
        result = await evaluate(
            prompts.evaluation, fleet.generate_eval, fleet.score,
            samples=recipe.evaluate.sampling.samples, seed=recipe.run.seed,
        )  # fmt: skip
        return result.values()


def export_saved(run_dir: Path, step: int | None, out: Path) -> Path:
    """Write the checkpoint of ``step`` (by default the newest good one) as a model folder; returns the checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    recipe = RunFolder.read(run_dir).recipe()
    store = CheckpointStore(run_dir / "checkpoints", recipe.checkpoint.keep)
    if step is None:
        checkpoint = store.newest_good().path
        if checkpoint is None:
            raise CheckpointError(f"{store.root} holds no checkpoint yet")
    else:
        checkpoint = store.root / f"{step:06d}"
        if not checkpoint.is_dir():
            there = ", ".join(p.name for p in store.candidates()) or "none"
            raise UserError(f"{run_dir} has no checkpoint of step {step}; there: {there}")
        verify(checkpoint)
    if out.is_dir():
        out.rmdir()  # empty, as the caller has seen; the export is renamed into its place
    asyncio.run(_export(recipe, checkpoint, out.absolute()))
    return checkpoint


async def _export(recipe: Recipe, checkpoint: Path, out: Path) -> None:
    model = resolve_model(recipe.model)
    async with AsyncExitStack() as stack:
        here = stack.enter_context(cluster())
        fleet = await Fleet.start(recipe, model, here, event=_silent, tell=print, roles=frozenset({"learner"}))
        stack.push_async_callback(fleet.end)
        await fleet.learner.load(checkpoint.absolute())
        await fleet.learner.export(out)


def _silent(kind: str, **fields: Any) -> None:
    """Events belong to a run's folder; there is no run here."""
