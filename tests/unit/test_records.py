"""The run folder: owner, lock, lines that survive a crash, nothing twice after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grpo_dist.config import Recipe
from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.monitor.records import RunFolder, differing_keys, last_step, read_jsonl
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, Sample, ScoredGroup, Verdict, VersionSpan
from tests.conftest import tiny_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    def make(**sections: dict[str, object]) -> Recipe:
        sections.setdefault("run", {})
        sections["run"] = {"out": str(tmp_path), **sections["run"]}
        return Recipe.model_validate(tiny_recipe(**sections))

    return make


def scored_group(group_id: int, rewards: list[float | None]) -> ScoredGroup:
    prompt = Prompt(id=f"p{group_id}", token_ids=(1, 2), text="1+1=", answer="2", source="rows.jsonl")
    completions = tuple(
        Completion((5, 6, 2), (-0.1, -0.2, -0.3), f"#{i}", "stop", (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)))
        for i in range(len(rewards))
    )
    verdicts = tuple(
        Verdict(r, None if r is None else r > 0, {} if r is None else {"exact": r}, None if r is not None else "broken")
        for r in rewards
    )
    request = GroupRequest(group_id, epoch=0, prompt=prompt, seed=100)
    return ScoredGroup(RolloutGroup(request, completions, 0.5, "rollout-0"), verdicts)


def sample(group_id: int, index: int, advantage: float, *, trains: bool = True) -> Sample:
    mask = np.array([False, False, trains, trains, trains])
    values = np.where(mask, advantage, 0.0).astype(np.float32)
    return Sample(group_id, index, np.array([1, 2, 5, 6, 2]), mask, np.zeros(5, np.float32), values)


def test_a_fresh_folder_holds_the_recipe(recipe) -> None:
    with RunFolder.open(recipe()) as folder:
        assert folder.fresh
        assert folder.recipe() == recipe()
        assert sorted(p.name for p in folder.path.iterdir()) == [".lock", "checkpoints", "recipe.yaml", "rollouts"]


def test_lines(recipe) -> None:
    with RunFolder.open(recipe()) as folder:
        folder.append_metrics(1, {"train/loss": np.float32(0.5), "train/grad_norm": float("inf"), "n": np.int64(3)})
        folder.append_event("engine_started", engine="rollout-0", pids=(1, 2), path=Path("/x"))
        folder.append_eval(0, {"eval/pass@1": 0.25})
        (metrics,) = read_jsonl(folder.path / "metrics.jsonl")
        (event,) = read_jsonl(folder.path / "events.jsonl")
        (evaluation,) = read_jsonl(folder.path / "evals.jsonl")
    assert metrics.pop("time") > 1.7e9
    assert metrics == {"step": 1, "train/loss": 0.5, "train/grad_norm": None, "n": 3}
    assert event.pop("time") > 1.7e9
    assert event == {"kind": "engine_started", "engine": "rollout-0", "pids": [1, 2], "path": "/x"}
    assert (evaluation["step"], evaluation["eval/pass@1"]) == (0, 0.25)


def test_lines_are_there_after_a_kill(recipe, tmp_path: Path) -> None:
    code = (
        "import os, sys, json\nfrom grpo_dist.config import Recipe\nfrom grpo_dist.monitor.records import RunFolder\n"
        "folder = RunFolder.open(Recipe.model_validate(json.loads(sys.argv[1])))\n"
        "for step in range(1, 6): folder.append_metrics(step, {'x': step})\n"
        "os.kill(os.getpid(), 9)"
    )
    one = recipe()
    done = subprocess.run([sys.executable, "-c", code, one.model_dump_json()], timeout=60, check=False)
    assert done.returncode == -9
    assert [row["step"] for row in read_jsonl(one.run_dir / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    with RunFolder.open(recipe(run={"resume": True})) as folder:  # the lock went with the process
        assert not folder.fresh


def test_rollouts(recipe) -> None:
    groups = [scored_group(7, [1.0, 0.0, None]), scored_group(8, [1.0, 1.0, 1.0])]
    samples = [sample(7, 0, 1.0), sample(7, 1, -1.0), sample(7, 2, 0.0, trains=False)]
    with RunFolder.open(recipe()) as folder:
        file = folder.write_rollouts(12, groups, samples, dropped={8: "no spread"})
        rows = list(read_jsonl(file))
        assert [p.name for p in folder.rollouts.iterdir()] == ["000012.jsonl"]
    assert [(r["group_id"], r["index"], r["trained"], r["advantage"], r["dropped"]) for r in rows] == [
        (7, 0, True, 1.0, None),
        (7, 1, True, -1.0, None),
        (7, 2, False, None, None),
        (8, 0, False, None, "no spread"),
        (8, 1, False, None, "no spread"),
        (8, 2, False, None, "no spread"),
    ]
    first = rows[0]
    assert (first["prompt"], first["completion"], first["answer"], first["reward"]) == ("1+1=", "#0", "2", 1.0)
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reason"]) == (2, 3, "stop")
    assert first["versions"] == [[3, 0, 2], [4, 2, 3]]
    assert (first["seed"], rows[1]["seed"]) == (100, 101)
    assert (rows[2]["reward"], rows[2]["error"], rows[2]["correct"]) == (None, "broken", None)


def test_text_that_utf8_cannot_hold(recipe) -> None:
    with RunFolder.open(recipe()) as folder:
        folder.append_event("note", text="half a pair: \ud83d, ok: ä", line="a\u2028b\nc\rd")
        folder.append_event("after")
        rows = list(read_jsonl(folder.path / "events.jsonl"))
    assert rows[0]["text"] == "half a pair: \ud83d, ok: ä"
    assert rows[0]["line"] == "a\u2028b\nc\rd"
    assert rows[1]["kind"] == "after"


class TestOwner:
    def trained(self, recipe, steps: int = 3) -> None:
        with RunFolder.open(recipe()) as folder:
            for step in range(1, steps + 1):
                folder.append_metrics(step, {})

    def test_a_trained_folder_is_not_overwritten(self, recipe) -> None:
        self.trained(recipe)
        with pytest.raises(UserError, match="already holds a run that reached step 3; continue it with --resume"):
            RunFolder.open(recipe())

    def test_another_recipe_is_refused_with_the_keys(self, recipe) -> None:
        self.trained(recipe)
        other = recipe(run={"resume": True, "seed": 5}, rollout={"group_size": 8})
        with pytest.raises(UserError) as caught:
            RunFolder.open(other)
        assert str(caught.value).split("\n")[1:] == [
            "  run.seed: 0 in the folder, 5 now",
            "  rollout.group_size: 4 in the folder, 8 now",
        ]

    def test_what_may_change(self, recipe) -> None:
        self.trained(recipe)
        longer = recipe(
            run={"resume": True, "steps": 9}, rollout={"workers": 3}, learner={"ranks": 2, "micro_batch_tokens": 64}
        )
        with RunFolder.open(longer) as folder:
            assert not folder.fresh
            assert folder.recipe().run.steps == 9
        assert differing_keys(recipe(), longer) == []

    def test_resume_without_a_run_starts_one(self, recipe) -> None:
        with RunFolder.open(recipe(run={"resume": True})) as folder:
            assert folder.fresh

    def test_a_try_without_a_step_leaves_room(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            folder.append_event("engine_started")
        with RunFolder.open(recipe(run={"seed": 4})) as folder:
            assert folder.fresh
            assert list(read_jsonl(folder.path / "events.jsonl")) == []

    def test_a_checkpoint_counts_as_a_step(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            (folder.checkpoints / "000000").mkdir()
        with pytest.raises(UserError, match="already holds a run"):
            RunFolder.open(recipe())

    def test_somebody_elses_folder(self, recipe) -> None:
        path = recipe().run_dir
        path.mkdir()
        (path / "thesis.tex").write_text("x")
        with pytest.raises(UserError, match=r"holds files that are not a run's \(thesis.tex\)"):
            RunFolder.open(recipe())
        assert [p.name for p in path.iterdir() if p.name != ".lock"] == ["thesis.tex"]

    def test_a_kill_before_the_first_file_leaves_room(self, recipe) -> None:
        one = recipe()
        one.run_dir.mkdir(parents=True)
        (one.run_dir / ".recipe.yaml.123").write_text("run:")
        with RunFolder.open(one) as folder:
            assert folder.fresh

    def test_two_at_once(self, recipe) -> None:
        with RunFolder.open(recipe()), pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            RunFolder.open(recipe())
        RunFolder.open(recipe()).close()

    def test_a_place_that_cannot_be_written(self, recipe, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="cannot be written"):
            RunFolder.open(recipe(run={"out": str(tmp_path / "file" / "below")}))

    def test_reading_what_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"it has no recipe.yaml"):
            RunFolder.read(tmp_path)


class TestResume:
    def test_what_lies_beyond_is_removed(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            for step in range(1, 8):
                folder.append_metrics(step, {"x": step})
                folder.write_rollouts(step, [scored_group(step, [1.0])])
                folder.append_event("step", step=step)
            for step in (0, 5, 7):
                folder.append_eval(step, {})
        with RunFolder.open(recipe(run={"resume": True})) as folder:
            assert folder.truncate(5) == 2
            folder.append_metrics(6, {"x": 60})
            assert [(r["step"], r["x"]) for r in read_jsonl(folder.path / "metrics.jsonl")] == [
                (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60),
            ]  # fmt: skip
            assert [r["step"] for r in read_jsonl(folder.path / "evals.jsonl")] == [0, 5]
            assert sorted(p.stem for p in folder.rollouts.iterdir()) == [
                "000001",
                "000002",
                "000003",
                "000004",
                "000005",
            ]
            assert len(list(read_jsonl(folder.path / "events.jsonl"))) == 7  # what happened, happened

    def test_back_to_the_start(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            folder.append_metrics(1, {})
            assert folder.truncate(0) == 1
            assert last_step(folder.path / "metrics.jsonl") is None

    def test_an_evaluation_of_the_step_stays_and_is_known(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            for step in (0, 2, 4):
                folder.append_eval(step, {"eval/pass@1": 0.5})
            folder.truncate(2)
            assert [folder.has_eval(step) for step in (0, 1, 2, 4)] == [True, False, True, False]

    def test_nothing_to_remove_leaves_the_file_alone(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            folder.append_metrics(1, {})
            before = (folder.path / "metrics.jsonl").stat().st_ino
            assert folder.truncate(1) == 0
            assert (folder.path / "metrics.jsonl").stat().st_ino == before

    def test_a_line_that_was_being_written(self, recipe) -> None:
        with RunFolder.open(recipe()) as folder:
            folder.append_metrics(1, {})
        with (recipe().run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "ti')
        assert last_step(recipe().run_dir / "metrics.jsonl") == 1
        with RunFolder.open(recipe(run={"resume": True})) as folder:
            folder.append_metrics(2, {})
            assert [r["step"] for r in read_jsonl(folder.path / "metrics.jsonl")] == [1, 2]

    def test_a_broken_line_in_the_middle_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "metrics.jsonl"
        file.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
        with pytest.raises(GrpoDistError, match=r"metrics.jsonl:2: not JSON"):
            list(read_jsonl(file))


def test_a_full_disk_leaves_whole_lines(recipe, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes a write fall short, as a disk that fills up does."""
    code = (
        "import json, resource, signal, sys\nfrom grpo_dist.config import Recipe\n"
        "from grpo_dist.errors import GrpoDistError\nfrom grpo_dist.monitor.records import RunFolder\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "folder = RunFolder.open(Recipe.model_validate(json.loads(sys.argv[1])))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n"
        "    for step in range(1, 100): folder.append_metrics(step, {'x': 'y' * 50})\n"
        "except GrpoDistError as error:\n"
        "    print(error)\n"
    )
    one = recipe()
    done = subprocess.run(
        [sys.executable, "-c", code, one.model_dump_json()], timeout=60, check=True, capture_output=True, text=True
    )
    assert "metrics.jsonl" in done.stdout
    lines = (one.run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) > 10
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
