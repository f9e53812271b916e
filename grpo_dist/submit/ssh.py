"""Plain hosts over ssh: a node runner on each, started through ssh's standard input, so no secret is on a command line.

    head:   recipe ─► runner ─► token and address back      others: token ─► runner told the head's address
    later:  state, logs and stop read and write the files in the head's launch folder, over ssh

The hosts may share storage or not. Everything ends with the run: the head's runner ends the head, the others leave when
it no longer answers. Left out: copying code and data; the hosts need grpo_dist installed and see the same data paths.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.submit.backend import Unreachable, patiently
from grpo_dist.submit.cluster import ClusterFile, Role, RoleNodes, SshSection
from grpo_dist.submit.logs import live_texts, worker_place
from grpo_dist.submit.plan import Submission, shell
from grpo_dist.submit.ray_api import RayApi, whole_lines
from grpo_dist.submit.records import JobState, Record, phase_of_exit


class SshBackend:
    """One runner per host."""

    def render(self, submission: Submission) -> str:
        """What every host is sent, with secrets by name."""
        parts = [f"# {submission.header}"]
        for host, role, group, is_head in placed(submission.loaded.cluster):
            script = node_script(submission, host, role, group, head_address=None if is_head else "HEAD:PORT", env={})
            parts.append(f"# --- ssh {host} bash -s\n{script}")
        return "\n".join([*parts, f"# --- {submission.launch}/recipe.yaml", submission.recipe_text()])

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        cluster = submission.loaded.cluster
        places = list(placed(cluster))
        head = places[0][0]
        for host, *_ in places:
            self._check(cluster, host)
        _ssh(cluster.ssh, head, _recipe_script(submission))
        started = [self._start(submission, *places[0], None)]
        record = Record(
            run=submission.run, submission=submission.id, backend="ssh", job=f"{head}:{started[0][1]}",
            run_dir=str(submission.run_dir), launch=str(submission.launch),
            cluster_file=str(submission.loaded.path.absolute()),
            where={"ssh": cluster.ssh.model_dump(mode="json"), "python": cluster.python, "head": head},
        )  # fmt: skip
        try:
            facts = self._wait_for_head(cluster, record)
            say(f"head is up on {head} at {facts['address']}")
            token = _ssh(cluster.ssh, head, f"cat {shell([facts['token']])}").strip()
            for place in places[1:]:
                started.append(self._start(submission, *place, str(facts["address"]), token=token))
                say(f"started {place[1]} on {place[0]}")
        except BaseException:
            for host, pid in started:
                _ssh(cluster.ssh, host, f"kill -TERM {pid} 2> /dev/null || true")
            raise
        return record

    def state(self, record: Record) -> JobState:
        facts = self._peek(record)
        if (ended := facts["exit"]) is not None:
            return JobState(phase_of_exit(int(ended["code"])), int(ended["code"]), str(ended["why"]))
        pid = record.job.rsplit(":", 1)[1]
        alive = _ssh(_section(record), record.where["head"], f"kill -0 {pid} 2> /dev/null && echo yes || echo no")
        if alive.strip() == "yes":
            running = any(node["state"] == "running" for node in facts["nodes"])
            return JobState("running" if running else "pending", None, "" if running else "the nodes come together")
        return JobState("failed", 137, f"the runner on {record.where['head']} was killed before it could say why")

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        if role is not None:
            yield from self._worker_lines(record, role, rank, follow=follow)
            return
        path, seen = f"{record.launch}/attempt-0/driver.log", 0
        while True:
            over = not follow or patiently(lambda: self.state(record)).ended
            read = f"tail -c +{seen + 1} {shell([path])} 2> /dev/null || true"
            text = patiently(partial(_ssh, _section(record), record.where["head"], read))
            data = text.encode()
            if not over:
                data = data[: data.rfind(b"\n") + 1]
            seen += len(data)
            yield from data.decode(errors="replace").splitlines()
            if over:
                return
            time.sleep(2)

    def progress(self, record: Record) -> dict[str, Any] | None:
        return self._peek(record)

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        state = self.state(record)
        if state.ended:
            say(f"the run has already ended: {state.phase}")
            return
        control = shell([f"{record.launch}/attempt-0/control"])
        ask = f"printf stop > {control}.aside && mv {control}.aside {control}"
        _ssh(_section(record), record.where["head"], f"{ask}; sleep 1; {ask}" if now else ask)
        say("asked to leave at once" if now else "asked to save and stop at the next step boundary")

    # ---- helpers

    def _check(self, cluster: ClusterFile, host: str) -> None:
        """The host answers and its interpreter has what is needed; before anything is started anywhere."""
        script = "\n".join(
            ["set -e", *cluster.setup, f"{cluster.python} -c 'import grpo_dist, ray; print(ray.__version__)'"]
        )
        try:
            _ssh(cluster.ssh, host, script)
        except Unreachable as error:
            raise UserError(f"host {host} cannot take part: {error}") from error

    @staticmethod
    def _start(
        submission: Submission, host: str, role: Role, group: RoleNodes, is_head: bool, address: str | None,
        *, token: str | None = None,
    ) -> tuple[str, int]:  # fmt: skip
        """(host, pid of its runner)."""
        del is_head
        script = node_script(submission, host, role, group, head_address=address, env=os.environ, token=token)
        return host, int(_ssh(submission.loaded.cluster.ssh, host, script).split()[-1])

    def _wait_for_head(self, cluster: ClusterFile, record: Record) -> dict[str, Any]:
        deadline = time.monotonic() + cluster.wait
        while True:
            facts = self._peek(record)
            if facts["exit"] is not None:
                raise GrpoDistError(f"the head on {record.where['head']} ended: {facts['exit']['why']}")
            if facts["cluster"] is not None:
                found: dict[str, Any] = facts["cluster"]
                return found
            if time.monotonic() > deadline:
                raise GrpoDistError(
                    f"no head on {record.where['head']} within {cluster.wait} s: see {record.launch} there"
                )
            time.sleep(1)

    def _peek(self, record: Record) -> dict[str, Any]:
        words = ["-m", "grpo_dist.launch.peek", "--launch", record.launch, "--run", record.run_dir]
        said = _ssh(_section(record), record.where["head"], shell([record.where["python"], *words]))
        answer: dict[str, Any] = json.loads(said.splitlines()[-1])
        return answer

    def _worker_lines(self, record: Record, role: str, rank: int, *, follow: bool) -> Iterator[str]:
        facts = self._peek(record)
        node, pid = worker_place(facts, role, rank)
        head, section = record.where["head"], _section(record)
        if facts["exit"] is None and facts["cluster"] and node:
            token = _ssh(section, head, f"cat {shell([facts['cluster']['token']])}").strip()
            api = RayApi(str(facts["cluster"]["dashboard"]), token)
            yield from whole_lines(live_texts(api, node, pid, lambda: self.state(record).ended, follow=follow))
            return
        folder = shell([f"{record.launch}/attempt-0/ray-logs"])
        yield from _ssh(section, head, f"cat {folder}/*/worker-*-{pid}.err {folder}/*/worker-*-{pid}.out").splitlines()


def placed(cluster: ClusterFile) -> Iterator[tuple[str, Role, RoleNodes, bool]]:
    """(host, role, its nodes, is head), the head first."""
    first = True
    for role, group in cluster.roles.groups():
        for host in group.hosts:
            yield host, role, group, first
            first = False


def node_script(
    submission: Submission, host: str, role: Role, group: RoleNodes, *, head_address: str | None, env: Any,
    token: str | None = None,
) -> str:  # fmt: skip
    """What a host runs. ``env`` has the secrets' values; where it lacks one, its name stands for it (a dry run)."""
    cluster = submission.loaded.cluster
    folder = f"{submission.launch}/attempt-0"
    names = ",".join(one for one, *_ in placed(cluster))
    words = [
        cluster.python, "-m", "grpo_dist.launch.node", "--folder", folder, "--name", host, "--role", role,
        "--gpus", str(group.gpus), "--wait", str(cluster.wait), "--grace", str(cluster.preemption.grace),
        "--port-key", submission.id, "--worker-ports", str(cluster.ports.workers),
    ]  # fmt: skip
    words += ["--cpus", str(group.cpus)] if group.cpus is not None else []
    words += ["--interface", cluster.interface] if cluster.interface else []
    words += ["--object-store", str(group.object_store)] if group.object_store else []
    for key, value in group.labels.items():
        words += ["--label", f"{key}={value}"]
    if head_address is None:
        words += ["--gcs-port", str(cluster.ports.gcs)] if cluster.ports.gcs else []
        words += ["--head", "--expect", names, "--", *submission.entry(f"{submission.launch}/recipe.yaml")]
    else:
        words += ["--head-address", head_address, "--token", f"{submission.launch}/ray_token"]
    lines = ["set -e", "umask 077", f"mkdir -p {shell([folder])}"]
    if token is not None:
        lines.append(
            f"[ -s {shell([f'{submission.launch}/ray_token'])} ] || printf %s {token} > {submission.launch}/ray_token"
        )
    lines += [f"cd {shell([cluster.ssh.working_dir or str(Path.cwd())])}", *cluster.setup]
    lines += [f"export {name}={shell([value])}" for name, value in cluster.environment.items()]
    lines += [f"export {name}={shell([env[name]]) if name in env else f'<{name}>'}" for name in cluster.secrets]
    lines.append(f"nohup setsid {shell(words)} < /dev/null >> {shell([f'{folder}/runner-{host}.log'])} 2>&1 &")
    lines.append("echo $!")
    return "\n".join(lines) + "\n"


def _recipe_script(submission: Submission) -> str:
    """Puts the recipe there; an earlier submission's attempt is kept under another name."""
    launch = str(submission.launch)
    text = base64.b64encode(submission.recipe_text().encode()).decode()
    lines = [
        "set -e",
        "umask 077",
        f"mkdir -p {shell([launch])} && cd {shell([launch])}",
        'if [ -d attempt-0 ]; then kept="before-$(date +%s)"; mkdir -p "$kept"; mv attempt-0 "$kept/"; fi',
        f"printf %s {text} | base64 -d > recipe.yaml",
    ]
    return "\n".join(lines)


def _section(record: Record) -> SshSection:
    return SshSection.model_validate(record.where["ssh"])


def _ssh(section: SshSection, host: str, script: str, seconds: float = 60) -> str:
    """``script`` on ``host`` through bash's standard input."""
    command: list[str] = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
    if section.port:
        command += ["-p", str(section.port)]
    if section.user:
        command += ["-l", section.user]
    words: Sequence[str] = [*command, *section.options, host, "bash", "-s"]
    try:
        done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"ssh {host}: no answer ({error.__class__.__name__})") from error
    if done.returncode:
        raise Unreachable(f"ssh {host} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout
