"""What cannot fit, and what would stand idle: one sentence each, with the key to change. Pure arithmetic.

    recipe + shape + machines ─► Plan (batch, learner, engine, machines) ─► problems (cannot run), warnings (wasteful)

Left out: speed. How long a rollout or an update takes is measured by a run (`time/*_idle_fraction`), not guessed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from grpo_dist.config import Recipe
from grpo_dist.plan.batch import BatchPlan, batch_plan
from grpo_dist.plan.memory import (
    PACKED_BUFFERS,
    UTILIZATION,
    EngineMemory,
    LearnerMemory,
    bytes_text,
    engine_memory,
    learner_memory,
)
from grpo_dist.plan.shapes import ModelShape

FULL = 0.95  # of a GPU: the allocator never uses the rest


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes that are alike, and the roles that live on them."""

    name: str
    roles: tuple[str, ...]
    nodes: int
    gpus: int  # of a node
    gpu_bytes: int | None = None  # of one GPU
    host_bytes: int | None = None  # of a node


@dataclass(slots=True)
class Plan:
    """Everything that follows from a recipe, a shape and machines."""

    recipe: Recipe
    shape: ModelShape
    machines: tuple[Machines, ...]
    batch: BatchPlan
    learner: LearnerMemory
    engine: EngineMemory
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def make_plan(
    recipe: Recipe, shape: ModelShape, machines: tuple[Machines, ...] = (), *, gpu_bytes: int | None = None,
    rows: int | None = None,
) -> Plan:  # fmt: skip
    """``gpu_bytes``: of every GPU whose machines do not say."""
    engines_on = _gpu_bytes("rollout", machines, gpu_bytes)
    plan = Plan(
        recipe, shape, machines, batch_plan(recipe, rows), learner_memory(recipe, shape),
        engine_memory(recipe, shape, gpu_bytes=engines_on),
    )  # fmt: skip
    ranks_on = _gpu_bytes("learner", machines, gpu_bytes)
    plan.problems += [*_shape(plan), *_learner(plan, ranks_on), *_engine(plan, engines_on), *_counts(plan)]
    plan.warnings += [
        *_unready(shape),
        *_idle_gpus(plan),
        *_flow(plan),
        *_beside(plan, engines_on),
        *_slow(plan, ranks_on),
    ]
    host_problems, host_warnings = _host(plan)
    plan.problems += host_problems
    plan.warnings += host_warnings
    return plan


def _gpu_bytes(role: str, machines: tuple[Machines, ...], default: int | None) -> int | None:
    for one in machines:
        if role in one.roles and one.gpu_bytes is not None:
            return one.gpu_bytes
    return default


def _shape(plan: Plan) -> Iterator[str]:
    recipe, shape = plan.recipe, plan.shape
    tensor_parallel = recipe.rollout.tensor_parallel
    if shape.heads % tensor_parallel:
        yield (
            f"rollout.tensor_parallel {tensor_parallel} does not divide the model's {shape.heads} attention heads: "
            "vLLM refuses it"
        )
    if recipe.longest_sequence > shape.context:
        yield f"the longest sequence, {recipe.longest_sequence} tokens, exceeds the model's context of {shape.context}"


def _unready(shape: ModelShape) -> Iterator[str]:
    if shape.experts:
        yield (
            "mixture of experts: the check of the first publication stopped a tiny one on CPUs: its experts do not "
            "land in the engine as its own loader puts them; expect this run to stop there too"
        )


def _learner(plan: Plan, gpu_bytes: int | None) -> Iterator[str]:
    if gpu_bytes is None or plan.learner.device_total <= FULL * gpu_bytes:
        return
    learner = plan.recipe.learner
    advice = [f"more learner.ranks than {learner.ranks}"]
    if not learner.gradient_checkpointing:
        advice.append("learner.gradient_checkpointing: true")
    if learner.micro_batch_tokens > plan.batch.longest:
        advice.append(f"learner.micro_batch_tokens down to {plan.batch.longest}")
    if not learner.zero.offload_optimizer:
        advice.append("learner.zero.offload_optimizer: true")
    yield (
        f"a learner rank needs about {bytes_text(plan.learner.device_total)}, its GPU has {bytes_text(gpu_bytes)}: "
        + ", or ".join(advice)
    )


def _engine(plan: Plan, gpu_bytes: int | None) -> Iterator[str]:
    engine = plan.engine
    if engine.budget is None or engine.sequences is None:
        return
    if engine.budget <= 0 and gpu_bytes is not None:
        yield (
            f"an engine's weights ({bytes_text(engine.weights)} a GPU) leave no room for a cache on a GPU of "
            f"{bytes_text(gpu_bytes)}: raise rollout.tensor_parallel"
        )
    elif engine.sequences < 1:
        yield (
            f"an engine's cache of {bytes_text(engine.budget)} a GPU does not hold one sequence of "
            f"{plan.recipe.longest_sequence} tokens: raise rollout.tensor_parallel, or shorten sampling.max_tokens"
        )


def gpus_wanted(recipe: Recipe) -> dict[str, int]:
    """Role -> GPUs of a run on GPUs; reward models count where the verifiers are."""
    judges = sum(use.name == "reward_model" for use in recipe.verifiers.use)
    section = recipe.verifiers.reward_model
    return {
        "learner": recipe.learner.ranks,
        "rollout": recipe.rollout.workers * recipe.rollout.tensor_parallel,
        "verifier": math.ceil(judges * section.workers * section.gpus),
        "head": 0,
    }


