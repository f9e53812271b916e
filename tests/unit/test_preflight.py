"""What the preflight says of its findings; that it finds them is shown with real nodes (integration/test_two_nodes)."""

from __future__ import annotations

from grpo_dist.fleet.preflight import COMPARED, Place, reach_problems, version_problems


def places(count: int) -> list[Place]:
    versions = dict.fromkeys(COMPARED, "1.0")
    return [
        Place(name, None, {"host": f"n{number}", "ip": f"10.0.0.{number}", "versions": versions})
        for number, name in enumerate([f"learner-{i}" for i in range(count - 1)] + ["rollout-0"])
    ]


def test_who_does_not_reach_whom() -> None:
    probes = places(3)
    assert reach_problems(probes, [{}, {}, {}]) == []
    one_way = reach_problems(probes, [{"rollout-0": "timed out"}, {}, {}])
    assert one_way == ["  learner-0 (n0, 10.0.0.0) does not reach rollout-0 (n2, 10.0.0.2): timed out"]


def test_a_node_that_nobody_reaches_is_named_once() -> None:
    found = [{"rollout-0": "no route"}, {"rollout-0": "no route", "learner-0": "refused"}, {}]
    assert reach_problems(places(3), found) == [
        "  nobody reaches rollout-0 (n2, 10.0.0.2)",
        "  learner-1 (n1, 10.0.0.1) does not reach learner-0 (n0, 10.0.0.0): refused",
    ]


def test_other_versions_are_named_with_the_node() -> None:
    probes = places(2)
    assert version_problems(probes) == []
    probes[1].facts["versions"] = {**probes[1].facts["versions"], "torch": "2.0"}
    assert version_problems(probes) == ["  rollout-0 (n1, 10.0.0.1): torch 2.0, not 1.0 as learner-0 (n0, 10.0.0.0)"]
