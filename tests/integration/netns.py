"""Real Ray clusters of several nodes on one machine: a network namespace per node, joined by a bridge.

    with two_nodes() as cluster:
        cluster.run([sys.executable, "-m", "grpo_dist.cli", "train", "recipe.yaml"], timeout=300)

Each node has its own interface, address, ports, host name and Ray session folder; they share the file system and the
processors. Authentication by token is on. The driver has to run inside a node's namespace (`run` and `popen` do that,
on the head unless told otherwise): the test's own process has no route to the cluster.
Clean-up ends the processes found in the cluster's own namespaces, by pid, and waits for them with a limit.
Needs root and iproute2; `unavailable()` says why where it cannot work, and the fixtures skip with that reason.
Left out: latency and loss (tc netem does not exist here); `link` can take a node off the network.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from grpo_dist.launch.tokens import clean_env, token_env, write_token

GCS_PORT, DASHBOARD_PORT = 6379, 8265  # every node has a network of its own: nothing to clash with
FAST_HEALTH = {  # a silent node is declared dead after about 3-6 s instead of 15-65 s
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def unavailable() -> str | None:
    """Why namespaces cannot be used here, or None."""
    if not shutil.which("ip"):
        return "iproute2 is not installed (no `ip` command)"
    name = f"gdprobe{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    bridge = subprocess.run(
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"], capture_output=True, text=True, timeout=20
    )
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=20)
    return f"bridges are not permitted: {bridge.stderr.strip()}" if bridge.returncode else None


@dataclass(frozen=True)
class NodeSpec:
    """One node to be: its role becomes the label ``grpo.dev/role`` unless ``labels`` says otherwise."""

    role: str
    cpus: float = 4
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Node:
    spec: NodeSpec
    name: str  # host name, `node0` is the head
    namespace: str
    ip: str
    temp: Path  # Ray's session folder of this node
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def pids(self) -> list[int]:
        """Every process in this node's network, Ray's and those of `Cluster.run`."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=20)
        return [int(pid) for pid in listed.stdout.split()]


