"""pass@1 and pass@k over given verdicts."""

from __future__ import annotations

import asyncio

import pytest

from grpo_dist.evaluate import evaluate, summarise
from grpo_dist.metrics import pass_at_k
from grpo_dist.types import Completion, GroupRequest, Prompt, RolloutGroup, ScoredGroup, Verdict


def group(*correct: bool | None, number: int = 0) -> ScoredGroup:
    """None: a failed verdict."""
    prompt = Prompt(f"p{number}", (1,), "?", 1)
    completion = Completion((1, 2), (0.0, 0.0), "x", "stop", ())
    rollout = RolloutGroup(GroupRequest(number, 0, prompt, 0), (completion,) * len(correct), 0.0, "e")
    verdicts = tuple(Verdict(None, error="x") if c is None else Verdict(float(c), c) for c in correct)
    return ScoredGroup(rollout, verdicts)


def test_by_hand() -> None:
    result = summarise([group(True, False, False, False), group(True, True, False, False)], 2)
    assert result.pass_at_1 == pytest.approx((1 / 4 + 2 / 4) / 2)
    # 1 - C(3,2)/C(4,2) = 1/2; 1 - C(2,2)/C(4,2) = 5/6
    assert result.pass_at_k == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert result.errors == 0


def test_pass_at_k_is_unbiased_against_enumeration() -> None:
    from itertools import combinations

    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_errors_are_no_evidence() -> None:
    result = summarise([group(True, None, None, None), group(False, False, True, True)], 2)
    assert result.pass_at_1 == pytest.approx((1.0 + 0.5) / 2)
    assert result.short == 1
    assert result.pass_at_k == pytest.approx(pass_at_k(4, 2, 2))
    assert result.errors == 3


def test_nothing_judged() -> None:
    result = summarise([group(None, None)], 1)
    assert result.pass_at_1 is None
    assert "eval/pass@1" not in result.values()
    assert result.values()["eval/errors"] == 2


def test_evaluate_asks_each_prompt_once_with_fixed_seeds() -> None:
    asked: list[GroupRequest] = []

    async def generate(request: GroupRequest) -> RolloutGroup:
        asked.append(request)
        await asyncio.sleep(0)
        return RolloutGroup(request, (Completion((1,), (0.0,), "x", "length", ()),) * 2, 0.0, "e")

    async def score(rollout: RolloutGroup) -> ScoredGroup:
        return ScoredGroup(rollout, (Verdict(1.0, True), Verdict(0.0, False)))

    prompts = [Prompt(f"p{i}", (1,), "?", 1) for i in range(5)]
    first = asyncio.run(evaluate(prompts, generate, score, samples=2, seed=3, concurrency=2))
    asyncio.run(evaluate(prompts, generate, score, samples=2, seed=3))
    assert [request.seed for request in asked[:5]] == [request.seed for request in asked[5:]]
    assert first.values() == {
        "eval/pass@1": 0.5, "eval/pass@k": 1.0, "eval/k": 2.0, "eval/reward_mean": 0.5, "eval/errors": 0.0,
        "eval/completion_tokens_mean": 1.0, "eval/truncated_fraction": 1.0, "eval/prompts": 5.0,
    }  # fmt: skip
    assert len(first.rows(3)) == 3
    with pytest.raises(ValueError, match="pass@3 needs"):
        asyncio.run(evaluate(prompts, generate, score, samples=2, k=3))
