"""Group seeds: the same wherever they are computed, and no two groups share one."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.rollout.seeds import group_seed


def test_a_known_value_never_changes() -> None:
    # A change here changes the rollouts of every run that is resumed with the new code.
    assert group_seed(0, 0, "row-1", 8) == 98213683092683752


def test_another_process_computes_the_same() -> None:
    code = "from grpo_dist.rollout.seeds import group_seed; print(group_seed(7, 3, 'ä/1', 16))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(other.stdout) == group_seed(7, 3, "ä/1", 16)


def test_run_epoch_and_prompt_each_change_the_seed() -> None:
    seeds = {group_seed(r, e, p, 8) for r in range(3) for e in range(3) for p in ("a", "b", "c")}
    assert len(seeds) == 27


@given(st.integers(0, 10**6), st.integers(0, 100), st.text(max_size=20), st.integers(1, 4096))
def test_blocks_of_two_groups_are_equal_or_disjoint(run: int, epoch: int, prompt: str, size: int) -> None:
    block = 1 << (size - 1).bit_length()
    seed = group_seed(run, epoch, prompt, size)
    assert seed % block == 0
    assert block >= size
    assert seed >= 0
    assert seed + size < 2**63


def test_ten_thousand_groups_do_not_overlap() -> None:
    size = 16
    seeds = sorted(group_seed(1, 0, f"row {i}", size) for i in range(10_000))
    assert all(b - a >= size for a, b in itertools.pairwise(seeds))


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        group_seed(0, 0, "a", 0)
