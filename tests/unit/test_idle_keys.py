"""Keys that contradict each other are refused; keys that do nothing are named by ``check``; defaults never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_dist.check import check
from grpo_dist.config import CORRECTIONS, Recipe
from grpo_dist.plan.idle_keys import idle_keys
from grpo_dist.recipe_file import dump_recipe, load_recipe, shipped_recipes
from tests.conftest import tiny_recipe


def algorithm(**keys: Any) -> Recipe:
    return Recipe.model_validate(tiny_recipe(algorithm=keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"filters": {"refill_most": 40}}, "refill_most is given, but zero_variance is keep"),
        ({"filters": {"refill_most": 40, "zero_variance": "drop"}}, "refill_most is given, but zero_variance is drop"),
        ({"filters": {"overlong_buffer": 4}}, "overlong_buffer is given, but truncated is keep"),
        ({"objective": "cispo", "clip_dual": 3.0}, "clip_dual is given, but objective cispo has no dual clip"),
        ({"advantage": "pass_at_k", "pass_k": 5}, "pass_k 5 is more than rollout.group_size 4"),
        ({"filters": {"difficulty": {"rest": 65}}}, "rest 65 is more than longest 64"),
        ({"correction": {"mask": "token", "low": 1.1}}, "low 1.1 is above 1: mask token would drop everything"),
        ({"correction": {"mask": "geometric", "high": 0.9}}, "high 0.9 is below 1: mask geometric would drop"),
    ],
)
def test_a_contradiction_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        algorithm(**keys)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"algorithm": {"filters": {"overlong_factor": 2.0}}}, "filters.overlong_factor 2.0 has no effect with"),
        ({"algorithm": {"filters": {"difficulty": {"rest": 2}}}}, "filters.difficulty.rest 2 has no effect with"),
        ({"algorithm": {"divisor_tokens": 40}}, "divisor_tokens 40 has no effect with algorithm.divisor token"),
        ({"algorithm": {"pass_k": 2}}, "pass_k 2 has no effect with algorithm.advantage grpo"),
        ({"algorithm": {"sapo_tau_negative": 2}}, "sapo_tau_negative 2.0 has no effect with algorithm.objective clip"),
        (
            {"algorithm": {"objective": "sapo", "clip_high": 0.3}},
            "clip_high 0.3 has no effect with algorithm.objective",
        ),
        ({"algorithm": {"kl": {"place": "reward"}}}, "kl.place reward has no effect with algorithm.kl.beta 0"),
        ({"algorithm": {"kl": {"estimator": "k2"}}}, "kl.estimator k2 has no effect with algorithm.kl.beta 0"),
        (
            {"algorithm": {"correction": {"low": 0.7}}},
            "correction.low 0.7 has no effect with algorithm.correction.mask",
        ),
        ({"algorithm": {"correction": {"cap": 3.0}}}, "correction.cap 3.0 has no effect with algorithm.correction.wei"),
        (
            {"learner": {"lora": {"targets": ["q_proj"]}}},
            "lora.targets ['q_proj'] has no effect with learner.lora.rank 0",
        ),
        ({"learner": {"schedule": {"final_fraction": 0.1}}}, "final_fraction 0.1 has no effect with"),
        ({"learner": {"schedule": {"warmup_steps": 2}}}, "warmup_steps 2 is not below run.steps 2"),
    ],
)
def test_what_does_nothing_is_named_once(sections: dict[str, dict[str, Any]], says: str) -> None:
    recipe = Recipe.model_validate(tiny_recipe(**sections))
    (found,) = idle_keys(recipe)
    assert says in found
    assert found in check(recipe, offline=True).warnings


def test_a_moving_reference_without_a_penalty() -> None:
    found = idle_keys(algorithm(kl={"reference": "ema", "ema": 0.1}))
    assert [text.split()[0] for text in found] == ["algorithm.kl.reference", "algorithm.kl.ema"]
    assert idle_keys(algorithm(kl={"beta": 0.1, "reference": "ema", "ema": 0.1})) == []


@pytest.mark.parametrize(("estimator", "named"), [("k1", 0), ("k2", 1), ("k3", 0), ("unbiased", 1)])
def test_the_estimator_of_a_penalty_in_the_reward_is_k1(estimator: str, named: int) -> None:
    """k3 is the default: a run's own recipe.yaml has it."""
    found = idle_keys(algorithm(kl={"beta": 0.1, "place": "reward", "estimator": estimator}))
    assert len(found) == named


USED: list[dict[str, Any]] = [
    {},
    *({"correction": name} for name in CORRECTIONS),
    {"divisor": "constant"},
    {"advantage": "pass_at_k", "pass_k": 2},
    {"objective": "sapo", "sapo_tau_positive": 2.0},
    {"clip_dual": 3.0, "kl": {"beta": 0.1, "place": "reward"}},
    {"filters": {"truncated": "penalise", "overlong_buffer": 4, "overlong_factor": 2.0, "difficulty": {"patience": 2}}},
    {"filters": {"zero_variance": "refill", "refill_most": 8}},
]


@pytest.mark.parametrize("keys", USED, ids=str)
def test_what_is_used_and_what_a_run_writes_is_neither_refused_nor_named(keys: dict[str, Any], tmp_path: Path) -> None:
    recipe = algorithm(**keys)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))  # every key, defaults too
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again == recipe
    assert idle_keys(again) == []


def test_the_divisor_of_a_written_recipe_may_be_changed(tmp_path: Path) -> None:
    """It filled divisor_tokens itself."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(algorithm(divisor="constant")))
    again = load_recipe(tmp_path / "recipe.yaml", ["algorithm.divisor=token"])
    assert again.algorithm.divisor_tokens == 16
    assert idle_keys(again) == []


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_have_no_idle_keys(name: str) -> None:
    assert idle_keys(load_recipe(name)) == []


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"kl": {"beta": True}}},
        {"run": {"steps": True}},
        {"data": {"limit": True}},
        {"algorithm": {"clip_dual": True}},
        {"rollout": {"sampling": {"temperature": True}}},
        {"verifiers": {"use": [{"name": "exact", "weight": False}]}},
    ],
    ids=str,
)
def test_a_boolean_is_no_number(sections: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ValidationError, match=r"wanted a number, found (true|false)") as caught:
        Recipe.model_validate(tiny_recipe(**sections))
    assert "wanted" in caught.value.errors()[0]["msg"]  # beside it pydantic may count the good entries of a list
