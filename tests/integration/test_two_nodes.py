"""A two-node Ray cluster in network namespaces: learner on one node, engine on the other, token authentication on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.netns import NodeSpec, two_nodes, unavailable
from tests.integration.runs import events, metrics, recipe_for, write_recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def test_learner_and_engine_on_different_nodes(tmp_path: Path, tiny_model: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    recipe = recipe_for(tmp_path, tiny_model, run={"name": "two-nodes", "steps": 3}, learner={"ranks": 2})
    file = write_recipe(tmp_path / "recipe.yaml", recipe)
    with two_nodes(NodeSpec("learner", cpus=4), NodeSpec("rollout", cpus=4)) as cluster:
        train = [sys.executable, "-m", "grpo_dist.cli", "train", str(file)]
        cluster.run(train, timeout=300, cwd=tmp_path, check=True)
        learner, rollout = (node.ip for node in cluster.nodes)
        # More than both nodes have: refused, with what each has, and without a wait that says nothing.
        refused = cluster.run(
            [*train, "run.name=too-large", "learner.ranks=64", "faults.placement_seconds=2", "rollout.group_size=16"],
            timeout=120, cwd=tmp_path,
        )  # fmt: skip
        stranger = cluster.run([*train, "run.name=stranger"], timeout=120, cwd=tmp_path, env={"RAY_AUTH_MODE": None})
    assert {e["node"] for e in events(recipe.run_dir, "learner_started")} == {learner}
    assert {e["node"] for e in events(recipe.run_dir, "engine_started")} == {rollout}
    rows = metrics(recipe.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert refused.returncode == 2
    assert "wanted     learner: 64 x (0.5 CPU)" in refused.stderr
    assert f"available  {learner}: " in refused.stderr
    assert f"available  {rollout}: " in refused.stderr
    assert stranger.returncode == 2
    assert "RAY_AUTH_MODE" in stranger.stderr
