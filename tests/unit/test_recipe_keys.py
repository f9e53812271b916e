"""The table of keys: complete, described, and what "did you mean" says."""

from __future__ import annotations

from typing import Any

from grpo_dist.config import Recipe
from grpo_dist.recipe_file import load_recipe, shipped_recipes
from grpo_dist.recipe_keys import nearest_keys, place_of_key, recipe_keys

# Keys that CONTRACT promises to scripts.
CONTRACT = [
    "run.name", "run.seed", "run.steps", "run.out", "run.resume", "model.path", "model.dtype", "model.attention",
    "data.source", "data.split", "data.columns", "data.template", "data.max_prompt_tokens", "data.evaluation",
    "rollout.workers", "rollout.tensor_parallel", "rollout.group_size", "rollout.groups_per_step",
    "rollout.max_staleness", "rollout.sampling.temperature", "rollout.sampling.top_p",
    "rollout.sampling.max_tokens", "rollout.sampling.stop", "rollout.engine", "verifiers.workers",
    "verifiers.timeout", "verifiers.use", "verifiers.use[].name", "verifiers.use[].weight", "algorithm.advantage",
    "algorithm.objective", "algorithm.divisor", "algorithm.clip_low", "algorithm.clip_high", "algorithm.kl.beta",
    "algorithm.kl.estimator", "learner.ranks", "learner.learning_rate", "learner.schedule", "learner.optimizer",
    "learner.grad_clip", "learner.micro_batch_tokens", "learner.zero", "learner.deepspeed", "weights.backend",
    "weights.verify", "checkpoint.every", "checkpoint.keep", "evaluate.every", "evaluate.sampling",
    "tracking.wandb.mode", "tracking.wandb.project", "tracking.wandb.entity", "tracking.wandb.tags",
    "tracking.tables", "faults",
]  # fmt: skip


def test_every_key_has_a_description_and_a_type() -> None:
    assert [key.path for key in recipe_keys() if not key.description.strip()] == []
    assert [key.path for key in recipe_keys() if not key.type or "typing." in key.type or "<class" in key.type] == []


def test_every_promised_key_is_there() -> None:
    paths = {key.path for key in recipe_keys()}
    assert [key for key in CONTRACT if key not in paths] == []


def test_the_table_holds_every_key_of_a_dumped_recipe() -> None:
    paths = {key.path for key in recipe_keys()}
    free = ("rollout.engine", "learner.deepspeed", "data.parameters")

    def walk(node: Any, prefix: str) -> list[str]:
        if isinstance(node, dict) and not prefix.startswith(free) and not prefix.endswith(("resources", "labels")):
            return [found for k, v in node.items() for found in walk(v, f"{prefix}.{k}".removeprefix("."))]
        return [prefix]

    for name in shipped_recipes():
        dumped = load_recipe(name).model_dump(mode="json")
        assert [path for path in walk(dumped, "") if path not in paths] == []


def test_required_keys() -> None:
    required = {key.path for key in recipe_keys() if key.required and not key.is_section}
    assert required >= {"run.name", "run.steps", "model.path", "verifiers.use[].name"}
    assert not required & {"run.seed", "rollout.group_size", "learner.ranks", "data.columns.prompt"}
    assert Recipe.model_fields["verifiers"].is_required()


def test_defaults_and_limits_are_shown() -> None:
    keys = {key.path: key for key in recipe_keys()}
    assert (keys["rollout.group_size"].default, keys["learner.learning_rate"].default) == ("16", "1e-06")
    assert (keys["verifiers.placement.cpus"].default, keys["rollout.placement.cpus"].default) == ("0.25", "0.5")
    assert keys["learner.optimizer.beta1"].type == "number (>= 0, < 1)"
    assert keys["model.dtype"].type == "float32 | bfloat16 | float16"


def test_nearest() -> None:
    assert nearest_keys("learnig_rate", ["learning_rate", "ranks"]) == ["learning_rate"]
    assert nearest_keys("zzz", ["learning_rate", "ranks"]) == []


def test_a_name_that_many_sections_have() -> None:
    text = place_of_key(("tracking", "workers"))
    assert (
        text == "unknown key here; it belongs to rollout.workers or verifiers.workers or verifiers.reward_model.workers"
    )


def test_inside_a_list() -> None:
    assert place_of_key(("verifiers", "use", 0, "nam")) == "unknown key; did you mean verifiers.use[].name?"
