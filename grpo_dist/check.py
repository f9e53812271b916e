"""``grpo-dist check``: everything that can be known before an engine starts, all problems at once.

    recipe ─► arithmetic ─► model folder, tokenizer ─► data ─► one verdict per verifier ─► memory, disk, resources
                 facts                       every step adds facts, warnings and problems; none ends the others

Nothing here starts a worker or loads weights: a model's size is counted on torch's "meta" device. Numbers are estimates
and say so. A joined cluster (RAY_ADDRESS) is asked what it has; otherwise this machine is looked at.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.config import Recipe
from grpo_dist.data.prompts import PromptStream, load_prompts
from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.learner.spec import refuse_on_cpus
from grpo_dist.model_folder import (
    QUICKSTART,
    load_config,
    load_tokenizer,
    meta_model,
    refuse_beyond_context,
    refuse_unknown_targets,
    refuse_untrainable,
    resolve_model,
)
from grpo_dist.monitor.records import free_bytes
from grpo_dist.plan.batch import batch_plan
from grpo_dist.plan.idle_keys import idle_keys
from grpo_dist.plan.memory import BYTES, bytes_text, engine_memory, learner_memory
from grpo_dist.plan.shapes import ModelShape, shape_from_config
from grpo_dist.rollout.engine_keys import refuse_unknown_engine_keys
from grpo_dist.types import VerifyItem
from grpo_dist.verifiers.pool import VerifierPool
from grpo_dist.verifiers.registry import Judge, build
from grpo_dist.verifiers.reward_scorer import look_at

RAY_TEMP_NEEDED = 2 << 30
RAY_TEMP_WANTED = 10 << 30


@dataclass
class CheckReport:
    """What was found. The recipe can run when there is no problem."""

    facts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "problems": self.problems, "warnings": self.warnings, "facts": self.facts}


def check(recipe: Recipe, *, offline: bool = False) -> CheckReport:
    """Look at everything the recipe names; ``offline``: at what needs neither the model, the data nor the machines."""
    report = CheckReport()
    try:
        refuse_unknown_engine_keys(recipe.rollout.engine)
    except UserError as error:
        report.problems.append(str(error))
    report.warnings += idle_keys(recipe)
    _batch(recipe, report)
    if offline:
        _offline(recipe, report)
        return report
    config, tokenizer = _model(recipe, report)
    judge = _judge(recipe, report)
    prompts = _data(recipe, tokenizer, judge, report) if tokenizer is not None else None
    if judge is not None and prompts is not None:
        _verdicts(recipe, judge, prompts, report)
    parameters = _parameters(recipe, config, report) if config is not None else None
    _memory(recipe, _shape(config) if config is not None else None, parameters, report)
    _disk(recipe, parameters, report)
    _folder(recipe, report)
    _resources(recipe, report)
    return report


def _offline(recipe: Recipe, report: CheckReport) -> None:
    """The recipe by itself: the verifiers' options, and memory from the table of shapes."""
    from grpo_dist.planner import shape_of

    _judge(recipe, report)
    if recipe.weights.backend == "gloo":
        _try(lambda: refuse_on_cpus(recipe.model), report)
    report.facts["skipped"] = (
        "model folder, tokenizer, data, one verdict per verifier, disk, run folder, this machine's or the cluster's "
        "resources (--offline)"
    )
    shape = _try(lambda: shape_of(recipe)[0], report)
    if shape is not None:
        report.facts["parameters"] = f"{shape.parameters:,} (from the model's shape)"
        _memory(recipe, shape, shape.parameters, report)


# ---- arithmetic


def _batch(recipe: Recipe, report: CheckReport) -> None:
    rollout, learner = recipe.rollout, recipe.learner
    plan = batch_plan(recipe)
    longest, slots = plan.longest, plan.slots
    report.facts["batch"] = (
        f"{plan.groups} groups x {rollout.group_size} completions = {plan.samples} samples a step, "
        f"{learner.updates_per_batch} x {learner.epochs} optimizer updates; "
        f"{recipe.run.steps} steps = {plan.total_samples:,} samples"
    )
    report.facts["tokens"] = (
        f"at most {recipe.data.max_prompt_tokens} + {rollout.sampling.max_tokens} = {longest} a sample, "
        f"{plan.tokens:,} a step; whole samples in micro-batches of {learner.micro_batch_tokens:,} tokens on "
        f"{learner.ranks} ranks: at most {plan.micro_batches} training passes a rank in an update, "
        f"{plan.micro_batches * plan.updates} in a step"
    )
    report.facts["window"] = (
        f"max_staleness {rollout.max_staleness}: at most {slots} groups in flight on {rollout.workers} engines "
        f"({slots * rollout.group_size / rollout.workers:g} completions each)"
    )
    if longest > learner.micro_batch_tokens:
        report.warnings.append(
            f"learner.micro_batch_tokens {learner.micro_batch_tokens} is below the longest sample ({longest} tokens): "
            "such a sample makes a micro-batch of its own, larger than the limit"
        )


# ---- model, data, verifiers


