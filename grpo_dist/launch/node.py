"""One node of a cluster that lives as long as one run. The same command on every node, by Slurm, ssh, SkyPilot or hand:

    python -m grpo_dist.launch.node --folder SHARED/attempt-0 --name n1 --role learner --head --expect n1,n2 -- COMMAND…
    python -m grpo_dist.launch.node --folder SHARED/attempt-0 --name n2 --role rollout

    SHARED is storage that all nodes see; without it the others get --head-address and a copy of the token's file.

    every node   address ─► ports ─► checks ─► `ray start --block`, a child ─► ends by pid, adopted orphans included
    head         ─► cluster.json ─► waits for all expected nodes ─► COMMAND, a child ─► exit.json ─► its exit code
    other nodes  wait for cluster.json (or are told --head-address) ─► join ─► leave when exit.json is there

SIGTERM and SIGINT reach COMMAND as SIGTERM (save and stop), SIGUSR1 as SIGUSR1 (save, requeue me); so does the word
`stop` or `requeue` in FOLDER/control, which works where a scheduler would signal too many processes. Ray itself sees
no signal before COMMAND has ended. `ray stop` is never called: it would end every Ray of this user on the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.launch import folder as files
from grpo_dist.launch import ports
from grpo_dist.launch.checks import node_findings
from grpo_dist.launch.membership import answers, last_lines, wait_for_nodes
from grpo_dist.launch.netinfo import Interface, network_env, own_address
from grpo_dist.launch.node_options import NodeOptions, parse
from grpo_dist.launch.processes import adopt_orphans, end_descendants, end_with_parent
from grpo_dist.launch.tokens import check_token, clean_env, token_env, write_token

KEPT_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")


class Node:
    """This machine's part of the cluster, from its checks to the last process."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.folder = files.AttemptFolder(options.folder)
        self.signal: signal.Signals | None = None
        self.signals = 0
        self.ray: subprocess.Popen[bytes] | None = None
        self.log = options.folder / f"node-{options.name}.log"
        self.temp = Path(tempfile.mkdtemp(prefix="gd", dir=options.temp or _short_temp()))
        self.token = options.token or options.folder.parent / "ray_token"
        peer = _host(options.head_address)
        self.own = own_address(options.interface, peer) if options.ray else Interface("lo", "127.0.0.1")
        self.ports = ports.pick(ports.key_of(options.port_key or options.folder, options.name), options.worker_ports)

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        adopt_orphans()
        try:
            self._check()
            if not self.options.ray:
                return self._run_alone()
            return self._run_head() if self.options.head else self._run_worker()
        except GrpoDistError as error:
            self.say(str(error))
            self.folder.set_state(self.options.name, "failed", str(error))
            if self.options.head:
                self.folder.write_exit(error.exit_code, str(error))
            return error.exit_code
        finally:
            self._leave()

    # ---- what both kinds do

    def say(self, text: str) -> None:
        print(f"[{self.options.name}] {text}", flush=True)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal, self.signals = signal.Signals(number), self.signals + 1

    def _check(self) -> None:
        if self.options.head:
            self.folder.clear()
        self.folder.set_state(self.options.name, "checking", "")
        fatal = []
        for finding in node_findings(self.temp):
            if finding.level != "ok":
                self.say(str(finding))
            if finding.level == "fatal":
                fatal.append(finding.text)
        if fatal:
            raise UserError("this node cannot take part: " + "; ".join(fatal))
        if self.options.head:
            write_token(self.token)
            self._take_token()

    def _take_token(self) -> None:
        check_token(self.token)
        os.environ.update(token_env(self.token))

    def _environment(self) -> dict[str, str]:
        """Of Ray and of the driver: no other cluster's address, no MPI that a library could mistake for its own."""
        env = {
            key: value
            for key, value in clean_env(os.environ).items()
            if not key.startswith(("PMI", "OMPI_")) and (not key.startswith("SLURM") or key in KEPT_SLURM)
        }
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
        # Schedulers follow SIGTERM by SIGKILL, Slurm after 30 s: a drain must have ended before.
        env.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "20")
        env |= token_env(self.token)
        if self.options.interface:
            env |= {key: env.get(key, value) for key, value in network_env(self.own.name).items()}
        return env

    def _start_ray(self, address: str | None) -> None:
        options = self.options
        labels = {"grpo.dev/role": options.role, "grpo.dev/node": options.name, **options.labels}
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={self.own.ip}",
            f"--temp-dir={self.temp}", "--disable-usage-stats",
            "--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()),
            *self.ports.arguments(head=options.head),
        ]  # fmt: skip
        command += ["--head", f"--dashboard-host={self.own.ip}"] if options.head else [f"--address={_numeric(address)}"]
        if options.head and options.gcs_port is not None:
            if not ports.port_is_free(options.gcs_port):
                raise UserError(f"port {options.gcs_port} is in use on {self.own.ip}: another Ray? choose another one")
            command.append(f"--port={options.gcs_port}")  # the last one given counts
        if options.cpus is not None:
            command.append(f"--num-cpus={options.cpus:g}")
        if options.gpus is not None:
            command.append(f"--num-gpus={options.gpus:g}")
        if options.object_store is not None:
            command.append(f"--object-store-memory={options.object_store}")
        with self.log.open("ab") as log:
            self.ray = subprocess.Popen(
                command, env=self._environment() | self.ports.environment(), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        self.folder.set_state(options.name, "starting", "")

    def _ray_ended(self) -> GrpoDistError:
        assert self.ray is not None
        text = last_lines(self.log, 15)
        if "AuthToken" in text or "AuthenticationError" in text:
            return UserError(f"the head refuses this node's token ({self.token}): it must be the head's own file")
        return GrpoDistError(f"Ray ended with {self.ray.returncode} on {self.options.name}; its last lines:\n{text}")

    def _leave(self) -> None:
        """Nothing of this node stays: processes, ports, session folder. What Ray's workers said is kept."""
        for pid in end_descendants(os.getpid(), 20):
            self.say(f"process {pid} did not end within 20 s of SIGKILL")
        files.keep_logs(
            self.temp if self.options.ray else self.temp / "ray", self.options.folder / "ray-logs" / self.options.name
        )
        shutil.rmtree(self.temp, ignore_errors=True)

    # ---- the head

    def _run_alone(self) -> int:
        """Only COMMAND, which starts a Ray of its own on this machine."""
        self.folder.write_cluster(session=f"{self.temp}/ray", token=str(self.token), head=self.options.name)
        code = self._run_command({"RAY_TMPDIR": str(self.temp)})
        self.folder.write_exit(code, "the run ended" if code == 0 else f"the run ended with {code}")
        return code

    def _run_head(self) -> int:
        options = self.options
        self._start_ray(None)
        address = f"{self.own.ip}:{options.gcs_port or self.ports.gcs}"
        self._wait_until_up(address)
        self.folder.write_cluster(
            address=address, dashboard=f"http://{self.own.ip}:{self.ports.dashboard}", token=str(self.token),
            head=options.name,
        )  # fmt: skip
        self.say(f"Ray is up at {address}")
        wait_for_nodes(address, options.expect, options.wait, self.folder.states, self._interrupt, self.say)
        if self.signal is not None:
            code = 85 if self.signal is signal.SIGUSR1 else 130  # nothing had to be saved; it may be queued again
            self.folder.write_exit(code, f"stopped by {self.signal.name} before the run began")
            return code
        code = self._run_command({"RAY_ADDRESS": address})
        self.folder.write_exit(code, "the run ended" if code == 0 else f"the run ended with {code}")
        return code

    def _wait_until_up(self, address: str) -> None:
        assert self.ray is not None
        deadline = time.monotonic() + min(self.options.wait, 120)
        while not answers(address):
            if self.ray.poll() is not None:
                raise self._ray_ended()
            if time.monotonic() > deadline:
                raise GrpoDistError(
                    f"Ray's head did not answer at {address}; its last lines:\n{last_lines(self.log, 15)}"
                )
            time.sleep(0.2)
        self.folder.set_state(self.options.name, "joined", address)

    def _interrupt(self) -> None:
        """Called while waiting for nodes: a reason not to wait any longer."""
        assert self.ray is not None
        if self.ray.poll() is not None:
            raise self._ray_ended()
        self._read_control()
        if self.signal is not None:
            raise InterruptedError

    def _run_command(self, more: dict[str, str]) -> int:
        env = self._environment() | {"GRPO_LAUNCH_FOLDER": str(self.options.folder)} | more
        self.say("starting " + " ".join(self.options.command))
        with (self.options.folder / "driver.log").open("ab") as log:
            driver = subprocess.Popen(
                self.options.command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        self.folder.set_state(self.options.name, "running", f"driver pid {driver.pid}")
        sent, kill_at = 0, float("inf")
        while driver.poll() is None:
            self._read_control()
            if self.signal is not None and self.signals > sent:
                forward = signal.SIGUSR1 if self.signal is signal.SIGUSR1 else signal.SIGTERM
                self.say(f"{self.signal.name}: {forward.name} to the run, which has {self.options.grace:g} s to save")
                os.kill(driver.pid, forward)
                sent, kill_at = self.signals, min(kill_at, time.monotonic() + self.options.grace)
            if time.monotonic() > kill_at:
                self.say("the run did not end in time: SIGKILL")
                driver.kill()
            time.sleep(0.2)
        code = driver.returncode
        return code if code >= 0 else 128 - code

    def _read_control(self) -> None:
        wanted = {"stop": signal.SIGTERM, "requeue": signal.SIGUSR1}.get(self.folder.take_control())
        if wanted is not None:
            self.signal, self.signals = wanted, self.signals + 1

    # ---- the others

    def _run_worker(self) -> int:
        deadline = time.monotonic() + self.options.wait
        while (code := self._stay_joined()) is None:
            # Ray's own limit for a start is 30 s, which slow storage or a busy head can exceed.
            if time.monotonic() > deadline:
                raise self._ray_ended()
            self.say("Ray did not start in its time: once more")
            end_descendants(os.getpid(), 20)
        return code

    def _stay_joined(self) -> int | None:
        """Joins, and stays until the run, this node or Ray ends; None when Ray was too slow to start."""
        address = self._wait_for_head()
        if self.signal is not None or address is None:
            return 0 if self.signal is None else 128 + self.signal
        self._take_token()  # the head has written it by now
        self._start_ray(address)
        assert self.ray is not None
        silent_since: float | None = None
        asked_at: float | None = None
        while self.ray.poll() is None:
            if self.folder.exit_code() is not None:
                return 0
            silent_since = None if answers(address) else silent_since or time.monotonic()
            if silent_since is not None and time.monotonic() - silent_since > 30:
                self.say(f"the head at {address} has not answered for 30 s: leaving")
                return 0
            if self.signal is not None and asked_at is None:
                # Ray drains the node: the driver is told, and what runs here gets its time.
                self.say(f"{self.signal.name}: draining this node")
                self.ray.terminate()
                asked_at = time.monotonic()
            if asked_at is not None and (self.signals > 1 or time.monotonic() - asked_at > self.options.grace):
                break  # asked twice, or long ago: what is left is killed
            time.sleep(1)
        if self.signal is not None:
            return 128 + self.signal
        if self.folder.exit_code() is not None or not answers(address):
            return 0  # the head went first
        if "timed out during startup" in last_lines(self.log, 3):
            return None
        raise self._ray_ended()

    def _wait_for_head(self) -> str | None:
        self.folder.set_state(self.options.name, "waiting for the head", "")
        deadline, told = time.monotonic() + self.options.wait, self.options.head_address
        while (address := told or self.folder.head_address()) is None or not answers(address):
            if self.folder.exit_code() is not None or self.signal is not None:
                return None
            if time.monotonic() > deadline:
                why = f"{self.folder.path / 'cluster.json'} did not appear; is that on storage that all nodes share?"
                if address:
                    why = f"{address} does not answer from here; set `interface` if the head has several networks"
                raise GrpoDistError(f"no head within {self.options.wait:g} s: {why}")
            time.sleep(0.5)
        return address


def _short_temp() -> Path:
    """TMPDIR when Ray's socket paths still fit, else /tmp."""
    wanted = Path(os.environ.get("TMPDIR", "/tmp"))
    return wanted if len(str(wanted)) <= 24 and wanted.is_dir() else Path("/tmp")


def _numeric(address: str | None) -> str:
    """The same address without a name: gRPC looks names up in its own way, and may not find what this machine does."""
    host, _, port = (address or "").rpartition(":")
    return f"{socket.gethostbyname(host)}:{port}"


def _host(address: str | None) -> str | None:
    return address.rsplit(":", 1)[0] if address else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        node = Node(options)
    except (GrpoDistError, OSError) as error:
        print(f"[{options.name}] {error}", flush=True)
        folder, code = files.AttemptFolder(options.folder), getattr(error, "exit_code", 1)
        folder.set_state(options.name, "failed", str(error))
        if options.head:
            folder.write_exit(code, str(error))
        return code
    return node.run()


if __name__ == "__main__":
    sys.exit(main())
