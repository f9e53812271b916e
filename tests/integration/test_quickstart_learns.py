"""The quickstart's promise, on fresh seeds: synchronous, one and two versions behind, the policy learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.recipe_file import load_recipe
from grpo_dist.train import run
from tests.integration.runs import jsonl, metrics

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize(("staleness", "seed"), [(0, 101), (1, 102), (2, 103)])
def test_twenty_steps_take_held_out_pass_at_1_from_a_half_to_three_quarters(
    staleness: int, seed: int, tmp_path: Path
) -> None:
    recipe = load_recipe(
        "quickstart",
        [
            f"run.seed={seed}",
            f"run.out={tmp_path}",
            f"rollout.max_staleness={staleness}",
            "tracking.wandb.mode=disabled",
        ],
    )
    assert run(recipe) == 0
    evaluations = {row["step"]: row["eval/pass@1"] for row in jsonl(recipe.run_dir / "evals.jsonl")}
    assert set(evaluations) == {0, 5, 10, 15, 20}
    assert evaluations[0] <= 0.5
    assert evaluations[20] >= 0.75
    rows = metrics(recipe.run_dir)
    assert max(row["rollout/staleness_max"] for row in rows) == staleness  # used, and never exceeded
    assert all(row["rollout/staleness_max"] <= staleness for row in rows)
    if staleness == 0:
        assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
        held_out = {row["prompt"] for row in _prompts(recipe.run_dir)} & _held_out()
        assert not held_out


def _prompts(run_dir: Path) -> list[dict[str, str]]:
    return [row for file in (run_dir / "rollouts").glob("*.jsonl") for row in jsonl(file)]


def _held_out() -> set[str]:
    from grpo_dist.quickstart.task import quickstart_rows

    return {row["prompt"] for row in quickstart_rows()[1]}
