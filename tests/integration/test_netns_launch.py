"""Three machines that share only a network (namespaces): started by real ssh, and by hand with the launch scripts.

The run over ssh is the stand-in. Also what a node runner does when things go wrong: a foreign Ray on the usual port, a
wrong token, nobody joining, a full temporary folder, an interface that is not there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_dist.launch.folder import AttemptFolder
from grpo_dist.launch.tokens import token_env, write_token
from tests.integration.netns import Cluster, Node, NodeSpec, cluster, unavailable

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

ROOT = Path(__file__).parents[2]
PLANTED = "planted-wandb-key-5555555555"
STAND_IN = "tests.integration.stand_in_train"


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    if reason := unavailable():
        pytest.skip(reason)
    with cluster([NodeSpec("learner"), NodeSpec("rollout"), NodeSpec("verifier")], ray=False) as made:
        yield made


# ---- ssh


@pytest.fixture(scope="module")
def ssh(machines: Cluster) -> list[str]:
    """sshd on every machine; the options with which a client gets in."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    folder = machines.folder
    for name in ("host_key", "client_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=20
        )
    config = folder / "sshd_config"
    config.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/client_key.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
    )
    for node in machines.nodes:
        machines.popen([sshd, "-D", "-e", "-f", str(config)], node=node, stderr=subprocess.DEVNULL)
    return [
        "-i", f"{folder}/client_key", "-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder}/known",
        "-o", "LogLevel=ERROR",
    ]  # fmt: skip


class Login:
    """A user on the first machine."""

    def __init__(self, machines: Cluster, options: list[str], folder: Path) -> None:
        self.machines, self.folder = machines, folder
        self.env = {"GRPO_DIST_HOME": str(folder / "home"), "WANDB_API_KEY": PLANTED, "PYTHONPATH": str(ROOT)}
        body = {
            "backend": "ssh", "python": sys.executable, "interface": "10.77.0.0/24", "wait": 120,
            "roles": {
                "head": {"on": "learner"}, "learner": {"hosts": ["node0"], "cpus": 2},
                "rollout": {"hosts": ["node1"], "cpus": 2}, "verifier": {"hosts": ["node2"], "cpus": 2},
            },
            "storage": {"runs": str(folder / "runs")}, "environment": {"PYTHONPATH": str(ROOT)},
            "secrets": ["WANDB_API_KEY"], "ssh": {"options": options, "working_dir": str(ROOT)},
        }  # fmt: skip
        self.cluster = folder / "cluster.yaml"
        self.cluster.write_text(json.dumps(body))

    def verb(self, call: str, *, timeout: float = 150, **env: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys\nfrom grpo_dist.errors import GrpoDistError\nfrom grpo_dist.submit import verbs\n"
            f"try: sys.exit(verbs.{call})\n"
            "except GrpoDistError as error: print(error, file=sys.stderr); sys.exit(error.exit_code)"
        )
        return self.machines.run([sys.executable, "-c", code], env={**self.env, **env}, timeout=timeout)

    def submit(self, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
        words = [f"run.name={name}", *overrides]
        return self.verb(f"submit('quickstart', {str(self.cluster)!r}, {words!r}, module={STAND_IN!r})")


def planted_command_lines(machines: Cluster, *secrets: str) -> list[int]:
    found = []
    for node in machines.nodes:
        for pid in node.pids():
            path = Path(f"/proc/{pid}/cmdline")
            if path.exists() and any(secret.encode() in path.read_bytes() for secret in secrets):
                found.append(pid)
    return found


def test_the_doctor_has_every_host_look_at_itself(machines: Cluster, ssh: list[str], tmp_path: Path) -> None:
    login = Login(machines, ssh, tmp_path)
    body = json.loads(login.cluster.read_text())
    body["roles"]["verifier"]["hosts"] = ["node2", "node9"]  # in the table of hosts, but no machine
    login.cluster.write_text(json.dumps(body))
    command = [sys.executable, "-m", "grpo_dist.cli", "doctor", "--json", "--cluster", str(login.cluster)]
    done = machines.run(command, env={**login.env, "RAY_ADDRESS": None}, timeout=150)
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)["rows"]
    address = {row["node"]: row["text"] for row in rows if row["subject"] == "address" and row["node"]}
    assert address == {f"node{n}": f"10.77.0.{n + 1} on eth0" for n in range(3)}
    assert {row["node"] for row in rows if row["level"] == "fail"} == {"node9"}


