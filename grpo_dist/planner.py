"""``grpo-dist plan RECIPE [--cluster FILE]``: what a run will need and how it will flow, before money is spent.

    recipe ─► shape (config.json of the folder, else a table) ─┐
    cluster file ─► machines ──────────────────────────────────┴─► plan/ ─► text or JSON

Nothing is downloaded and no library of the run is loaded. Numbers are estimates; docs/planning.md has the formulas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_dist.config import Recipe
from grpo_dist.errors import UserError
from grpo_dist.plan.advice import Machines, Plan, gpus_wanted, host_bytes, make_plan
from grpo_dist.plan.batch import BatchPlan, group_sizes
from grpo_dist.plan.memory import bytes_text
from grpo_dist.plan.shapes import KNOWN_FAMILIES, SHAPES, ModelShape, shape_of_folder
from grpo_dist.recipe_file import load_recipe
from grpo_dist.submit.cluster import ClusterFile, parse_size
from grpo_dist.submit.cluster_file import load_cluster

TOPICS = ("groups", "memory", "fleet")


def plan(
    words: Sequence[str], *, cluster: Path | None = None, gpu_memory: str | None = None, as_json: bool = False,
    say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """``words``: [groups | memory | fleet] RECIPE [key=value …]. Returns the exit status.

    Raises:
        UserError: something cannot fit, after the plan has been shown; or the input is wrong.
    """
    topics = [words[0]] if words and words[0] in TOPICS else list(TOPICS)
    rest = list(words[1:] if words and words[0] in TOPICS else words)
    if not rest:
        raise UserError("plan needs a RECIPE: grpo-dist plan [groups | memory | fleet] RECIPE [key=value …]")
    recipe = load_recipe(rest[0], rest[1:])
    machines = machines_of(load_cluster(cluster).cluster) if cluster is not None else ()
    try:
        size = None if gpu_memory is None else parse_size(gpu_memory)
    except ValueError as error:
        raise UserError(f"--gpu-memory: {error}") from error
    shape, source = shape_of(recipe)
    made = make_plan(recipe, shape, machines, gpu_bytes=size)
    if shape.family not in KNOWN_FAMILIES:
        made.warnings.insert(0, f"model type {shape.family!r}: formulas of Llama-like decoders are used")
    if as_json:
        say(json.dumps(as_dict(made, source), indent=2))
    else:
        for line in lines(made, source, topics):
            say(line)
    if made.problems:
        raise UserError("\n".join(made.problems))
    return 0


def shape_of(recipe: Recipe) -> tuple[ModelShape, str]:
    """(shape, where it is from).

    Raises:
        UserError: neither a folder with a config.json nor a model of the table.
    """
    path = recipe.model.path
    folder = Path(path).expanduser()
    if folder.is_dir():
        try:
            return shape_of_folder(folder), str(folder / "config.json")
        except ValueError as error:
            raise UserError(f"model.path {path}: {error}") from error
    if path in SHAPES:
        return SHAPES[path], "table of shapes"
    raise UserError(
        f"model.path {path}: no such folder, and not in the table of shapes ({', '.join(SHAPES)}); download "
        "the model's config.json into a folder and name that"
    )


def machines_of(cluster: ClusterFile) -> tuple[Machines, ...]:
    """The cluster file's nodes; none for a cluster that is there already."""
    if cluster.backend in ("local", "ray"):
        return ()
    return tuple(
        Machines(
            f"roles.{role}", tuple(cluster.roles.guests(role)), max(group.count, group.max or 0), group.gpus,
            group.gpu_memory, group.memory,
        )
        for role, group in cluster.roles.groups()
    )  # fmt: skip


def lines(made: Plan, source: str, topics: Sequence[str] = TOPICS) -> Iterator[str]:
    """The plan for people."""
    shape, recipe = made.shape, made.recipe
    experts = f", {shape.experts} experts, {shape.experts_per_token} a token" if shape.experts else ""
    rows: list[tuple[str, str]] = [
        ("model", f"{recipe.model.path}: {shape.parameters:,} parameters, {shape.layers} layers{experts} ({source})")
    ]
    rows += _groups(made.recipe, made.batch) if "groups" in topics else []
    rows += _sizes(made.batch.samples) if topics == ["groups"] else []
    rows += _memory(made) if "memory" in topics else []
    rows += _fleet(made) if "fleet" in topics else []
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:<{width}}  {text}" for name, text in rows)
    yield from (f"warning: {text}" for text in made.warnings)
    if made.problems:
        yield f"{len(made.problems)} problem(s), listed on standard error"
    else:
        yield "fits, as far as can be computed" if made.machines else "not compared with machines: --cluster FILE"


