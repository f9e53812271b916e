"""The learning rate by hand, and the DeepSpeed configuration that keeps gradients exact."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from grpo_dist.check import check
from grpo_dist.config import AlgorithmSection, LearnerSection, ModelSection, Recipe
from grpo_dist.errors import UserError
from grpo_dist.learner.ds_config import merged, policy_config, reference_config
from grpo_dist.learner.spec import LearnerSpec, learning_rate, refuse_on_cpus, spec_for
from tests.conftest import tiny_recipe


def rates(total: int, **schedule: object) -> list[float]:
    learner = LearnerSection(learning_rate=1.0, schedule=schedule)
    return [round(learning_rate(step, total, learner), 4) for step in range(1, total + 1)]


def test_rates_by_hand() -> None:
    assert rates(4) == [1, 1, 1, 1]
    assert rates(5, name="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1]
    assert rates(6, name="linear", warmup_steps=2) == [0.5, 1, 0.75, 0.5, 0.25, 0]
    assert rates(4, name="linear", final_fraction=0.2) == [0.8, 0.6, 0.4, 0.2]
    assert rates(4, name="cosine") == [0.8536, 0.5, 0.1464, 0]
    assert rates(4, name="cosine", final_fraction=0.5) == [0.9268, 0.75, 0.5732, 0.5]
    assert rates(2, name="linear", warmup_steps=5) == [0.2, 0.4]


def test_the_rate_moves_with_every_update_of_a_step() -> None:
    """Three steps of two updates: six points, and after each step the rate of a single update."""

    def of_updates(**schedule: object) -> list[float]:
        learner = LearnerSection(learning_rate=1.0, schedule=schedule)
        return [round(learning_rate(update / 2, 3, learner), 4) for update in range(1, 7)]

    assert of_updates(name="linear") == [0.8333, 0.6667, 0.5, 0.3333, 0.1667, 0]
    assert of_updates(name="linear", warmup_steps=1) == [0.5, 1, 0.75, 0.5, 0.25, 0]
    assert of_updates(name="constant", warmup_steps=2) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert of_updates(name="cosine")[1::2] == rates(3, name="cosine")


def test_rates_beyond_the_end_and_before_the_start() -> None:
    learner = LearnerSection(learning_rate=1.0, schedule={"name": "linear", "final_fraction": 0.1})
    assert learning_rate(99, 10, learner) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(0, 10, learner)


def spec(**keys: object) -> LearnerSpec:
    dtype = str(keys.pop("dtype", "float32"))
    return LearnerSpec(
        ModelSection(path="m", dtype=dtype), AlgorithmSection(), LearnerSection(**keys), rank=0, world=3,
        host="h", port=1, temperature=1.0, total_steps=10, seed=0,
    )  # fmt: skip


def test_spec_comes_from_a_recipe_and_travels() -> None:
    recipe = Recipe.model_validate(tiny_recipe(learner={"ranks": 2}, rollout={"sampling": {"temperature": 0.7}}))
    made = spec_for(recipe, path="/models/x", rank=1, host="10.0.0.1", port=5, backend="nccl")
    assert (made.model.path, made.world, made.temperature) == ("/models/x", 2, 0.7)
    assert (made.total_steps, made.device) == (2, "cuda")
    assert pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, rank=0).rank == 0


def test_config_leaves_the_gradient_scale_to_us() -> None:
    config = policy_config(spec(grad_clip=0.5, deepspeed={"zero_optimization": {"reduce_bucket_size": 7}}))
    assert config["gradient_accumulation_steps"] == 1
    assert config["train_batch_size"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["reduce_scatter"] is True
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert "data_types" not in config
    half = policy_config(spec(dtype="bfloat16"))
    assert half["bf16"] == {"enabled": True}
    assert half["data_types"] == {"grad_accum_dtype": "fp32"}


def test_a_reference_has_no_optimizer_to_offload() -> None:
    override = {"zero_optimization": {"stage3_max_live_parameters": 5}}
    offloaded = spec(zero={"offload_optimizer": True}, deepspeed=override)
    assert policy_config(offloaded)["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    config = reference_config(offloaded)
    assert "offload_optimizer" not in config["zero_optimization"]
    assert config["zero_optimization"]["stage3_max_live_parameters"] == 5
    assert "gradient_clipping" not in config


def test_merge_goes_section_by_section() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}, "e": 4}) == {"a": {"b": 9, "c": 2}, "d": 3, "e": 4}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"attention": "varlen", "dtype": "bfloat16"},
            "model.attention: wanted auto, segment or eager .* found varlen",
        ),
        ({"dtype": "float16"}, "model.dtype: wanted bfloat16 or float32 for a run on CPUs, found float16"),
    ],
)
def test_what_only_gpus_can_do_is_refused_before_anything_starts(
    model: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_dist.learner.spec._cpu_has_fp16", lambda: False)
    recipe = Recipe.model_validate(tiny_recipe(model=model, weights={"backend": "gloo"}))
    with pytest.raises(UserError, match=words) as caught:
        refuse_on_cpus(recipe.model)
    assert str(caught.value) in check(recipe, offline=True).problems
    later = recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"backend": "auto"})})
    assert str(caught.value) not in check(later, offline=True).problems


def test_float16_where_the_cpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.learner.spec._cpu_has_fp16", lambda: True)
    refuse_on_cpus(ModelSection(path="m", dtype="float16"))
    refuse_on_cpus(ModelSection(path="m", dtype="bfloat16"))
