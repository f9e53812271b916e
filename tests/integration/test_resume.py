"""Durable state, with the real command: killed at any moment, stopped by signals, damaged on disk, resumed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.algorithms.difficulty import DifficultyMemory, Visit, observe, rests
from grpo_dist.config import Recipe
from grpo_dist.errors import WorkerLost
from grpo_dist.fleet.fleet import Fleet
from grpo_dist.train import run as train
from grpo_dist.types import WeightUpdate
from tests.integration import runs
from tests.integration.runs import Command, events, jsonl, metrics, recipe_for, rollouts, write_recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 18
ROWS = 12  # with 4 groups a step: an epoch has 3 steps
FILTERS = {"zero_variance": "refill", "truncated": "penalise", "overlong_buffer": 4, "difficulty": {"patience": 2}}
# What depends on the clock, on the machine, or on how often the run was started.
CLOCK = ("time", "seconds", "per_second", "idle_fraction", "restarts")


def whole(out: Path, model: Path, name: str, **sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "run": {"name": name, "steps": STEPS},
        "checkpoint": {"every": 1, "keep": 2},
        "data": {"source": str(out / "rows.jsonl"), "columns": {"id": "id"}, "max_prompt_tokens": 16},
        # State that a resumed run must have right: prompts that rest, groups beyond four a step, shaped rewards, a
        # reference that follows the policy.
        "algorithm": {"filters": FILTERS, "kl": {"beta": 0.05, "reference": "ema", "ema": 0.5}},
        "learner": {"updates_per_batch": 2},
        "verifiers": {"use": [{"name": "python:resume_rewards:two_digits"}]},
        "tracking": {"wandb": {"mode": "offline"}},
        "faults": {"collective_seconds": 60},
    }
    for key, values in sections.items():
        base.setdefault(key, {}).update(values)
    return recipe_for(out, model, **base)


def command(*arguments: str, cwd: Path) -> AbstractContextManager[Command]:
    """With the folder's own verifier in reach of every process."""
    path = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
    return runs.command(*arguments, cwd=cwd, env={"PYTHONPATH": path})


def numbers(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not any(word in k for word in CLOCK)} for row in metrics(run)]


def checkpoints(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").glob("[0-9]*") if p.is_dir() and "." not in p.name)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    runs.write_rows(folder / "rows.jsonl", rows=ROWS)
    # Says "right" of what random models write often enough, and not always.
    (folder / "resume_rewards.py").write_text(
        "def two_digits(item):\n    return sum(c.isdigit() for c in item.completion) >= 2\n"
    )
    return folder


@pytest.fixture(scope="module")
def straight(out: Path, tiny_model: Path) -> Recipe:
    """The run that nothing happens to."""
    recipe = whole(out, tiny_model, "straight")
    with command("train", str(write_recipe(out / "straight.yaml", recipe)), cwd=out) as run:
        assert run.wait(240) == 0, run.output
        run.nothing_left()
    return recipe


def test_the_undisturbed_run(straight: Recipe) -> None:
    assert [row["step"] for row in metrics(straight.run_dir)] == list(range(1, STEPS + 1))
    assert checkpoints(straight.run_dir) == [f"{STEPS - 1:06d}", f"{STEPS:06d}"]
    assert (straight.run_dir / "checkpoints" / "latest").exists()
    steps = [[row for row in step if row["index"] == 0] for step in rollouts(straight.run_dir)]
    seen = [row["group_id"] for step in steps for row in step]
    assert seen == sorted(set(seen))
    for step in steps:
        assert sum(row["dropped"] is None for row in step) == 4 or len(step) == 12  # full, or at its cap
    assert any(len(step) > 4 for step in steps)
    assert any(row["trained"] for step in rollouts(straight.run_dir) for row in step)


def test_prompts_rested_as_their_visits_say(straight: Recipe) -> None:
    """Recomputed from what the run folder says of every visit: who was asked in an epoch, and who was not."""
    memory = DifficultyMemory(patience=2, rest=1)
    asked: dict[int, set[str]] = {}
    for step in rollouts(straight.run_dir):
        visits = []
        for _, rows in groupby(step, key=lambda row: row["group_id"]):
            group = list(rows)
            prompt, epoch = group[0]["prompt_id"], group[0]["epoch"]
            assert not rests(memory, prompt, epoch)
            assert prompt not in asked.setdefault(epoch, set())
            asked[epoch].add(prompt)
            visits.append(Visit(prompt, epoch, sum(row["correct"] for row in group), len(group)))
        memory = observe(memory, visits)
    everybody = {prompt for prompts in asked.values() for prompt in prompts}
    last = max(asked)
    missing = {epoch: everybody - prompts for epoch, prompts in asked.items() if epoch < last}
    assert len(everybody) == ROWS
    assert any(missing.values())
    assert not missing[0] | missing[1]  # nobody has had two visits
    assert metrics(straight.run_dir)[-1]["rollout/prompts_visited"] == ROWS


@pytest.fixture(scope="module")
def disturbed(out: Path, tiny_model: Path) -> Recipe:
    """One run that is killed, stopped and damaged by the tests below, in their order; the last one takes it to its end."""
    recipe = whole(out, tiny_model, "disturbed")
    write_recipe(out / "disturbed.yaml", recipe)
    return recipe


@contextmanager
def going_on(recipe: Recipe, *overrides: str) -> Iterator[Command]:
    folder = recipe.run_dir.parent
    with command("train", str(folder / "disturbed.yaml"), "--resume", *overrides, cwd=folder) as run:
        yield run
        run.nothing_left()


def kill(recipe: Recipe, moments: Sequence[str], chance: random.Random) -> None:
    for moment in moments:
        with going_on(recipe) as run:
            _wait_for(moment, run, recipe.run_dir, chance)
            run.process.send_signal(signal.SIGKILL)
            assert run.wait(10) == -signal.SIGKILL, f"{moment}: had ended before it was killed:\n{run.output}"


def test_killed_while_it_starts_publishes_saves_and_steps(disturbed: Recipe) -> None:
    kill(disturbed, ("start", "any", "save", "publication", "any"), random.Random(7))


def _wait_for(moment: str, run: Command, run_dir: Path, chance: random.Random) -> None:
    if moment == "start":
        run.until(lambda: len(run.living()) > 4, 120, "start of Ray's processes")
        return
    run.until(lambda: "sampling:" in run.output, 240, "start of the workers")
    if moment == "publication":
        time.sleep(chance.uniform(0, 0.3))
        return
    run.until(lambda: "\nstep " in run.output, 120, "a step")
    if moment == "save":
        run.until(lambda: bool(list((run_dir / "checkpoints").glob("*.tmp"))), 60, "a save")
    else:
        time.sleep(chance.uniform(0, 0.4))  # anywhere in a step


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGUSR1, 85)], ids=lambda v: str(v)
)
def test_a_signal_ends_the_step_saves_and_leaves(number: signal.Signals, code: int, disturbed: Recipe) -> None:
    """Without periodic checkpoints, so that what is saved was saved because of the signal."""
    run_dir = disturbed.run_dir
    ids = _wandb_ids(run_dir)
    with going_on(disturbed, "checkpoint.every=0") as run:
        run.until(lambda: "\nstep " in run.output, 240, "a step")
        if number is signal.SIGUSR1:
            run.process.send_signal(number)
        else:  # as a terminal, timeout and service managers do: to the whole process group
            os.killpg(run.process.pid, number)
        assert run.wait(60) == code, run.output
        assert "saved" in run.output
    step = metrics(run_dir)[-1]["step"]
    assert checkpoints(run_dir)[-1] == f"{step:06d}"
    if number is signal.SIGUSR1:  # a scheduler starts it again: the same W&B run as the times before
        assert _wandb_ids(run_dir) == ids