def _model(recipe: Recipe, report: CheckReport) -> tuple[Any, Any]:
    """(configuration, tokenizer), None for what cannot be had."""
    if recipe.model.path == QUICKSTART:
        from grpo_dist.quickstart.policy import WarmUp, character_tokenizer, policy_config, quickstart_policy_folder

        built = quickstart_policy_folder().is_dir()
        report.facts["model"] = "quickstart: " + ("built" if built else "will be built on first use (about a minute)")
        config, tokenizer = policy_config(WarmUp()), character_tokenizer()
    else:
        try:
            path = resolve_model(recipe.model, tell=lambda _: None)
        except UserError as error:
            report.problems.append(str(error))
            return None, None
        report.facts["model"] = path
        config = _try(lambda: load_config(path, recipe.model), report)
        tokenizer = _try(lambda: load_tokenizer(path, recipe.model), report)
    if config is not None:
        _try(lambda: refuse_untrainable(config), report)
        _try(lambda: refuse_beyond_context(recipe, config), report)
    return config, tokenizer


def _try(action: Any, report: CheckReport) -> Any:
    """What action returns; an error of ours is noted as a problem, and None comes back."""
    try:
        return action()
    except GrpoDistError as error:
        report.problems.append(str(error))
        return None


def _judge(recipe: Recipe, report: CheckReport) -> Judge | None:
    judge: Judge | None = _try(lambda: build(recipe.verifiers.use), report)
    return judge


def _data(recipe: Recipe, tokenizer: Any, judge: Judge | None, report: CheckReport) -> PromptStream | None:
    prompts: PromptStream | None = _try(
        lambda: load_prompts(
            recipe.data, tokenizer, seed=recipe.run.seed, group_size=recipe.rollout.group_size, judge=judge
        ),
        report,
    )
    if prompts is None:
        return None
    dropped = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in prompts.dropped.items() if count)
    wanted = recipe.run.steps * recipe.rollout.groups_per_step
    report.facts["data"] = (
        f"{len(prompts):,} training prompts ({wanted / len(prompts):.2g} epochs), {len(prompts.evaluation)} held out"
        + (f"; left out: {dropped}" if dropped else "")
    )
    first = prompts.request(0).prompt
    report.facts["first prompt"] = f"{len(first.token_ids)} tokens: {_brief(first.text)}"
    return prompts


def _verdicts(recipe: Recipe, judge: Judge, prompts: PromptStream, report: CheckReport) -> None:
    """One verdict per verifier that the rows use, on a row's own gold answer, through the real pool. Reward models are
    only looked at: their weights are not loaded here."""
    _try(lambda: look_at(recipe.verifiers.use), report)
    uses = tuple(use for use in recipe.verifiers.use if use.name != "reward_model")
    if not uses:
        return
    items = [
        VerifyItem(
            id=f"{prompt.id}/gold",
            prompt=prompt.text,
            completion=str(prompt.answer),
            finish_reason="stop",
            answer=prompt.answer,
            verifier=prompt.verifier,
            extra=prompt.extra,
        )
        for prompt in prompts.examples().values()
    ]

    async def score() -> list[str]:
        pool = VerifierPool(uses, timeout=min(recipe.verifiers.timeout, 10.0))
        try:
            lines = []
            for item, verdict in zip(items, await pool.score(items), strict=True):
                names = [e.label for e in judge.applicable(item.verifier) if e.verifier.name != "reward_model"]
                if verdict.error is not None:
                    report.problems.append(f"verifiers {', '.join(names)} on {item.id}: {verdict.error}")
                parts = ", ".join(f"{name} {value:g}" for name, value in verdict.parts.items())
                lines.append(f"completion {_brief(item.completion)} -> reward {verdict.reward} ({parts})")
            return lines
        finally:
            await pool.close()

    try:
        lines = asyncio.run(score())
    except GrpoDistError as error:
        report.problems.append(f"verifiers: {error}")
        return
    for i, line in enumerate(lines):
        report.facts["verdict" if i == 0 else f"verdict {i + 1}"] = line


# ---- size


def _parameters(recipe: Recipe, config: Any, report: CheckReport) -> int | None:
    """Parameters of the model, counted without memory."""
    model = _try(lambda: meta_model(config, recipe.model), report)
    if model is None:
        return None
    _try(lambda: refuse_unknown_targets(model, recipe.learner.lora), report)
    count = sum(p.numel() for p in model.parameters())
    report.facts["parameters"] = f"{count:,}"
    return count


def _shape(config: Any) -> ModelShape | None:
    """None for a model whose configuration names its sizes otherwise."""
    try:
        return shape_from_config(config.to_dict())
    except ValueError:
        return None


