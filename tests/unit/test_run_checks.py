"""What a run concludes from what its workers answer: which start-up check failed, and what a skipped update may lead to.

The workers' answers are written down here, faults included; everything else is the real ``Run``. That real workers give
such answers is held by tests/integration.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import Recipe
from grpo_dist.data.batching import build_batch
from grpo_dist.errors import GrpoDistError, SelfCheckError
from grpo_dist.learner.checkpoint import CheckpointStore
from grpo_dist.metrics import Max, Mean, Stats
from grpo_dist.monitor.records import RunFolder, read_jsonl
from grpo_dist.run import Run
from grpo_dist.types import RunState, WeightUpdate
from tests.conftest import tiny_recipe
from tests.unit.samples import sample


class Prompts:
    place: dict[str, int] = {}  # noqa: RUF012

    def __len__(self) -> int:
        return 0


class Console:
    def __init__(self) -> None:
        self.said: list[str] = []

    def waiting(self, *what: Any) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


class Answers:
    """Stands for the fleet and its learner: gives what it was made with, in turn."""

    def __init__(self, *, updates: list[Stats] = [], checksums: list[dict[str, Any]] = []) -> None:  # noqa: B006
        self._updates, self._checksums = list(updates), list(checksums)
        self.saved: list[Path] = []
        self.learner = self

    async def update(self, batches: Any) -> Stats:
        return self._updates.pop(0)

    async def checksums(self) -> dict[str, Any]:
        return self._checksums.pop(0)

    async def publish(self, version: int) -> WeightUpdate:
        return WeightUpdate(version, 1, 4, 2, 0.1, 0.1, 0.1, 0.1, True, "d")

    async def save(self, folder: Path) -> None:
        self.saved.append(folder)


BATCH = build_batch([sample(4, 2)], ranks=1, micro_batch_tokens=8)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Recipe, RunFolder]]:
    recipe = Recipe.model_validate(tiny_recipe(run={"out": str(tmp_path)}, faults={"nonfinite_steps": 3}))
    with RunFolder.open(recipe) as opened:
        yield recipe, opened


def run_with(folder: tuple[Recipe, RunFolder], answers: Answers, step: int = 0) -> Run:
    recipe, opened = folder
    made = Run(recipe, opened, Prompts(), RunState(step=step), CheckpointStore(opened.checkpoints, 2))  # type: ignore[arg-type]
    made.fleet, made.console = answers, Console()  # type: ignore[assignment]
    return made


def learned(*, mismatch: float = 1e-6, skipped: int = 0, in_a_row: int = 0) -> Stats:
    return {
        "mismatch/logprob_abs_mean": Mean(mismatch * 10, 10), "train/skipped": Max(skipped),
        "train/skipped_in_a_row": Max(in_a_row),
    }  # fmt: skip


@pytest.mark.parametrize("off", [0.2, math.inf, math.nan])
def test_a_mismatch_at_step_0_is_named(folder: Any, off: float) -> None:
    run = run_with(folder, Answers(updates=[learned(mismatch=off)]))
    with pytest.raises(
        SelfCheckError, match=r"self-check 'step 0' failed.*differ by .* allowed 0\.1 .*max_step0_mismatch"
    ):
        asyncio.run(run.learn([BATCH]))


def test_later_mismatch_is_measured_and_no_reason_to_stop(folder: Any) -> None:
    run = run_with(folder, Answers(updates=[learned(), learned(mismatch=0.5)]))
    asyncio.run(run.learn([BATCH]))
    asyncio.run(run.learn([BATCH]))


def test_a_first_publication_that_changes_weights_is_named(folder: Any) -> None:
    sums = [{"rollout-0": "a", "rollout-1": "a"}, {"rollout-0": "a", "rollout-1": "b"}]
    run = run_with(folder, Answers(checksums=sums))
    with pytest.raises(
        SelfCheckError, match=r"self-check 'first publication' failed.*changed the weights of rollout-1:"
    ):
        asyncio.run(run.publish_first())
    asyncio.run(run_with(folder, Answers(checksums=sums), step=5).publish_first())  # resumed: other weights are wanted


def test_updates_without_a_finite_gradient_are_warned_of_and_end_the_run(folder: Any) -> None:
    """Nothing is saved of such a step: what is in memory is not a finished step."""
    answers = Answers(updates=[learned(), learned(skipped=1, in_a_row=1), learned(skipped=1, in_a_row=3)])
    run = run_with(folder, answers, step=4)
    run._saved_step = 3

    class Pipeline:
        def finished(self) -> tuple[Any, ...]:
            return ()

    async def steps() -> None:
        async with run.saving_on_failure(Pipeline()):  # type: ignore[arg-type]
            for _ in range(3):
                await run.learn([BATCH])

    with pytest.raises(GrpoDistError, match=r"3 optimizer .* skipped, no finite gradient .*nonfinite_steps = 3"):
        asyncio.run(steps())
    warnings = [e["text"] for e in read_jsonl(run.folder.path / "events.jsonl") if e["kind"] == "warning"]
    assert len(warnings) == 2
    assert "step 5 skipped: no finite gradient" in warnings[0]
    assert answers.saved == []
    assert list(run.folder.checkpoints.glob("*")) == []


def test_a_run_without_anything_to_train_on_says_so(folder: Any) -> None:
    nothing = build_batch([], ranks=1, micro_batch_tokens=8)
    run = run_with(folder, Answers(updates=[learned(skipped=1, in_a_row=3)]))
    with pytest.raises(GrpoDistError, match=r"nothing was left to train on: in every group all rewards are equal"):
        asyncio.run(run.learn([nothing]))