def _wandb_ids(run_dir: Path) -> set[str]:
    return {folder.name.rsplit("-", 1)[-1] for folder in (run_dir / "wandb").glob("offline-run-*")}


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(disturbed: Recipe) -> None:
    before, newest = checkpoints(disturbed.run_dir)[-2:]
    folder = disturbed.run_dir / "checkpoints" / newest
    shard = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with going_on(disturbed) as run:
        run.until(lambda: "\nstep " in run.output, 240, "a step")
        run.process.send_signal(signal.SIGKILL)
        assert run.wait(10) == -signal.SIGKILL, run.output
        assert "checkpoint refused" in run.output
        assert shard.name in run.output
    assert events(disturbed.run_dir, "resumed")[-1]["step"] == int(before)


def test_after_ten_kills_three_signals_and_a_damage_it_ends_as_if_nothing_had_happened(
    disturbed: Recipe, straight: Recipe
) -> None:
    kill(disturbed, ("save", "any", "any", "save"), random.Random(11))
    with going_on(disturbed) as run:
        assert run.wait(240) == 0, run.output
    run_dir = disturbed.run_dir
    assert numbers(run_dir) == numbers(straight.run_dir)
    assert rollouts(run_dir) == rollouts(straight.run_dir)
    assert checkpoints(run_dir) == [f"{STEPS - 1:06d}", f"{STEPS:06d}"]
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


def test_a_second_signal_leaves_at_once(out: Path, tiny_model: Path) -> None:
    recipe = whole(out, tiny_model, "twice", rollout={"sampling": {"max_tokens": 200}, "groups_per_step": 12})
    with command("train", str(write_recipe(out / "twice.yaml", recipe)), cwd=out) as run:
        run.until(lambda: len(metrics(recipe.run_dir)) >= 1, 240, "a step")
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: "SIGTERM" in run.output, 20, "the first signal's line")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(30) == 1, run.output  # not the status of a clean save
        run.nothing_left()


