"""A two-node Ray cluster in network namespaces: learner on one node, engine on the other, token authentication on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.netns import NodeSpec, two_nodes, unavailable
from tests.integration.runs import events, metrics, recipe_for, write_recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_learner_and_engine_on_different_nodes(tmp_path: Path, tiny_model: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    recipe = recipe_for(tmp_path, tiny_model, run={"name": "two-nodes", "steps": 3}, learner={"ranks": 2})
    file = write_recipe(tmp_path / "recipe.yaml", recipe)
    with two_nodes(NodeSpec("learner", cpus=4), NodeSpec("rollout", cpus=4)) as cluster:
        train = [sys.executable, "-m", "grpo_dist.cli", "train", str(file)]
        trained = cluster.run(train, timeout=300, cwd=tmp_path, check=True)
        learner, rollout = (node.ip for node in cluster.nodes)
        doctor = cluster.run([sys.executable, "-m", "grpo_dist.cli", "doctor", "--json"], timeout=120, cwd=tmp_path)
        # More than both nodes have: refused, with what each has, and without a wait that says nothing.
        refused = cluster.run(
            [*train, "run.name=too-large", "learner.ranks=64", "faults.placement_seconds=2", "rollout.group_size=16"],
            timeout=120, cwd=tmp_path,
        )  # fmt: skip
        # Nodes whose Gloo speaks through the wrong interface: told before any engine or model is loaded.
        for role in ("learner", "rollout"):
            wrong = {"GLOO_SOCKET_IFNAME": "lo"}
            cluster.add_node(NodeSpec(role, cpus=4, labels={"grpo.dev/role": f"lost-{role}"}, env=wrong))
        cluster.wait_nodes(4)
        unheard = cluster.run(
            [*train, "run.name=unheard", "learner.placement.labels={grpo.dev/role: lost-learner}",
             "rollout.placement.labels={grpo.dev/role: lost-rollout}", "faults.preflight_seconds=20"],
            timeout=120, cwd=tmp_path,
        )  # fmt: skip
        stranger = cluster.run([*train, "run.name=stranger"], timeout=120, cwd=tmp_path, env={"RAY_AUTH_MODE": None})
    found = json.loads(doctor.stdout)["rows"]
    assert doctor.returncode == 0, found
    assert {row["node"] for row in found if row["subject"] == "versions"} == {learner, rollout}
    said = {row["subject"]: row["text"] for row in found if not row["node"]}
    assert said["network"].startswith("2 nodes reach each other; all-reduce over gloo ")
    assert said["nodes"].startswith("2 have the same versions")
    assert {e["node"] for e in events(recipe.run_dir, "learner_started")} == {learner}
    assert {e["node"] for e in events(recipe.run_dir, "engine_started")} == {rollout}
    rows = metrics(recipe.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/logprob_abs_max"] for row in rows) <= 1e-4
    assert "preflight: 2 nodes talk to each other over gloo: all-reduce " in trained.stdout
    assert unheard.returncode == 1
    assert re.search(r"preflight: an? (all-reduce|broadcast) over gloo failed", unheard.stderr)
    assert re.search(r"  (learner|rollout)-0 \(node[23], 10.77.0.[34]\): .*\(GLOO_SOCKET_IFNAME=lo\)", unheard.stderr)
    assert not events(recipe.run_dir.with_name("unheard"), "learner_started")
    assert refused.returncode == 2
    assert "wanted     learner: 64 x (0.5 CPU)" in refused.stderr
    assert f"available  {learner}: " in refused.stderr
    assert f"available  {rollout}: " in refused.stderr
    assert stranger.returncode == 2
    assert "RAY_AUTH_MODE" in stranger.stderr
