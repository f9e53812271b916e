"""The rollout window: submission order, bounded lag, nothing lost or doubled, errors at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from grpo_dist.rollout.pipeline import RolloutPipeline
from grpo_dist.types import GroupRequest, Prompt, RolloutGroup, ScoredGroup


def request(group_id: int) -> GroupRequest:
    return GroupRequest(group_id, 0, Prompt(str(group_id), (1,), "1", "1"), seed=group_id)


async def score(rollout: RolloutGroup) -> ScoredGroup:
    return ScoredGroup(rollout, ())


def finished(group_id: int) -> ScoredGroup:
    return ScoredGroup(RolloutGroup(request(group_id), (), 0.0, "former process"), ())


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_lag_never_exceeds_k_and_each_group_is_trained_once_in_order(k: int) -> None:
    per_step, steps = 4, 25
    chance = random.Random(k)
    version = 0
    submitted_at: dict[int, int] = {}

    async def generate(r: GroupRequest) -> RolloutGroup:
        submitted_at[r.group_id] = version
        await asyncio.sleep(chance.choice([0, 0, 0, 0.002, 0.01]))  # a long tail
        return RolloutGroup(r, (), 0.0, "e")

    async def run() -> tuple[list[int], list[int]]:
        nonlocal version
        order, lags = [], []
        pipeline = RolloutPipeline(request, generate, score, slots=(k + 1) * per_step, most=per_step * steps)
        async with pipeline:
            for step in range(1, steps + 1):
                groups = await pipeline.take(per_step)
                order += [g.group_id for g in groups]
                lags += [step - 1 - submitted_at[g.group_id] for g in groups]
                version = step
                pipeline.release(per_step)
        return order, lags

    order, lags = asyncio.run(run())
    assert order == list(range(per_step * steps))
    assert max(lags) == k  # reached, never exceeded
    assert set(submitted_at) == set(order)  # nothing is sampled beyond the end


def test_a_failure_is_raised_at_once_even_behind_a_slow_group() -> None:
    async def generate(r: GroupRequest) -> RolloutGroup:
        if r.group_id == 3:
            raise RuntimeError("engine e is gone")
        await asyncio.sleep(60)
        raise AssertionError("unreachable")

    async def run() -> None:
        async with RolloutPipeline(request, generate, score, slots=4) as pipeline:
            await pipeline.take(1)

    with pytest.raises(RuntimeError, match="engine e is gone"):
        asyncio.run(asyncio.wait_for(run(), 5))


def test_buffered_groups_keep_their_slots_and_are_not_sampled_again() -> None:
    sampled = []

    async def generate(r: GroupRequest) -> RolloutGroup:
        sampled.append(r.group_id)
        return RolloutGroup(r, (), 0.0, "e")

    async def run() -> list[str]:
        pipeline = RolloutPipeline(
            request, generate, score, slots=4, first=10, most=6, buffered=[finished(12), finished(10)]
        )
        async with pipeline:
            first = await pipeline.take(2)
            pipeline.release(2)
            rest = await pipeline.take(4)
        return [g.rollout.engine for g in first + rest]

    assert asyncio.run(run()) == ["former process", "e", "former process", "e", "e", "e"]
    assert sampled == [11, 13, 14, 15]


def test_finished_groups_are_what_a_checkpoint_holds() -> None:
    gate = asyncio.Event()

    async def generate(r: GroupRequest) -> RolloutGroup:
        if r.group_id % 2:
            await gate.wait()
        return RolloutGroup(r, (), 0.0, "e")

    async def run() -> tuple[list[int], int]:
        async with RolloutPipeline(request, generate, score, slots=6) as pipeline:
            await pipeline.take(1)
            await asyncio.sleep(0.01)
            return [g.group_id for g in pipeline.finished()], pipeline.next_group

    assert asyncio.run(run()) == ([2, 4], 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RolloutPipeline(request, None, score, slots=0), "at least one slot"),  # type: ignore[arg-type]
        (lambda: RolloutPipeline(request, None, score, slots=2, buffered=[finished(5)]), "outside the window"),  # type: ignore[arg-type]
    ],
)
def test_impossible_windows_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_taking_more_than_the_window_is_refused_instead_of_waiting_for_ever() -> None:
    async def generate(r: GroupRequest) -> RolloutGroup:
        return RolloutGroup(r, (), 0.0, "e")

    async def run() -> None:
        async with RolloutPipeline(request, generate, score, slots=2) as pipeline:
            await pipeline.take(2)
            await pipeline.take(1)

    with pytest.raises(ValueError, match="2 of them taken and not released"):
        asyncio.run(asyncio.wait_for(run(), 5))
