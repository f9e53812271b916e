from __future__ import annotations

import pytest

pytest.importorskip("ray")

from grpo_dist.fleet.reconcile import Difference, difference


@pytest.mark.parametrize(
    ("wanted", "live", "started", "expected"),
    [
        (2, [], 0, Difference(("rollout-0", "rollout-1"), ())),  # first start
        (2, ["rollout-1"], 2, Difference(("rollout-2",), ())),  # rollout-0 was lost: its successor has a new name
        (1, ["rollout-0", "rollout-1", "rollout-2"], 3, Difference((), ("rollout-1", "rollout-2"))),  # youngest go
        (2, ["rollout-0", "rollout-3"], 4, Difference((), ())),
    ],
)
def test_difference(wanted: int, live: list[str], started: int, expected: Difference) -> None:
    assert difference("rollout", wanted, live, started) == expected