class Cluster:
    """A running cluster. ``address`` is the GCS (what RAY_ADDRESS wants), ``env`` what a driver needs."""

    def __init__(self, folder: Path, network: str, *, dashboard: bool, fast_health: bool, drain_seconds: int) -> None:
        self.folder, self.network, self.dashboard = folder, network, dashboard
        self.drain_seconds, self.fast_health = drain_seconds, fast_health
        self.token_path = write_token(folder / "ray_token")
        self.nodes: list[Node] = []

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def address(self) -> str:
        return f"{self.head.ip}:{GCS_PORT}"

    @property
    def dashboard_url(self) -> str:
        return f"http://{self.head.ip}:{DASHBOARD_PORT}"

    @property
    def env(self) -> dict[str, str]:
        return {"RAY_ADDRESS": self.address, **token_env(self.token_path), **COMMON_ENV}

    @property
    def logs(self) -> dict[str, Path]:
        return {node.name: node.log for node in self.nodes}

    def add_node(self, spec: NodeSpec, *, ray: bool = True) -> Node:
        """A new namespace on the bridge with a Ray node inside; the first one is the head. Does not wait."""
        index = len(self.nodes)
        node = Node(
            spec, f"node{index}", f"{self.network}n{index}", f"10.77.0.{index + 1}", self.folder / f"t{index}",
            self.folder / f"node{index}.log",
        )  # fmt: skip
        self.nodes.append(node)  # before anything exists: clean-up must see a half-made node
        _connect(self.network, node, index)
        if ray:
            self.start(node)
        return node

    def start(self, node: Node, *, env: Mapping[str, str | None] | None = None, extra: Sequence[str] = ()) -> None:
        """`ray start --block` in the node's namespace; also brings back a killed one. ``env``: None removes."""
        labels = {"grpo.dev/role": node.spec.role, **node.spec.labels}
        command = [
            _ray(), "start", "--block", f"--node-ip-address={node.ip}", f"--temp-dir={node.temp}",
            f"--num-cpus={node.spec.cpus:g}", "--num-gpus=0", f"--object-store-memory={200 << 20}",
            "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()), "--disable-usage-stats",
            f"--resources={json.dumps(dict(node.spec.resources))}", *extra,
        ]  # fmt: skip
        if node is self.head:
            command += ["--head", f"--port={GCS_PORT}", f"--include-dashboard={str(self.dashboard).lower()}"]
            command += [f"--dashboard-host={node.ip}", f"--dashboard-port={DASHBOARD_PORT}"]
        else:
            command += [f"--address={self.address}"]
        changes: dict[str, str | None] = {
            **token_env(self.token_path), **COMMON_ENV, **(FAST_HEALTH if self.fast_health else {}),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(self.drain_seconds), **node.spec.env, **(env or {}),
        }  # fmt: skip
        with node.log.open("ab") as log:
            node.process = subprocess.Popen(
                _inside(node, command), env=_merged(changes), stdout=log, stderr=log, start_new_session=True
            )

    def run(
        self, command: Sequence[str], *, node: Node | None = None, env: Mapping[str, str | None] | None = None,
        timeout: float = 120, check: bool = False, cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """``command`` to its end inside a node's namespace (the head's by default), output captured."""
        process = self.popen(command, node=node, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(
                f"{list(command)[:4]} still ran after {timeout} s\n{_text(out)}\n{_text(err)}\n{self.tail()}"
            ) from None
        done = subprocess.CompletedProcess(list(command), process.returncode, _text(out), _text(err))
        if check and done.returncode:
            raise AssertionError(
                f"{list(command)[:4]} ended with {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.tail()}"
            )
        return done

    def popen(
        self, command: Sequence[str], *, node: Node | None = None, env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None, stdout: int | None = None, stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """``command`` started in a namespace, leader of its own process group, with the driver's environment."""
        return subprocess.Popen(
            _inside(node or self.head, command), env=_merged({**self.env, **(env or {})}), cwd=cwd, stdout=stdout,
            stderr=stderr, start_new_session=True,
        )  # fmt: skip

    def ray_nodes(self, timeout: float = 60) -> list[dict[str, object]]:
        """What the cluster says of its nodes (ray.nodes()), asked by a short driver on the head."""
        code = "import ray, json; ray.init(logging_level=40); print('NODES', json.dumps(ray.nodes()))"
        done = self.run([sys.executable, "-c", code], timeout=timeout, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("NODES "))
        nodes: list[dict[str, object]] = json.loads(line.removeprefix("NODES "))
        return nodes

    def wait_nodes(self, count: int, seconds: float = 90) -> None:
        """Returns when exactly ``count`` nodes are alive; otherwise an AssertionError with the nodes' logs."""
        code = (
            "import sys, time\nfrom ray._raylet import GcsClient\n"
            f"end = time.monotonic() + {seconds}\nwant, seen = {count}, 'no answer'\n"
            "while time.monotonic() < end:\n"
            "    try:\n"
            f"        infos = GcsClient(address='{self.address}').get_all_node_info(timeout=5).values()\n"
            "        seen = sorted(i.node_manager_address for i in infos if i.state == 0)\n"
            "        if len(seen) == want: sys.exit(0)\n"
            "    except Exception as error: seen = repr(error)\n"
            "    time.sleep(0.3)\n"
            "print(f'wanted {want} nodes, alive: {seen}'); sys.exit(1)\n"
        )
        self.run([sys.executable, "-c", code], timeout=seconds + 60, check=True)

    def link(self, node: Node, *, up: bool) -> None:
        """Plugs the node's cable in or out: a silent loss, processes stay."""
        _ip("-n", node.namespace, "link", "set", "eth0", "up" if up else "down")
        if up:  # the default route goes with the interface
            _ip("-n", node.namespace, "route", "replace", "default", "via", "10.77.0.254")

    def kill_node(self, node: Node) -> None:
        """SIGKILL to everything in the node: the machine is gone."""
        _end(node.pids, signal.SIGKILL, 20)

    def stop_node(self, node: Node, seconds: float = 60) -> int:
        """SIGTERM to `ray start`, which drains and stops the node; its exit code."""
        assert node.process is not None
        os.kill(_ray_pid(node), signal.SIGTERM)
        return node.process.wait(seconds)

    def tail(self, lines: int = 25) -> str:
        return "\n".join(
            f"--- {name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for name, path in self.logs.items()
            if path.exists()
        )

    def close(self) -> None:
        left: list[int] = []
        for node in reversed(self.nodes):
            left += _end(node.pids, signal.SIGTERM, 5) and _end(node.pids, signal.SIGKILL, 20)
        for node in self.nodes:
            if node.process is not None:
                node.process.wait(20)
        if left:
            raise AssertionError(f"processes {left} outlived SIGKILL for 20 s")


@contextmanager
def cluster(
    specs: Sequence[NodeSpec], *, dashboard: bool = False, fast_health: bool = False, drain_seconds: int = 0,
    wait_seconds: float = 90, ray: bool = True,
) -> Iterator[Cluster]:  # fmt: skip
    """A cluster of ``specs`` (the first is the head), all nodes alive; gone, with its namespaces, at the end.

    Without ``ray`` they are connected machines on which nothing runs yet.
    """
    network = f"gd{uuid.uuid4().hex[:6]}"
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="gd", dir="/tmp"))  # short: Ray's socket paths have 107 bytes
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _ip("netns", "add", network)
        stack.callback(subprocess.run, ["ip", "netns", "del", network], timeout=20)
        _ip("-n", network, "link", "add", "br0", "type", "bridge")
        _ip("-n", network, "addr", "add", "10.77.0.254/24", "dev", "br0")
        _ip("-n", network, "link", "set", "br0", "up")
        made = Cluster(folder, network, dashboard=dashboard, fast_health=fast_health, drain_seconds=drain_seconds)
        stack.callback(_remove_namespaces, made)
        stack.callback(made.close)
        for number, spec in enumerate(specs):
            made.add_node(spec, ray=ray)
            if ray and number == 0:  # a worker that starts before its head waits in steps of seconds
                made.wait_nodes(1, wait_seconds)
        if ray:
            made.wait_nodes(len(specs), wait_seconds)
        yield made


@contextmanager
def two_nodes(
    head: NodeSpec | None = None, worker: NodeSpec | None = None, *, dashboard: bool = False, fast_health: bool = False
) -> Iterator[Cluster]:
    """node0: head and learners; node1: rollouts."""
    specs = [head or NodeSpec("learner"), worker or NodeSpec("rollout")]
    with cluster(specs, dashboard=dashboard, fast_health=fast_health) as made:
        yield made


@contextmanager
def three_nodes(*, dashboard: bool = False, fast_health: bool = False) -> Iterator[Cluster]:
    """node0: head and learners; node1: rollouts; node2: verifiers."""
    specs = [NodeSpec("learner"), NodeSpec("rollout"), NodeSpec("verifier")]
    with cluster(specs, dashboard=dashboard, fast_health=fast_health) as made:
        yield made


COMMON_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    # Gloo asks the host name for its address and falls back to loopback, which another node cannot reach.
    "GLOO_SOCKET_IFNAME": "eth0",
}