def _counts(plan: Plan) -> Iterator[str]:
    wanted, recipe = gpus_wanted(plan.recipe), plan.recipe
    for one in plan.machines:
        asked = sum(wanted[role] for role in one.roles)
        if not asked:
            continue
        if asked > one.nodes * one.gpus:
            parts = ", ".join(f"{role} {wanted[role]}" for role in one.roles if wanted[role])
            yield f"{one.name}: {one.nodes} nodes x {one.gpus} GPUs, the recipe wants {asked} ({parts})"
        elif "rollout" in one.roles and recipe.rollout.tensor_parallel > one.gpus:
            yield (
                f"{one.name}: an engine of {recipe.rollout.tensor_parallel} GPUs stays on one node, which has "
                f"{one.gpus}: lower rollout.tensor_parallel"
            )


def _idle_gpus(plan: Plan) -> Iterator[str]:
    wanted = gpus_wanted(plan.recipe)
    for one in plan.machines:
        have, asked = one.nodes * one.gpus, sum(wanted[role] for role in one.roles)
        if asked < have:
            keys = [
                key for role, key in (("learner", "learner.ranks"), ("rollout", "rollout.workers")) if role in one.roles
            ]
            yield (
                f"{one.name}: {have - asked} of {have} GPUs have no work"
                + (f": raise {' or '.join(keys)}" if keys else ": no role that uses GPUs lives there")
            )


def _flow(plan: Plan) -> Iterator[str]:
    """Who waits for whom."""
    recipe, batch, engine = plan.recipe, plan.batch, plan.engine
    workers = recipe.rollout.workers
    if batch.slots < workers:
        yield (
            f"{batch.slots} groups in flight for {workers} engines: {workers - batch.slots} engines never have work; "
            "raise rollout.groups_per_step or rollout.max_staleness"
        )
    if recipe.rollout.max_staleness == 0 and plan.machines:
        yield (
            "rollout.max_staleness 0: engines wait while the learner trains, and the learner waits while they "
            "generate; 1 lets both work at the same time"
        )
    # Few completions reach the longest length: half of it is taken for usual.
    if engine.concurrent is not None and 0 < 2 * engine.concurrent < batch.in_flight:
        why = "max_num_seqs" if engine.limit <= (engine.sequences or 0) else "the cache"
        yield (
            f"up to {batch.in_flight} completions in flight on an engine, {engine.concurrent} at a time at full length "
            f"({why}): many queue or are preempted; more rollout.workers, or fewer groups in flight"
        )
    if batch.samples < recipe.learner.ranks * recipe.learner.updates_per_batch:
        yield f"an update has fewer samples than learner.ranks {recipe.learner.ranks}: some ranks train nothing"
    if recipe.learner.micro_batch_tokens < batch.longest:
        yield (
            f"learner.micro_batch_tokens {recipe.learner.micro_batch_tokens:,} is below the longest sample "
            f"({batch.longest:,} tokens): such a sample makes a micro-batch of its own, larger than the limit"
        )


def _beside(plan: Plan, gpu_bytes: int | None) -> Iterator[str]:
    if gpu_bytes is None or "kv_cache_memory_bytes" in plan.recipe.rollout.engine:
        return
    share = float(plan.recipe.rollout.engine.get("gpu_memory_utilization", UTILIZATION))
    if (1 - share) * gpu_bytes < PACKED_BUFFERS + (2 << 30):
        yield (
            f"rollout.engine.gpu_memory_utilization {share:g} leaves {bytes_text((1 - share) * gpu_bytes)} of a GPU, a "
            f"publication needs about {bytes_text(PACKED_BUFFERS)} beside CUDA's own: lower it"
        )


def _slow(plan: Plan, gpu_bytes: int | None) -> Iterator[str]:
    """Options that cost speed and are not needed."""
    zero = plan.recipe.learner.zero
    moved = plan.learner.host_total
    if gpu_bytes is not None and (zero.offload_optimizer or zero.offload_parameters):
        stay = plan.learner.device_total + moved
        if stay <= 0.85 * gpu_bytes:
            yield (
                f"offload moves {bytes_text(moved)} a rank to host memory although all of it, "
                f"{bytes_text(stay)}, fits a GPU of {bytes_text(gpu_bytes)}: it costs time for nothing"
            )


def _host(plan: Plan) -> tuple[list[str], list[str]]:
    """Memory of the nodes that hold learner ranks; engines need their weights once while they load."""
    problems, warnings = [], []
    for one in plan.machines:
        if one.host_bytes is None or "learner" not in one.roles:
            continue
        need, ranks = host_bytes(plan, one)
        text = (
            f"{one.name}: a node needs about {bytes_text(need)} of host memory ({ranks} ranks x "
            f"{bytes_text(plan.learner.host_total)} + {bytes_text(plan.learner.staging)} staged by rank 0 + the model "
            f"while it loads), it has {bytes_text(one.host_bytes)}"
        )
        if need > one.host_bytes:
            problems.append(f"{text}: more nodes, or no offload")
        elif need > 0.8 * one.host_bytes:
            warnings.append(f"{text}: tight, Ray ends workers above 95 %")
    return problems, warnings


def host_bytes(plan: Plan, on: Machines) -> tuple[int, int]:
    """(bytes on the fullest node of the learner, ranks on it)."""
    ranks = min(plan.recipe.learner.ranks, on.gpus or plan.recipe.learner.ranks)
    loading = plan.learner.staging * (ranks if plan.shape.experts else 1)  # experts are stacked in every rank
    return ranks * plan.learner.host_total + plan.learner.staging + loading, ranks
