"""Which groups a step trains on: refilling, dropping, truncated completions, prompts that rest; and what a resume keeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_dist.config import DifficultySection, FiltersSection, Recipe, RolloutSection
from grpo_dist.errors import GrpoDistError
from grpo_dist.rollout.pipeline import RolloutPipeline
from grpo_dist.rollout.selection import Difficulty, StepGroups, select
from grpo_dist.types import GroupRequest, Prompt, RolloutGroup, ScoredGroup, Verdict
from tests.conftest import tiny_recipe
from tests.unit.samples import completion

PER_STEP = 4
PROMPTS = 10

Rewards = Callable[[int], Sequence[float | None]]


def place(group_id: int) -> tuple[str, int]:
    epoch, prompt = divmod(group_id, PROMPTS)
    return f"p{prompt}", epoch


def request(group_id: int) -> GroupRequest:
    prompt, epoch = place(group_id)
    return GroupRequest(group_id, epoch, Prompt(prompt, (1,), "?", "!"), seed=group_id)


def half_are_flat(group_id: int) -> Sequence[float | None]:
    return [0.0, 1.0] if random.Random(group_id).random() < 0.5 else [1.0, 1.0]


class Fleet:
    """Generates at once and scores as told; knows at which version each group was submitted."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards, self.version = rewards, 0
        self.submitted: dict[int, int] = {}

    async def generate(self, r: GroupRequest) -> RolloutGroup:
        self.submitted[r.group_id] = self.version
        await asyncio.sleep(0.001 * (r.group_id % 3))
        return RolloutGroup(r, (completion(), completion()), 0.0, "e")

    async def score(self, rollout: RolloutGroup) -> ScoredGroup:
        rewards = self.rewards(rollout.group_id)
        return ScoredGroup(rollout, tuple(Verdict(r, None if r is None else r >= 1) for r in rewards))


def steps(
    fleet: Fleet, count: int, filters: FiltersSection, *, k: int = 0, pipeline: dict[str, Any] | None = None,
    difficulty: Difficulty | None = None,
) -> tuple[list[StepGroups], RolloutPipeline]:  # fmt: skip
    """What the loop of train.py does with the window, for so many steps."""
    rollout = RolloutSection(groups_per_step=PER_STEP, group_size=2)

    async def run() -> tuple[list[StepGroups], RolloutPipeline]:
        done = []
        window = RolloutPipeline(
            request, fleet.generate, fleet.score, slots=(k + 1) * PER_STEP,
            rests=difficulty.rests if difficulty else None, **(pipeline or {"most": count * PER_STEP}),
        )  # fmt: skip
        async with window:
            for _ in range(count):
                done.append(await select(window, rollout, filters, lambda seen, trained: None))
                if difficulty:
                    difficulty.observe(done[-1].seen)
                fleet.version += 1
                window.release(done[-1].slots)
        return done, window

    return asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("k", [0, 1, 2])
def test_refilled_steps_have_their_number_of_groups_with_spread_and_stay_within_the_lag(k: int) -> None:
    fleet = Fleet(half_are_flat)
    done, _ = steps(fleet, 12, FiltersSection(zero_variance="refill", refill_most=40), k=k)
    seen = [g.group_id for step in done for g in step.seen]
    assert seen == list(range(len(seen)))  # submission order, nothing lost, nothing twice
    assert set(fleet.submitted) == set(seen)  # and nothing sampled beyond the last step
    for number, step in enumerate(done):
        assert len(step.trained) == PER_STEP
        assert [g.group_id for g in step.seen if g.group_id not in step.dropped] == [g.group_id for g in step.trained]
        assert step.dropped.keys() == {g.group_id for g in step.seen if len(set(half_are_flat(g.group_id))) == 1}
        assert max(number - fleet.submitted[g.group_id] for g in step.trained) <= k
    assert any(len(step.seen) > PER_STEP + 1 for step in done)


def test_dropping_leaves_fewer_groups_and_asks_for_no_more() -> None:
    done, _ = steps(Fleet(half_are_flat), 6, FiltersSection(zero_variance="drop"))
    assert [len(step.seen) for step in done] == [PER_STEP] * 6
    assert [len(step.trained) + len(step.dropped) for step in done] == [PER_STEP] * 6
    assert any(step.dropped for step in done)
    assert done[0].metrics() == {"rollout/groups_dropped": len(done[0].dropped)}


def test_by_default_flat_groups_train_with_the_others() -> None:
    done, _ = steps(Fleet(lambda _: [1.0, 1.0]), 2, FiltersSection())
    assert [(len(step.trained), step.dropped) for step in done] == [(PER_STEP, {})] * 2


def test_a_step_begins_with_fewer_groups_when_the_cap_is_reached() -> None:
    done, _ = steps(
        Fleet(lambda i: [0.0, 1.0] if i % 6 == 0 else [0.0, 0.0]),
        3,
        FiltersSection(zero_variance="refill", refill_most=7),
    )
    assert [len(step.seen) for step in done] == [7, 7, 7]
    assert [[g.group_id for g in step.trained] for step in done] == [[0, 6], [12], [18]]


def test_when_nothing_has_spread_the_run_says_so_and_stops() -> None:
    with pytest.raises(GrpoDistError, match=r"0 of 12 groups have spread.*verifier that never says yes"):
        steps(Fleet(lambda _: [0.0, 0.0]), 1, FiltersSection(zero_variance="refill"))