def _groups(recipe: Recipe, batch: BatchPlan) -> list[tuple[str, str]]:
    updates = f"{batch.updates} update{'s' if batch.updates > 1 else ''} a step"
    epoch = (
        f"{batch.steps_per_epoch:,.0f} steps an epoch ({batch.rows:,} rows); "
        f"{recipe.run.steps} steps are {recipe.run.steps / batch.steps_per_epoch:.2g} epochs"
        if batch.rows and batch.steps_per_epoch
        else "the number of rows is not known here; `grpo-dist check` counts them"
    )
    return [
        (
            "step",
            f"{batch.groups} groups x {recipe.rollout.group_size} = {batch.samples:,} samples, at most "
            f"{batch.longest:,} tokens each, {batch.tokens:,} together; {updates}",
        ),
        ("run", f"{recipe.run.steps:,} steps, {batch.total_samples:,} samples"),
        ("epoch", epoch),
        (
            "rank",
            f"at most {batch.micro_batches} micro-batches of {recipe.learner.micro_batch_tokens:,} tokens an update on "
            f"each of {recipe.learner.ranks} ranks",
        ),
        (
            "window",
            f"max_staleness {recipe.rollout.max_staleness}: {batch.slots} groups in flight on {recipe.rollout.workers} "
            f"engines, up to {batch.in_flight} completions on each",
        ),
    ]


def _sizes(samples: int) -> list[tuple[str, str]]:
    """The same samples in groups of other sizes."""
    rows = []
    for size, found in group_sizes(samples).items():
        shown = ", ".join(f"{groups:.1f} at {rate:.0%}" for rate, groups in found.items())
        rows.append((f"G = {size}", f"{samples // size} groups; with right and wrong answers, by pass rate: {shown}"))
    return rows


def _memory(made: Plan) -> list[tuple[str, str]]:
    learner, engine = made.learner, made.engine
    rows = [("learner rank", _parts(learner.device_total, learner.device))]
    if learner.host:
        rows.append(("  host", _parts(learner.host_total, learner.host)))
    rows.append(("  rank 0", f"+ {bytes_text(learner.staging)} of host memory: the staged weights"))
    room = (
        ""
        if engine.budget is None
        else f", {bytes_text(engine.budget)} of cache = {engine.sequences:,} sequences of "
        f"{made.recipe.longest_sequence:,} tokens (max_num_seqs {engine.limit:,})"
    )
    rows.append(
        (
            "engine GPU",
            f"{bytes_text(engine.weights)} of weights, {bytes_text(engine.kv_per_token)} of cache a token{room}",
        )
    )
    return rows


def _parts(total: int, parts: dict[str, int]) -> str:
    shown = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    return f"about {bytes_text(total)}: {shown}"


def _fleet(made: Plan) -> list[tuple[str, str]]:
    wanted = gpus_wanted(made.recipe)
    judges = f", {wanted['verifier']} for reward models" if wanted["verifier"] else ""
    rows = [("GPUs", f"{wanted['learner']} for the learner, {wanted['rollout']} for engines{judges}")]
    for one in made.machines:
        size = f" of {bytes_text(one.gpu_bytes)}" if one.gpu_bytes else ""
        text = f"{', '.join(one.roles)}: {one.nodes} x {one.gpus} GPUs{size}"
        if "learner" in one.roles:
            text += f"; host memory about {bytes_text(host_bytes(made, one)[0])} of a node" + (
                f"'s {bytes_text(one.host_bytes)}" if one.host_bytes else ""
            )
        rows.append((one.name, text))
    return rows


def as_dict(made: Plan, source: str) -> dict[str, Any]:
    """The plan for scripts: sizes in bytes."""
    return {
        "fits": not made.problems,
        "model": {"path": made.recipe.model.path, "parameters": made.shape.parameters, "source": source},
        "batch": asdict(made.batch),
        "learner": asdict(made.learner) | {"device_total": made.learner.device_total},
        "engine": asdict(made.engine) | {"concurrent": made.engine.concurrent},
        "gpus": gpus_wanted(made.recipe),
        "machines": [asdict(one) for one in made.machines],
        "problems": made.problems,
        "warnings": made.warnings,
    }