def _memory(recipe: Recipe, shape: ModelShape | None, parameters: int | None, report: CheckReport) -> None:
    """``grpo-dist plan`` has the parts, and compares with a cluster file."""
    if parameters is None or shape is None:
        return
    learner = learner_memory(recipe, shape, parameters=parameters)
    engine = engine_memory(recipe, shape, parameters=parameters)
    host = f" + {bytes_text(learner.host_total)} of host memory" if learner.host else ""
    report.facts["learner memory"] = (
        f"about {bytes_text(learner.device_total)} a rank{host}; rank 0 stages {bytes_text(learner.staging)} in host "
        "memory"
    )
    report.facts["engine memory"] = (
        f"about {bytes_text(engine.weights)} of weights a GPU or rank + {bytes_text(engine.kv_per_token)} of cache a "
        "token"
    )
    import psutil

    if not os.environ.get("RAY_ADDRESS") and recipe.weights.backend == "gloo":
        free = psutil.virtual_memory().available
        need = recipe.learner.ranks * learner.device_total + learner.staging + recipe.rollout.workers * learner.staging
        if need > free:
            report.warnings.append(
                f"learner and engines need about {bytes_text(need)}, this machine has {bytes_text(free)} free"
            )


# ---- places


def _disk(recipe: Recipe, parameters: int | None, report: CheckReport) -> None:
    free = free_bytes(recipe.run.out.absolute())
    if parameters is not None:
        size, kl = BYTES[recipe.model.dtype], recipe.algorithm.kl
        one = parameters * (12 + size)
        if kl.every is not None:  # a reference that moves is saved too, an average in fp32
            one += parameters * (4 if kl.reference == "ema" else size)
        need = one * (recipe.checkpoint.keep + 1)  # the next one is complete before the oldest goes
        report.facts["disk"] = (
            f"{recipe.run.out}: {bytes_text(free)} free; a checkpoint takes about {bytes_text(one)}, "
            f"{recipe.checkpoint.keep + 1} of them {bytes_text(need)}"
        )
        if need > free:
            report.problems.append(
                f"run.out {recipe.run.out}: {bytes_text(free)} free, checkpoints need about {bytes_text(need)} "
                f"(checkpoint.keep {recipe.checkpoint.keep} + the one being written)"
            )
    problem, warning = ray_temp_room()
    report.problems += [problem] if problem else []
    report.warnings += [warning] if warning else []


def ray_temp_room() -> tuple[str | None, str | None]:
    """(problem, warning) about the disk that a Ray started here writes to; (None, None) when another is joined."""
    if os.environ.get("RAY_ADDRESS"):
        return None, None
    temp = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    left = free_bytes(temp)
    if left < RAY_TEMP_NEEDED:
        return (
            f"{temp}: {bytes_text(left)} free, Ray writes logs and spills objects there and needs "
            f"{bytes_text(RAY_TEMP_NEEDED)}; free some, or set RAY_TMPDIR to a folder with room"
        ), None
    if left < RAY_TEMP_WANTED:
        return None, f"{temp}: only {bytes_text(left)} free; Ray writes logs and spills objects there"
    return None, None


def _folder(recipe: Recipe, report: CheckReport) -> None:
    """The run folder can be written, and is not another run's."""
    place = recipe.run_dir.absolute()
    there = place
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        report.problems.append(f"run.out: {there} cannot be written")
    elif (place / "recipe.yaml").exists() and not recipe.run.resume:
        report.warnings.append(
            f"run folder {place} already holds a run: continue it with --resume or choose another name"
        )


def _resources(recipe: Recipe, report: CheckReport) -> None:
    import ray

    from grpo_dist.fleet.cluster import cluster
    from grpo_dist.fleet.fleet import bundles_of, on_gpus, sizes_of
    from grpo_dist.fleet.placement import Bundle, Node, describe_misfit, first_misfit, living_nodes

    if os.environ.get("RAY_ADDRESS"):
        try:
            with cluster():
                gpus, nodes = on_gpus(recipe), living_nodes()
                bundles = bundles_of(recipe, gpus=gpus)
        except UserError as error:
            report.problems.append(str(error))
            return
        finally:
            if ray.is_initialized():
                ray.shutdown()
    else:
        import torch

        count = torch.cuda.device_count()
        gpus = recipe.weights.backend == "nccl" or (recipe.weights.backend == "auto" and count > 0)
        nodes = [Node("this machine", {"CPU": float(os.cpu_count() or 1), "GPU": float(count)}, {})]
        bundles = {
            "learner": Bundle.of("learner", recipe.learner.placement, int(gpus)),
            "rollout": Bundle.of("rollout", recipe.rollout.placement, recipe.rollout.tensor_parallel * int(gpus)),
            "verifier": Bundle.of("verifier", recipe.verifiers.placement),
            "reward": Bundle.of("reward", recipe.verifiers.reward_model.placement, recipe.verifiers.reward_model.gpus),
        }
    if not gpus:
        _try(lambda: refuse_on_cpus(recipe.model), report)
    sizes = sizes_of(recipe)
    wanted = [bundles[role] for role in bundles for _ in range(sizes[role])]
    report.facts["resources"] = "; ".join(
        f"{sizes[role]} {role} x ({', '.join(f'{v:g} {k}' for k, v in bundles[role].resources)})"
        for role in bundles
        if sizes[role]
    )
    if (misfit := first_misfit(wanted, nodes)) is not None:
        report.problems.append(describe_misfit(wanted, nodes, misfit))


def _brief(text: str, most: int = 80) -> str:
    shown = repr(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…'"