def test_a_group_whose_samples_are_all_masked_is_flat() -> None:
    done, _ = steps(Fleet(lambda i: [None, None] if i == 1 else [0.0, 1.0]), 1, FiltersSection(zero_variance="drop"))
    assert done[0].dropped.keys() == {1}


def test_what_is_recorded_is_what_the_verifiers_said() -> None:
    filters = FiltersSection(truncated="penalise", overlong_buffer=1024)  # each completion has 3 of 1024 tokens
    (step,), _ = steps(Fleet(lambda _: [0.0, 1.0]), 1, filters)
    assert [v.reward for v in step.seen[0].verdicts] == [0.0, 1.0]
    assert [v.reward for v in step.trained[0].verdicts] == pytest.approx([-3 / 1024, 1 - 3 / 1024])


def hard_and_easy(group_id: int) -> Sequence[float | None]:
    """Prompts 0-3 are always solved, 4 and 5 never, the others sometimes."""
    prompt = group_id % PROMPTS
    return [1.0, 1.0] if prompt < 4 else [0.0, 0.0] if prompt < 6 else [0.0, 1.0]


def remembering(state: dict[str, Any] | None = None) -> Difficulty:
    return Difficulty(DifficultySection(patience=2, rest=1, longest=4), place, PROMPTS, state or {})


def test_prompts_that_teach_nothing_rest_and_come_back() -> None:
    fleet, difficulty = Fleet(hard_and_easy), remembering()
    done, _ = steps(fleet, 20, FiltersSection(), difficulty=difficulty)
    visits: dict[str, list[int]] = {}
    for group in (g for step in done for g in step.seen):
        visits.setdefault(group.rollout.prompt.id, []).append(group.rollout.request.epoch)
    # Two visits, an epoch of rest, a visit that says the same, two epochs of rest, four, and so on.
    assert visits["p0"][:5] == [0, 1, 3, 6, 11]
    assert visits["p5"][:5] == [0, 1, 3, 6, 11]
    assert visits["p9"] == list(range(len(visits["p9"])))


def test_when_all_prompts_rest_the_run_goes_on() -> None:
    done, _ = steps(Fleet(lambda _: [1.0, 1.0]), 30, FiltersSection(), difficulty=remembering())
    assert [len(step.trained) for step in done] == [PER_STEP] * 30


def test_metrics_say_how_many_rest() -> None:
    done, _ = steps(Fleet(hard_and_easy), 4, FiltersSection(), difficulty=remembering())
    assert remembering().observe(g for step in done for g in step.seen) == {
        "rollout/prompts_resting": 6.0,  # prompts 0-5 have had their second visit
        "rollout/prompts_visited": 10.0,
    }
    assert Difficulty(DifficultySection(), place, PROMPTS, {}).observe(done[0].seen) == {}


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("stop", [3, 7, 12])
def test_a_resumed_run_takes_the_same_groups(k: int, stop: int) -> None:
    filters = FiltersSection(zero_variance="refill")
    whole, _ = steps(Fleet(hard_and_easy), 20, filters, k=k, difficulty=remembering())

    difficulty = remembering()
    first, window = steps(
        Fleet(hard_and_easy), stop, filters, k=k, difficulty=difficulty, pipeline={"most": 20 * PER_STEP}
    )
    reached = first[-1].seen[-1].group_id + 1
    saved = {"first": reached, "decided": window.decided, "resting": window.resting(reached)}
    rest, _ = steps(
        Fleet(hard_and_easy), 20 - stop, filters, k=k, difficulty=remembering(difficulty.to_json()),
        pipeline={"most": (20 - stop) * PER_STEP, **saved},
    )  # fmt: skip
    taken = [[g.group_id for g in step.seen] for step in first + rest]
    assert taken == [[g.group_id for g in step.seen] for step in whole]


def test_a_buffered_group_behind_resting_ones_has_its_place() -> None:
    fleet = Fleet(hard_and_easy)
    there = asyncio.run(fleet.score(RolloutGroup(request(9), (completion(), completion()), 0.0, "former process")))
    saved: dict[str, Any] = {"first": 4, "decided": 10, "resting": (4, 5), "buffered": [there], "most": PER_STEP}
    (step,), _ = steps(fleet, 1, FiltersSection(), pipeline=saved)
    assert [(g.group_id, g.rollout.engine) for g in step.seen] == [(6, "e"), (7, "e"), (8, "e"), (9, "former process")]
    with pytest.raises(ValueError, match="outside the window"):
        RolloutPipeline(request, fleet.generate, fleet.score, slots=3, **saved)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"filters": {"zero_variance": "refill", "refill_most": 1}}},
            r"refill_most 1 must be at least rollout.groups_per_step 2",
        ),
        ({"algorithm": {"filters": {"truncated": "penalise", "overlong_buffer": 17}}}, "max_tokens is 16"),
        (
            {"algorithm": {"advantage": "reinforce_pp", "filters": {"zero_variance": "drop"}}},
            "zero_variance: drop takes out groups that teach",
        ),
        ({"algorithm": {"advantage": "maxrl", "filters": {"truncated": "penalise"}}}, "set it to keep or mask"),
        (
            {"algorithm": {"advantage": "maxrl"}, "verifiers": {"use": [{"name": "exact", "weight": -1}]}},
            "verifiers.use: exact has a weight below 0",
        ),
    ],
)
def test_filters_that_cannot_do_what_they_say_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate(tiny_recipe(**sections))