def _connect(network: str, node: Node, index: int) -> None:
    _ip("netns", "add", node.namespace)
    _ip("-n", node.namespace, "link", "set", "lo", "up")
    _ip("-n", node.namespace, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{index}", "netns", network)
    _ip("-n", network, "link", "set", f"p{index}", "master", "br0", "up")
    _ip("-n", node.namespace, "addr", "add", f"{node.ip}/24", "dev", "eth0")
    _ip("-n", node.namespace, "link", "set", "eth0", "up")
    # Nothing lies behind it, but libraries find their own address by asking which way the internet is.
    _ip("-n", node.namespace, "route", "add", "default", "via", "10.77.0.254")
    hosts = Path("/etc/netns") / node.namespace / "hosts"  # `ip netns exec` mounts it over /etc/hosts
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} node{i}\n" for i in range(16)))


def _remove_namespaces(made: Cluster) -> None:
    for node in made.nodes:
        subprocess.run(["ip", "netns", "del", node.namespace], timeout=20)
        shutil.rmtree(Path("/etc/netns") / node.namespace, ignore_errors=True)


def _inside(node: Node, command: Sequence[str]) -> list[str]:
    set_name = f'hostname {node.name} && exec "$@"'
    return ["ip", "netns", "exec", node.namespace, "unshare", "--uts", "sh", "-c", set_name, "sh", *command]


def _ray_pid(node: Node) -> int:
    """The pid of `ray start`: ip, unshare and sh replace themselves by it, so it is the one that was started."""
    assert node.process is not None
    return node.process.pid


def _end(pids: object, how: signal.Signals, seconds: float) -> list[int]:
    """Sends ``how`` to what ``pids()`` lists until the list is empty or the time is over; returns who is left."""
    assert callable(pids)
    deadline = time.monotonic() + seconds
    signalled: set[int] = set()
    while left := [pid for pid in pids() if _alive(pid)]:
        for pid in left:
            if pid not in signalled or how is signal.SIGKILL:
                signalled.add(pid)
                try:
                    os.kill(pid, how)
                except ProcessLookupError:
                    continue
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _merged(changes: Mapping[str, str | None]) -> dict[str, str]:
    env = clean_env(os.environ)
    env.pop("PYTHONSTARTUP", None)
    for key, value in changes.items():
        if value is None:
            env.pop(key, None)
        else:
            env[key] = value
    return env


def _ray() -> str:
    return str(Path(sys.executable).parent / "ray")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""
