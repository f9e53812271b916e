"""Fitting workers on nodes before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("ray")

import grpo_dist
from grpo_dist.config import PlacementSection
from grpo_dist.fleet.placement import Bundle, Node, describe_misfit, first_misfit

NODE = Node("10.0.0.1", {"CPU": 2.0, "node:10.0.0.1": 1.0}, {})


def bundles(role: str, n: int, gpus: int = 0, **placement: object) -> list[Bundle]:
    return [Bundle.of(role, PlacementSection(**placement), gpus)] * n  # type: ignore[arg-type]


def test_fit_counts_all_roles_together() -> None:
    assert first_misfit(bundles("learner", 2, cpus=0.5) + bundles("rollout", 2, cpus=0.5), [NODE]) is None
    assert first_misfit(bundles("learner", 2, cpus=0.5) + bundles("rollout", 3, cpus=0.5), [NODE]) is not None


def test_a_bundle_never_spans_nodes() -> None:
    nodes = [Node(f"10.0.0.{i}", {"CPU": 64.0, "GPU": 4.0}, {}) for i in range(2)]
    assert first_misfit(bundles("rollout", 2, gpus=4), nodes) is None
    assert first_misfit(bundles("rollout", 1, gpus=8), nodes) is not None  # 8 GPUs in all, but 4 on each


def test_large_bundles_are_placed_before_small_ones_fragment_the_nodes() -> None:
    nodes = [Node(f"10.0.0.{i}", {"CPU": 64.0, "GPU": 8.0}, {}) for i in range(2)]
    assert first_misfit(bundles("learner", 8, gpus=1) + bundles("rollout", 1, gpus=8), nodes) is None


def test_labels_choose_the_node() -> None:
    nodes = [Node("a", {"CPU": 8.0}, {"role": "learner"}), Node("b", {"CPU": 8.0}, {"role": "rollout"})]
    assert first_misfit(bundles("rollout", 2, labels={"role": "rollout"}), nodes) is None
    misfit = first_misfit(bundles("rollout", 1, labels={"role": "verifier"}), nodes)
    assert misfit is not None
    assert "on nodes labelled role=verifier" in describe_misfit([misfit], nodes, misfit)


def test_the_message_says_what_was_wanted_and_what_is_there() -> None:
    wanted = bundles("learner", 64, cpus=0.5)
    misfit = first_misfit(wanted, [NODE])
    assert misfit is not None
    message = describe_misfit(wanted, [NODE], misfit)
    assert "no node has room for one more learner worker" in message
    assert "wanted     learner: 64 x (0.5 CPU)" in message
    assert "available  10.0.0.1: 2 CPU" in message


def test_no_actor_has_a_name_in_the_cluster() -> None:
    """f4: two runs on one cluster, or a run after a crash, cannot meet an actor that is called the same."""
    for file in Path(grpo_dist.__file__).parent.rglob("*.py"):
        text = file.read_text()
        assert not re.search(r"\bget_actor\(|\.options\([^)]*\bname=|lifetime=", text), file