def test_over_ssh_roles_on_their_hosts_follow_stop_and_nothing_left(
    machines: Cluster, ssh: list[str], tmp_path: Path
) -> None:
    login = Login(machines, ssh, tmp_path)
    quiet = {node.name: len(node.pids()) for node in machines.nodes}
    done = login.submit("long", "run.steps=100000")
    assert done.returncode == 0, done.stderr
    assert "head is up on node0 at 10.77.0.1:" in done.stdout
    events = tmp_path / "runs" / "long" / "events.jsonl"
    deadline = time.monotonic() + 90
    while not events.exists() or len(events.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline, login.verb("logs('long')").stdout
        time.sleep(0.3)
    places = {line["worker"]: line["node"] for line in map(json.loads, events.read_text().splitlines())}
    assert places == {"learner-0": "10.77.0.1", "rollout-0": "10.77.0.2", "verifier-0": "10.77.0.3"}
    token = (tmp_path / "runs" / ".launch" / "long" / "ray_token").read_text()
    assert planted_command_lines(machines, PLANTED, token) == []
    status = login.verb("status('long')")
    assert status.stdout.splitlines()[0] == "long: running"
    assert "stand-in worker says hello" in login.verb("logs('long', role='rollout')").stdout
    assert login.verb("stop('long', wait=60)").returncode == 0
    followed = login.verb("logs('long', follow=True)")
    assert followed.returncode == 130, followed.stdout
    assert "saved step" in followed.stdout
    deadline = time.monotonic() + 60
    while any(len(node.pids()) > quiet[node.name] for node in machines.nodes):
        assert time.monotonic() < deadline, [node.pids() for node in machines.nodes]
        time.sleep(0.5)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "ray_token":
            assert PLANTED.encode() not in path.read_bytes(), path
            assert token.encode() not in path.read_bytes(), path


def test_over_ssh_a_host_that_cannot_take_part_is_named(machines: Cluster, ssh: list[str], tmp_path: Path) -> None:
    login = Login(machines, ssh, tmp_path)
    text = login.cluster.read_text()
    login.cluster.write_text(text.replace("node2", "node9"))
    done = login.submit("nohost")
    assert done.returncode == 2
    assert "host node9 cannot take part" in done.stderr
    login.cluster.write_text(text.replace(sys.executable, "/nope/python"))
    done = login.submit("nopython")
    assert done.returncode == 2
    assert "host node0 cannot take part" in done.stderr
    assert not (tmp_path / "runs" / ".launch" / "nopython").exists()


# ---- by hand


def by_hand(machines: Cluster, node: Node, words: list[str], **env: str | None) -> subprocess.Popen[bytes]:
    """A command on a machine whose environment names another cluster: what a shell there may well do."""
    changes = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", **env}
    return machines.popen(words, node=node, env=changes, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def runner(machines: Cluster, node: Node, *words: str, **env: str | None) -> subprocess.Popen[bytes]:
    return by_hand(machines, node, [sys.executable, "-m", "grpo_dist.launch.node", "--name", node.name, *words], **env)


def output(process: subprocess.Popen[bytes], seconds: float = 90) -> str:
    out, _ = process.communicate(timeout=seconds)
    return out.decode()


def until(done: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_the_scripts_make_a_cluster_with_roles_by_label_beside_a_foreign_ray(machines: Cluster, tmp_path: Path) -> None:
    """k3: somebody else's Ray on the default port of the head's machine is neither joined nor touched."""
    one, two, three = machines.nodes
    foreign = machines.popen(
        [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--node-ip-address={one.ip}",
            "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={machines.folder}/f", "--disable-usage-stats",
        ],
        node=one, env={"RAY_ADDRESS": None, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    folder = tmp_path / "cluster"
    head = by_hand(
        machines, one, ["bash", "launch/head.sh", str(folder), "--gcs-port", "12379", "--cpus", "1"], ROLE="learner"
    )
    started = [head]
    try:
        until(lambda: AttemptFolder(folder).head_address(), "no head")
        token = folder / "ray_token"
        for node, role, gpus in (
            (two, "rollout", "2"),
            (three, "verifier", "0"),
        ):  # GPUs on paper: Ray only counts them
            words = ["bash", "launch/join.sh", "node0:12379", role, str(token), "--cpus", "1", "--gpus", gpus]
            started.append(by_hand(machines, node, words, TMPDIR="/tmp"))
        ask = [sys.executable, "-c", WHERE]
        env = {"RAY_ADDRESS": AttemptFolder(folder).head_address(), **token_env(token)}
        done = machines.run(ask, env=env, check=True, timeout=100)
        places = json.loads(done.stdout.split("WHERE ", 1)[1])
        assert places == {"learner": "10.77.0.1", "rollout": "10.77.0.2", "verifier": "10.77.0.3", "gpus": ["0", "1"]}
        for process in reversed(started):  # Ctrl-C in every terminal, the head's last
            process.send_signal(signal.SIGINT)
            process.wait(60)
        assert foreign.poll() is None
        assert not [pid for node in (two, three) for pid in node.pids() if b"ray" in _cmdline(pid)]
    finally:
        for process in (*started, foreign):
            if process.poll() is None:
                process.terminate()
                process.wait(60)


WHERE = """
import json, ray, time
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1)
def where():
    return ray.util.get_node_ip_address()
end = time.monotonic() + 60
while len(ray.nodes()) < 3 and time.monotonic() < end:
    time.sleep(0.3)
roles = ("learner", "rollout", "verifier")
calls = [where.options(label_selector={"grpo.dev/role": role}).remote() for role in roles]
places = dict(zip(roles, ray.get(calls, timeout=60)))

# f6: as ranks and engines are placed, each of two workers on a node sees a GPU of its own.
from grpo_dist.config import PlacementSection
from grpo_dist.fleet.placement import Bundle, Reservation
from grpo_dist.learner.rank import actor_environment
@ray.remote
class Worker:
    def visible(self):
        import os
        return os.environ["CUDA_VISIBLE_DEVICES"]
held = Reservation([Bundle.of("rollout", PlacementSection(cpus=0.25), 1)] * 2, "PACK")
environment = {"env_vars": actor_environment("cuda")}
workers = [Worker.options(runtime_env=environment, **held.options(i)).remote() for i in range(2)]
places["gpus"] = sorted(ray.get([worker.visible.remote() for worker in workers], timeout=60))
print("WHERE", json.dumps(places))
"""


def test_who_is_missing_is_said_and_a_wrong_token_is_named(machines: Cluster, tmp_path: Path) -> None:
    """f13, k3: the others do not wait out their limit when one of them says that it failed."""
    shared = tmp_path / "attempt-0"
    shared.mkdir()
    wrong = write_token(tmp_path / "wrong")
    words = ["--folder", str(shared), "--role", "learner", "--head", "--cpus", "1", "--wait", "120"]
    head = runner(machines, machines.nodes[0], *words, "--expect", "node0,node1,node2", "--", "true")
    folder = AttemptFolder(shared)
    until(folder.cluster, "no head")
    words = ["--folder", str(shared), "--role", "rollout", "--cpus", "1", "--token", str(wrong)]
    worker = runner(machines, machines.nodes[1], *words)
    said = output(worker, 120)
    assert worker.returncode == 2, said
    assert f"the head refuses this node's token ({wrong})" in said
    text = output(head, 90)
    assert head.returncode == 1
    assert "1 of 3 nodes joined; missing:" in text
    assert "node1: failed the head refuses this node's token" in text
    assert "node2: never reported" in text
    assert folder.exit_code() == 1


def test_a_machine_that_is_not_fit_is_refused_before_ray_starts(machines: Cluster, tmp_path: Path) -> None:
    """f10: 100 MB left in the temporary folder; with it, k4: 64 MB of shared memory are warned of. k1: an interface that
    is not there, by option or by variable."""
    words = ["--folder", str(tmp_path / "a"), "--role", "learner", "--head"]
    module = [sys.executable, "-m", "grpo_dist.launch.node", "--name", "node0"]
    less = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    small = machines.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(small)], check=True, timeout=20)
    try:
        full = by_hand(machines, machines.nodes[0], [*less, *module, *words, "--temp", str(small), "--", "true"])
        absent = runner(machines, machines.nodes[1], *words, "--interface", "bond7", "--", "true")
        variable = runner(machines, machines.nodes[2], *words, "--", "true", GLOO_SOCKET_IFNAME="bond7")
        wanted = {
            full: "100 MB left",
            absent: "'bond7' is not on this machine; present: ",
            variable: "GLOO_SOCKET_IFNAME=bond7: no interface is called 'bond7' (exact names only); present: eth0, lo",
        }
        said = {process: output(process) for process in wanted}
        for process, text in wanted.items():
            assert text in said[process]
            assert process.returncode == 2
        assert "/dev/shm has 64 MB, at least 8 GB is wanted: docker run --shm-size" in said[full]
    finally:
        subprocess.run(["umount", str(small)], check=True, timeout=20)


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