def test_another_number_of_ranks_goes_on_from_the_same_checkpoint(
    straight: Recipe, out: Path, tiny_model: Path
) -> None:
    recipe = whole(out, tiny_model, "resized", run={"name": "resized", "steps": 4})
    file = write_recipe(out / "resized.yaml", recipe)
    with command("train", str(file), cwd=out) as run:
        assert run.wait(240) == 0, run.output
    with command("train", str(file), "run.steps=6", "learner.ranks=2", "--resume", cwd=out) as run:
        assert run.wait(240) == 0, run.output
    mine, theirs = numbers(recipe.run_dir)[4:6], numbers(straight.run_dir)[4:6]
    for one, other in zip(mine, theirs, strict=True):
        for key in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
            assert one[key] == pytest.approx(other[key], abs=1e-5, rel=1e-5), key


def test_a_signal_while_workers_start_ends_the_start(out: Path, tiny_model: Path) -> None:
    recipe = whole(out, tiny_model, "early")
    with command("train", str(write_recipe(out / "early.yaml", recipe)), cwd=out) as run:
        run.until(lambda: len(events(recipe.run_dir, "verifier_started")) > 0, 120, "the first worker")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130, run.output
        assert "nothing had to be saved" in run.output
        run.nothing_left()
    assert not metrics(recipe.run_dir)


@pytest.mark.ray
def test_a_step_whose_weights_did_not_arrive_is_on_record_and_not_trained_again(
    out: Path, tiny_model: Path, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is put in: the third publication fails. The step was trained, so it is saved, recorded, and resumed after."""
    recipe = whole(
        out, tiny_model, "unpublished", run={"steps": 4}, tracking={"wandb": {"mode": "disabled"}},
        verifiers={"use": [{"name": "regex", "pattern": r"\d.*\d", "match": "search"}]},
    )  # fmt: skip
    publish = Fleet.publish

    async def failing(fleet: Fleet, version: int) -> WeightUpdate:
        if version == 3:
            raise WorkerLost("rollout", "rollout-0", "put in by the test")
        return await publish(fleet, version)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "publish", failing)
        with pytest.raises(WorkerLost, match="put in by the test"):
            train(recipe)
    assert checkpoints(recipe.run_dir)[-1] == "000003"
    again = recipe.model_copy(update={"run": recipe.run.model_copy(update={"resume": True})})
    assert train(again) == 0
    assert [row["step"] for row in metrics(recipe.run_dir)] == [1, 2, 3, 4]
    seen = [row["group_id"] for step in rollouts(recipe.run_dir) for row in step if row["index"] == 0]
    assert seen == sorted(set(seen))
    assert train(again) == 0  # nothing left to do: returns without starting anything


@pytest.mark.parametrize("role", ["rollout", "learner"])
def test_a_lost_worker_ends_the_run_with_one_sentence_and_a_good_checkpoint(
    role: str, out: Path, tiny_model: Path
) -> None:
    recipe = whole(
        out, tiny_model, f"lost-{role}", run={"name": f"lost-{role}", "steps": 2000}, checkpoint={"every": 5, "keep": 1}
    )
    with command("train", str(write_recipe(out / f"lost-{role}.yaml", recipe)), cwd=out) as run:
        run.until(lambda: len(metrics(recipe.run_dir)) >= 7, 240, "seven steps")
        noun = "engine" if role == "rollout" else role
        os.kill(events(recipe.run_dir, f"{noun}_started")[-1]["pid"], signal.SIGKILL)
        assert run.wait(90) == 1, run.output
        assert run.output.splitlines()[-1].startswith(f"grpo-dist: {role} worker {role}-0 was lost: "), run.output
        assert "Traceback" not in run.output
        run.nothing_left()
    step = metrics(recipe.run_dir)[-1]["step"]
    saved = checkpoints(recipe.run_dir)
    assert [row["step"] for row in metrics(recipe.run_dir)] == list(range(1, step + 1))
    assert len(saved) == 1
    assert int(saved[0]) >= step - 1 if role != "learner" else int(saved[0]) % 5 == 0
    assert events(recipe.run_dir, f"{noun}_lost")


def test_a_lost_verifier_is_replaced_while_the_run_goes_on(out: Path, tiny_model: Path) -> None:
    recipe = whole(out, tiny_model, "healed", run={"name": "healed", "steps": 2000}, checkpoint={"every": 0})
    with command("train", str(write_recipe(out / "healed.yaml", recipe)), cwd=out) as run:
        run.until(lambda: len(metrics(recipe.run_dir)) >= 3, 240, "three steps")
        os.kill(events(recipe.run_dir, "verifier_started")[-1]["pid"], signal.SIGKILL)
        run.until(lambda: metrics(recipe.run_dir)[-1]["fleet/restarts"] == 1, 120, "a step with the replacement")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130, run.output
        run.nothing_left()
    assert [e["worker"] for e in events(recipe.run_dir, "verifier_lost")] == ["verifier-0"]
    assert [e["worker"] for e in events(recipe.run_dir, "verifier_started")] == ["verifier-0", "verifier-1"]
    assert not any(row["verify/errors"] for row in metrics(recipe.run_dir))  # what it was judging was judged again


def test_records_hold_no_step_twice_after_all_this(straight: Recipe, out: Path) -> None:
    for run_dir in out.glob("*/"):
        steps = [row["step"] for row in jsonl(run_dir / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1)), run_dir.name
