"""What can be asked from here about the place a cluster file names, before anything is submitted; and W&B.

local    nothing more            slurm       sbatch, the partition
ray      dashboard, token        kubernetes  kubectl, KubeRay's definition, rights, secret, claims
         and a job: `doctor` on  ssh         every host: its own look, through ssh
         the cluster itself
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_dist.doctor.machine import Look, Row
from grpo_dist.errors import GrpoDistError, UserError
from grpo_dist.submit.cluster import ClusterFile
from grpo_dist.submit.cluster_rules import missing_secrets
from grpo_dist.submit.plan import ray_version, shell
from grpo_dist.submit.ray_api import RayApi
from grpo_dist.submit.tokens import find_token

JOB_SECONDS = 300.0
HOSTS_AT_A_TIME = 32


def outside_rows(cluster: ClusterFile) -> Iterator[Row]:
    """By back end."""
    if missing := missing_secrets(cluster):
        yield Row("fail", "secrets", f"{', '.join(missing)} not set in this environment, from where they are handed on")
    if cluster.backend == "ray":
        yield from _ray(cluster)
    elif cluster.backend == "slurm":
        yield from _slurm(cluster)
    elif cluster.backend == "kubernetes":
        yield from _kubernetes(cluster)
    elif cluster.backend == "ssh":
        yield from _ssh(cluster)


def wandb_row(env: Mapping[str, str] = os.environ) -> Row:
    """Whether runs can be followed online. Nothing is logged in, no key is read beyond whether there is one."""
    if env.get("WANDB_MODE") in ("offline", "disabled"):
        return Row("ok", "W&B", f"WANDB_MODE is {env['WANDB_MODE']}")
    base = env.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = urlsplit(base).hostname or base
    netrc = Path(env.get("NETRC", "~/.netrc")).expanduser()
    if not env.get("WANDB_API_KEY") and not (netrc.is_file() and host in netrc.read_text(errors="replace")):
        return Row("ok", "W&B", "no WANDB_API_KEY: runs are kept offline, `wandb sync` sends them later")
    try:
        socket.create_connection((host, urlsplit(base).port or 443), timeout=5).close()
    except OSError as error:
        return Row("warn", "W&B", f"{host} does not answer ({error}): training goes on, what is logged is kept offline")
    return Row("ok", "W&B", f"{host} answers, a key is set")


# ---- an existing Ray cluster


def _ray(cluster: ClusterFile) -> Iterator[Row]:
    assert cluster.ray is not None
    try:
        token = None if cluster.ray.authentication == "none" else find_token(cluster.ray.token)
        api = RayApi(cluster.ray.address, token)
        theirs = api.version()
    except GrpoDistError as error:
        yield Row("fail", "Ray", str(error))
        return
    if theirs != ray_version():
        yield Row("fail", "Ray", f"{cluster.ray.address} runs Ray {theirs}, here is {ray_version()}: install the same")
        return
    yield Row("ok", "Ray", f"{cluster.ray.address} answers, version {theirs}")
    command = shell([cluster.python, "-m", "grpo_dist.cli", "doctor", "--json"])
    try:
        job = api.submit({"entrypoint": command, "metadata": {"grpo_kind": "doctor"}})
        deadline = time.monotonic() + JOB_SECONDS
        while (facts := api.job(job) or {}).get("status") in ("PENDING", "RUNNING"):
            if time.monotonic() > deadline:
                api.stop(job)
                yield Row("fail", "cluster", f"the doctor's job {job} did not end within {JOB_SECONDS:g} s")
                return
            time.sleep(1)
        said = api.log(job)
    except GrpoDistError as error:
        yield Row("fail", "Ray", str(error))
        return
    found = [line for line in said.splitlines() if line.startswith('{"ok": ')]  # Ray writes lines of its own
    if not found:
        last = (said.strip().splitlines() or [str(facts.get("message"))])[-1]
        yield Row("fail", "cluster", f"the doctor's job {job} failed: {last}")
        return
    for row in json.loads(found[-1])["rows"]:
        yield Row(**row | {"node": row["node"] or "head"})


# ---- Slurm


def _slurm(cluster: ClusterFile) -> Iterator[Row]:
    if shutil.which("sbatch") is None:
        yield Row("fail", "Slurm", "sbatch is not on PATH: submit from a login node")
        return
    partitions = {group.slurm.partition or cluster.slurm.partition for _, group in cluster.roles.groups()}
    for name in sorted(filter(None, partitions)) or [""]:
        words = ["sinfo", "--noheader", "--format=%P|%a|%D|%c|%G", *([f"--partition={name}"] if name else [])]
        done = _run(words)
        if done.returncode or not done.stdout.strip():
            why = done.stderr.strip() or f"no such partition: sinfo lists {_run(['sinfo', '-ho', '%P']).stdout.split()}"
            yield Row("fail", f"partition {name}".strip(), why)
            continue
        for line in done.stdout.splitlines():
            partition, state, nodes, cpus, gres = line.strip().split("|")
            text = f"{state}, {nodes} nodes of {cpus} cores, {gres}"
            yield Row("ok" if state == "up" else "fail", f"partition {partition}", text)
    yield Row("ok", "nodes", "looked at by each job before it starts; inside an allocation: srun grpo-dist doctor")


# ---- Kubernetes


def _kubernetes(cluster: ClusterFile) -> Iterator[Row]:
    if shutil.which("kubectl") is None:
        yield Row("fail", "kubectl", "is not on PATH")
        return
    space = cluster.kubernetes.namespace
    base = ["kubectl", *(["--context", cluster.kubernetes.context] if cluster.kubernetes.context else [])]
    base += ["--request-timeout=10s"]
    asked: list[tuple[str, list[str], str]] = [
        ("KubeRay", ["get", "crd", "rayjobs.ray.io", "-o", "name"], "install the operator (docs/clusters.md)"),
        ("rights", ["auth", "can-i", "create", "rayjobs.ray.io", "-n", space], f"ask for rights in namespace {space}"),
    ]
    if cluster.secrets:
        text = f"kubectl create secret generic {cluster.kubernetes.secret} -n {space} --from-literal=…"
        asked.append(("secret", ["get", "secret", cluster.kubernetes.secret, "-n", space, "-o", "name"], text))
    asked += [
        (f"claim {volume.claim}", ["get", "pvc", volume.claim, "-n", space, "-o", "name"], "create it, ReadWriteMany")
        for volume in cluster.storage.volumes
    ]
    for subject, words, advice in asked:
        done = _run([*base, *words])
        said = (done.stdout + done.stderr).strip().splitlines() or ["no answer"]
        good = done.returncode == 0
        yield Row("ok" if good else "fail", subject, said[0] if good else f"{said[-1]}: {advice}")


# ---- plain hosts


def _ssh(cluster: ClusterFile) -> Iterator[Row]:
    section = cluster.ssh
    options = [*section.options, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    options += ["-p", str(section.port)] if section.port else []
    exported = dict(cluster.environment) | ({"GRPO_INTERFACE": cluster.interface} if cluster.interface else {})
    script = "\n".join(
        [
            "set -e",
            *([f"cd {shell([section.working_dir])}"] if section.working_dir else []),
            *(f"export {name}={shell([value])}" for name, value in exported.items()),
            *cluster.setup,
            f"{cluster.python} -m grpo_dist.doctor.machine",
        ]
    )
    hosts = [host for _, group in cluster.roles.groups() for host in group.hosts]

    def ask(host: str) -> subprocess.CompletedProcess[str]:
        target = f"{section.user}@{host}" if section.user else host
        return _run(["ssh", *options, target, "bash -s"], text=script, seconds=120)

    with ThreadPoolExecutor(HOSTS_AT_A_TIME) as pool:
        answers = list(pool.map(ask, hosts))
    for host, done in zip(hosts, answers, strict=True):
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            yield Row("fail", "host", f"cannot be asked: {last}", host)
            continue
        yield from (replace(row, node=host) for row in Look.from_dict(json.loads(found[-1])).rows)


def _run(words: Sequence[str], *, text: str = "", seconds: float = 30) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, input=text, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(words), 1, "", str(error))


def refuse_rendered_only(cluster: ClusterFile) -> None:
    """Raises UserError for back ends whose machines do not exist yet."""
    if cluster.backend in ("skypilot", "ray-up"):
        raise UserError(
            f"backend {cluster.backend}: its machines are made by another tool; run doctor on its head node"
        )


def rows_as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """For --json and for the job's log."""
    from dataclasses import asdict

    return {"ok": all(row.level != "fail" for row in rows), "rows": [asdict(row) for row in rows]}
