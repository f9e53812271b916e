"""Three real Ray nodes in network namespaces: token, roles by label; a node stops, dies, goes silent, comes back."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.netns import Cluster, three_nodes, two_nodes, unavailable

pytestmark = [pytest.mark.timeout(240)]

WHERE = """
import json, socket, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1)
def where():
    return socket.gethostname(), ray.util.get_node_ip_address(), socket.gethostbyname(socket.gethostname())
roles = ("learner", "rollout", "verifier")
calls = [where.options(label_selector={"grpo.dev/role": role}).remote() for role in roles]
print("WHERE", json.dumps(dict(zip(roles, ray.get(calls, timeout=60)))))
"""


@pytest.fixture(scope="module")
def nodes3() -> Iterator[Cluster]:
    if reason := unavailable():
        pytest.skip(reason)
    with three_nodes(fast_health=True) as cluster:
        yield cluster


def test_roles_are_placed_by_label_and_addresses_are_not_loopback(nodes3: Cluster) -> None:
    done = nodes3.run([sys.executable, "-c", WHERE], check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("WHERE "))
    assert json.loads(line.removeprefix("WHERE ")) == {
        "learner": ["node0", "10.77.0.1", "10.77.0.1"],
        "rollout": ["node1", "10.77.0.2", "10.77.0.2"],
        "verifier": ["node2", "10.77.0.3", "10.77.0.3"],
    }


def test_without_the_token_nobody_connects(nodes3: Cluster) -> None:
    without = {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN_PATH": None}
    done = nodes3.run([sys.executable, "-c", "import ray; ray.init()"], env=without)
    assert done.returncode != 0
    assert "Authentication token is missing or incorrect" in done.stderr
    wrong = nodes3.folder / "wrong_token"
    wrong.write_text("0" * 64)
    done = nodes3.run([sys.executable, "-c", "import ray; ray.init()"], env={"RAY_AUTH_TOKEN_PATH": str(wrong)})
    assert done.returncode != 0
    assert stat.S_IMODE(nodes3.token_path.stat().st_mode) == 0o600
    token = nodes3.token_path.read_text()
    for log in [*nodes3.logs.values(), *(p for n in nodes3.nodes for p in n.temp.glob("session_*/logs/*"))]:
        assert not log.is_file() or token not in log.read_text(errors="replace"), f"the token is in {log}"
    for pid in (pid for node in nodes3.nodes for pid in node.pids()):
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or token.encode() not in command.read_bytes()


def test_a_node_stops_dies_goes_silent_and_comes_back(nodes3: Cluster) -> None:
    _, rollout, verifier = nodes3.nodes
    assert nodes3.stop_node(verifier) == 1  # Ray's own code after SIGTERM
    nodes3.wait_nodes(2)
    nodes3.kill_node(rollout)
    nodes3.wait_nodes(1)
    for node in (rollout, verifier):
        nodes3.start(node)
    nodes3.wait_nodes(3)
    nodes3.link(rollout, up=False)  # no process ends: only the health checks can tell
    nodes3.wait_nodes(2)
    nodes3.link(rollout, up=True)


def test_nothing_is_left_behind() -> None:
    if reason := unavailable():
        pytest.skip(reason)
    with two_nodes() as cluster:
        pids = [pid for node in cluster.nodes for pid in node.pids()]
        folder, network = cluster.folder, cluster.network
        assert len(pids) > 6
    assert not [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]
    assert not folder.exists()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20).stdout
    assert network not in listed
    assert not list(Path("/etc/netns").glob(f"{network}*"))
