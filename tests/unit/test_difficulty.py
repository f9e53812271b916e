"""Prompts that teach nothing rest and come back; the memory survives being saved."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.algorithms.difficulty import DifficultyMemory, Visit, observe, rests


def visited(memory: DifficultyMemory, *outcomes: tuple[int, int]) -> DifficultyMemory:
    """(epoch, solved of 4) in order."""
    return observe(memory, [Visit("p", epoch, solved, 4) for epoch, solved in outcomes])


def resting(memory: DifficultyMemory, until: int = 12) -> list[int]:
    return [epoch for epoch in range(until) if rests(memory, "p", epoch)]


MEMORY = DifficultyMemory(patience=2, rest=3)


def test_a_new_prompt_does_not_rest() -> None:
    assert resting(MEMORY) == []


@pytest.mark.parametrize("solved", [0, 4])
def test_all_right_or_all_wrong_twice_in_a_row_rests_three_epochs(solved: int) -> None:
    assert resting(visited(MEMORY, (0, solved))) == [0]  # this epoch's visit has been
    assert resting(visited(MEMORY, (0, solved), (1, solved))) == [0, 1, 2, 3, 4]


def test_something_in_between_starts_the_count_anew() -> None:
    assert resting(visited(MEMORY, (0, 4), (1, 3), (2, 4))) == [0, 1, 2]
    assert resting(visited(MEMORY, (0, 4), (1, 0))) == [0, 1]  # right, then wrong: not the same


def test_a_visit_that_confirms_it_doubles_the_rest_up_to_the_longest() -> None:
    memory = visited(DifficultyMemory(patience=1, rest=2, longest=5), (0, 4))
    assert memory.records["p"].until == 3
    memory = visited(memory, (3, 4))
    assert memory.records["p"].until == 3 + 1 + 4
    memory = visited(memory, (8, 4))
    assert memory.records["p"].until == 8 + 1 + 5
    memory = visited(memory, (14, 2), (15, 4))
    assert memory.records["p"].until == 15 + 1 + 2


def test_a_visit_without_a_verdict_says_nothing() -> None:
    memory = visited(MEMORY, (0, 4))
    assert observe(memory, [Visit("p", 1, 0, 0)]) == memory


def test_observing_changes_no_earlier_memory() -> None:
    first = visited(MEMORY, (0, 4))
    visited(first, (1, 4))
    assert resting(first) == [0]
    assert MEMORY.records == {}


def test_more_right_than_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4 samples"):
        Visit("p", 0, 5, 4)
    with pytest.raises(ValueError, match="at least 1"):
        DifficultyMemory(patience=0, rest=1)


@given(outcomes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=20))
def test_it_survives_being_written_as_json(outcomes: list[tuple[int, int]]) -> None:
    memory = visited(MEMORY, *outcomes)
    assert MEMORY.restored(json.loads(json.dumps(memory.to_json()))) == memory
