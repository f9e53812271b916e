"""`score` and `replay`: files in, verdicts out, with the pool that training uses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.algorithms.advantages import assign_advantages
from grpo_dist.config import Recipe, VerifierUse
from grpo_dist.errors import DataError, RecipeError, UserError
from grpo_dist.monitor.records import RunFolder
from grpo_dist.replay import replay
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from grpo_dist.verifiers.registry import build
from grpo_dist.verifiers.score import score_file
from grpo_dist.verifiers.worker import items_of
from tests.conftest import tiny_recipe


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def score(path: Path, **options: Any) -> list[dict[str, Any]]:
    out = io.StringIO()
    summary = score_file(path, out, **options)
    verdicts = [json.loads(line) for line in out.getvalue().splitlines()]
    assert summary.rows == len(verdicts)
    return verdicts


def test_one_verdict_per_row_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": "?", "completion": f"\\boxed{{{i % 7}}}", "answer": 3} for i in range(200)]
    rows[5]["verifier"] = "exact"
    rows[6] = {"completion": "7", "answer": None}
    verdicts = score(write(tmp_path / "a.jsonl", rows), verifier="numeric", workers=2)
    assert [v["reward"] for v in verdicts] == [None if i == 6 else float(i % 7 == 3 and i != 5) for i in range(200)]
    assert set(verdicts[0]) == {"reward", "correct", "parts", "error", "seconds"}
    assert verdicts[5]["parts"] == {"exact": 0.0}
    assert "gold" in verdicts[6]["error"]


def test_a_stuck_answer_comes_in_its_place(tmp_path: Path) -> None:
    rows = [{"completion": rf"\boxed{{{'7^{7^{7^{7}}}' if i == 3 else 4}}}", "answer": 4} for i in range(100)]
    verdicts = score(write(tmp_path / "a.jsonl", rows), verifier="math", workers=1, timeout=2.0)
    assert [v["reward"] for v in verdicts] == [None if i == 3 else 1.0 for i in range(100)]


def test_a_recipes_verifiers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"completion": "#4", "answer": "4"}, {"completion": "4", "answer": "4"}])
    uses = [VerifierUse.model_validate({"name": "exact", "after": "#"}), VerifierUse(name="numeric", weight=0.5)]
    assert [v["reward"] for v in score(path, uses=uses)] == [1.5, 0.5]


def test_bad_rows_are_listed_at_once(tmp_path: Path) -> None:
    rows = ["{", [1], {"answer": 3}, {"completion": 3}, {"completion": "", "verifier": 3}, {"completion": "", "verifier": "no"},
            {"completion": "", "finish_reason": "x"}, {"completion": "4", "answer": 4}]  # fmt: skip
    with pytest.raises(DataError) as error:
        score(write(tmp_path / "a.jsonl", rows), verifier="numeric")
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [f"a.jsonl:{i}" for i in range(1, 8)]
    with pytest.raises(DataError, match="no default was given"):
        score(write(tmp_path / "b.jsonl", rows[-1:]))
    with pytest.raises(DataError, match="cannot be read"):
        score(tmp_path / "absent.jsonl", verifier="numeric")
    with pytest.raises(RecipeError, match="numeric"):
        score(write(tmp_path / "c.jsonl", rows[-1:]), verifier="numerik")
    assert score(write(tmp_path / "d.jsonl", []), verifier="numeric") == []


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    recipe = Recipe.model_validate(
        tiny_recipe(
            run={"name": "r", "steps": 2, "out": str(tmp_path)},
            verifiers={
                "use": [{"name": "math"}, {"name": "length", "weight": 0.1, "max_tokens": 9, "buffer_tokens": 8}]
            },
        )
    )
    judge = build(recipe.verifiers.use)
    groups = []
    for number, texts in enumerate(
        (["4", "5", r"\boxed{4}", r"\boxed{10^{6000}}"], [r"\boxed{20000!}", *["4"] * 3], ["5", "4", "4", ""])
    ):
        completions = tuple(
            Completion((1,) * (i + 1), (-0.1,) * (i + 1), text, "stop", (VersionSpan(0, 0, i + 1),))
            for i, text in enumerate(texts)
        )
        rollout = RolloutGroup(
            GroupRequest(number, 0, Prompt(f"p{number}", (1, 2), "2+2=", 4), 0), completions, 0.1, "e"
        )
        groups.append(ScoredGroup(rollout, tuple(map(judge.judge, items_of(rollout)))))
    with RunFolder.open(recipe) as folder:
        folder.write_rollouts(1, groups, assign_advantages(groups[:2], recipe.algorithm), {2: "stale"})
    return recipe.run_dir


def test_replay_agrees_with_an_honest_run(run_folder: Path) -> None:
    result = replay(run_folder, 1)
    assert result.agrees, result.lines()
    assert (result.samples, result.trained) == (12, 8)
    assert "agree" in result.lines()[0]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda row: row | {"reward": 0.5}, {"reward"}), (lambda row: row | {"advantage": 3.0}, {"advantage"}),
        (lambda row: row | {"reward": None}, {"verdict"}), (lambda row: row | {"completion": "6"}, {"reward", "advantage"}),
    ],
)  # fmt: skip
def test_replay_tells_what_differs(run_folder: Path, change: Callable[[Any], Any], kinds: set[str]) -> None:
    file = run_folder / "rollouts" / "000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0] = change(rows[0])
    write(file, rows)
    result = replay(run_folder, 1)
    assert not result.agrees
    assert {difference.what for difference in result.differences} == kinds
    assert result.lines()[1].startswith("group 0, sample")


def test_replay_of_a_step_that_is_not_there(run_folder: Path) -> None:
    with pytest.raises(UserError, match="no rollouts of step 7: steps 1 to 1 are there"):
        replay(run_folder, 7)
    with pytest.raises(UserError, match="not the folder of a run"):
        replay(run_folder.parent, 1)
