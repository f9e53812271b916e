"""Truncated completions, groups without spread, refilling with a cap."""

from __future__ import annotations

import math

import pytest

from grpo_dist.algorithms.advantages import assign_advantages
from grpo_dist.algorithms.filters import Refill, TruncatedMode, by_spread, overlong_penalty, truncated
from grpo_dist.config import AlgorithmSection
from grpo_dist.errors import GrpoDistError
from grpo_dist.types import ScoredGroup
from tests.unit.samples import completion, group


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (6, 0), (7, -0.25), (8, -0.5), (10, -1), (11, -1)])
def test_overlong_penalty_falls_in_a_line_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=10, buffer=4) == penalty


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_must_fit_the_limit(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"limit of 10 tokens, got {buffer}"):
        overlong_penalty(5, limit=10, buffer=buffer)


def right_right_truncated_wrong() -> ScoredGroup:
    parts = [completion(3), completion(9), completion(10, finish="length"), completion(3)]
    return group([1.0, 1.0, 0.0, 0.0], completions=parts)


@pytest.mark.parametrize(
    ("mode", "advantages", "trained"),
    [
        ("keep", [1, 1, -1, -1], [True, True, True, True]),
        # Of the three left: mean 2/3, std sqrt(2)/3.
        ("mask", [math.sqrt(0.5), math.sqrt(0.5), 0, -math.sqrt(2)], [True, True, False, True]),
        # Rewards 1, 1 - 0.75, 0 - 1, 0: mean 1/16, squares 225/256, 9/256, 289/256, 1/256.
        (
            "penalise",
            [v / math.sqrt(131 / 256) for v in (15 / 16, 3 / 16, -17 / 16, -1 / 16)],
            [True, True, True, True],
        ),
    ],
)
def test_a_truncated_sample_under_each_mode(mode: TruncatedMode, advantages: list[float], trained: list[bool]) -> None:
    shaped = truncated([right_right_truncated_wrong()], mode, limit=10, buffer=4)
    samples = assign_advantages(shaped, AlgorithmSection())
    assert [float(s.advantages[-1]) for s in samples] == pytest.approx(advantages, abs=1e-6)
    assert [bool(s.loss_mask.any()) for s in samples] == trained


def test_shaping_leaves_what_the_verifiers_said_alone() -> None:
    before = right_right_truncated_wrong()
    (after,) = truncated([before], "penalise", limit=10, buffer=4, factor=0.5)
    assert [v.reward for v in before.verdicts] == [1.0, 1.0, 0.0, 0.0]
    assert [v.reward for v in after.verdicts] == [1.0, 0.625, -0.5, 0.0]
    assert after.rollout is before.rollout


def test_a_sample_without_a_verdict_gets_none_by_a_penalty() -> None:
    (after,) = truncated(
        [group([None, 1.0], completions=[completion(10), completion(10)])], "penalise", limit=10, buffer=4
    )
    assert [v.reward for v in after.verdicts] == [None, 0.0]


def test_groups_with_and_without_spread_stay_in_order() -> None:
    groups = [
        group([1, 0], group_id=0),
        group([0.1] * 8, group_id=1),
        group([1, None], group_id=2),
        group([0, 1], group_id=3),
    ]
    teaches, flat = by_spread(groups)
    assert [g.group_id for g in teaches] == [0, 3]
    assert [g.group_id for g in flat] == [1, 2]


def test_refilling_asks_for_what_is_missing_and_ends() -> None:
    good, flat = group([1, 0]), group([1, 1])
    refill = Refill(wanted=4, most=10).add([good, flat, flat, good])
    assert refill.missing() == 2
    refill = refill.add([flat, good])
    assert refill.missing() == 1
    assert refill.add([good]).missing() == 0


def test_the_cap_bounds_the_last_request_and_then_the_step_begins_with_fewer() -> None:
    good, flat = group([1, 0]), group([1, 1])
    refill = Refill(wanted=4, most=5).add([good, flat, flat, flat])
    assert refill.missing() == 1
    refill = refill.add([flat])
    assert refill.missing() == 0
    assert refill.kept == 1


def test_when_nothing_has_spread_refilling_ends_with_a_message() -> None:
    flat = group([1, 1])
    refill = Refill(wanted=2, most=6)
    for _ in range(3):
        refill = refill.add([flat] * refill.missing())
    with pytest.raises(GrpoDistError, match=r"0 of 6 groups have spread"):
        refill.missing()


def test_a_cap_below_what_is_wanted_is_refused() -> None:
    with pytest.raises(ValueError, match="refilling to 4 groups needs a cap of at least as many, got 3"):
        Refill(wanted=4, most=3)


def test_an_aborted_completion_gives_a_group_no_spread() -> None:
    cut = group([1.0, 1.0, 0.0], completions=[completion(), completion(), completion(finish="abort")])
    assert by_spread([cut]) == ([], [cut])
