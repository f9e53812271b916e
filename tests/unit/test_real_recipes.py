"""The shipped recipes that need GPUs and downloads: loaded, planned against their cluster file and checked offline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo_dist import cli
from grpo_dist.recipe_file import load_recipe, shipped_recipes
from grpo_dist.submit.plan import make_submission
from grpo_dist.submit.verbs import backend_of

ROOT = Path(__file__).parents[2]
REAL = {name: file for name, file in shipped_recipes().items() if "# cluster: " in file.read_text()}


def cluster_of(name: str) -> Path:
    found = re.search(r"^# cluster: (.*)$", REAL[name].read_text(), re.MULTILINE)
    assert found is not None
    return ROOT / found[1]


def test_the_five_of_them_are_there() -> None:
    assert {"gsm8k-0.6b", "gsm8k-1.7b", "math-8b", "math-32b", "moe-30b-a3b"} <= set(REAL)


@pytest.mark.parametrize("name", sorted(REAL))
class TestReal:
    def test_it_fits_its_cluster_and_wastes_nothing(self, name: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert cli.run_command(["plan", name, "--cluster", str(cluster_of(name)), "--json"]) == 0
        plan = json.loads(capfd.readouterr().out)
        known = [text for text in plan["warnings"] if text.startswith("mixture of experts: ")]
        assert (plan["fits"], plan["problems"], plan["warnings"]) == (True, [], known)
        assert len(known) == (name == "moe-30b-a3b")
        assert plan["gpus"]["learner"] + plan["gpus"]["rollout"] == sum(
            m["nodes"] * m["gpus"] for m in plan["machines"]
        )
        assert plan["batch"]["steps_per_epoch"] is not None

    def test_the_memory_in_its_comment_is_what_plan_says(self, name: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert cli.run_command(["plan", "memory", name]) == 0
        said = re.search(r"^learner rank +(about [\d.]+ GB)", capfd.readouterr().out, re.MULTILINE)
        assert said is not None
        assert f"# plan: learner rank {said[1]}\n" in REAL[name].read_text()

    def test_it_is_sound_offline(self, name: str, capfd: pytest.CaptureFixture[str]) -> None:
        assert cli.run_command(["check", name, "--offline"]) == 0
        out = capfd.readouterr().out
        assert "skipped         model folder, tokenizer, data" in out
        assert "the recipe is sound; what is listed as skipped was not looked at" in out

    def test_it_can_be_submitted(self, name: str) -> None:
        one = make_submission(name, cluster_of(name), dry_run=True)
        assert backend_of(one.loaded.cluster.backend).render(one)

    def test_what_a_first_run_on_gpus_needs(self, name: str) -> None:
        recipe = load_recipe(name)
        assert recipe.model.dtype == "bfloat16"
        assert recipe.weights.backend == "auto"
        assert recipe.algorithm.kl.beta == 0
        assert recipe.rollout.engine.get("gpu_memory_utilization", 0.85) <= 0.88
        assert recipe.evaluate.every
        assert recipe.data.evaluation.size


def test_offline_finds_what_is_wrong_with_the_recipe_itself(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["check", "math-8b", "--offline", "verifiers.use.0.name=maths", "rollout.engine.max_seqs=3"]
    assert cli.run_command([*words, "model.path=some/model"]) == 2
    err = capfd.readouterr().err
    assert "did you mean 'math'?" in err
    assert "rollout.engine.max_seqs: vLLM's engine has no such argument" in err
    assert "model.path some/model: no such folder, and not in the table of shapes" in err
