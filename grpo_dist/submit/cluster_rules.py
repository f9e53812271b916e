"""What each back end can and cannot do with a cluster file, one sentence per refusal, and whether a recipe fits it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from grpo_dist.config import Recipe
from grpo_dist.submit.cluster import ClusterFile

_DNS_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_SECRET_VALUE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.I)


def backend_problems(cluster: ClusterFile) -> list[str]:
    """Every reason why this file cannot work with its back end; each begins with the key it is about."""
    problems = [
        f"{section}: does not go with backend: {cluster.backend}" for section in cluster.sections_of_other_backends()
    ]
    problems += _common(cluster)
    own: dict[str, Callable[[ClusterFile], list[str]]] = {
        "local": _local, "ray": _ray, "slurm": _slurm, "kubernetes": _kubernetes, "ssh": _ssh, "skypilot": _skypilot,
        "ray-up": _ray_up,
    }  # fmt: skip
    return problems + own[cluster.backend](cluster)


def _common(cluster: ClusterFile) -> list[str]:
    problems = []
    for name, value in cluster.environment.items():
        if _SECRET_VALUE.search(name) and value:
            problems.append(f"environment.{name}: looks like a secret; list its name under secrets instead")
    if both := sorted(set(cluster.environment) & set(cluster.secrets)):
        problems.append(f"secrets: {both[0]} is also under environment")
    for role, group in cluster.roles.groups():
        if group.elastic and cluster.backend not in ("kubernetes", "ray-up"):
            problems.append(
                f"roles.{role}.max: backend {cluster.backend} has a fixed number of nodes; min and max need an "
                "autoscaler (kubernetes, ray-up)"
            )
        if group.elastic and "learner" in cluster.roles.guests(role):
            problems.append(f"roles.{role}.max: the learner's nodes are fixed, all ranks start and end together")
        if group.hosts and cluster.backend != "ssh":
            problems.append(f"roles.{role}.hosts: only with backend: ssh")
        if group.instance and cluster.backend not in ("skypilot", "ray-up"):
            problems.append(f"roles.{role}.instance: only with backend: skypilot or ray-up")
        for name in ("slurm", "kubernetes"):
            if name in group.model_fields_set and cluster.backend != name:
                problems.append(f"roles.{role}.{name}: does not go with backend: {cluster.backend}")
    if cluster.storage.volumes and cluster.backend != "kubernetes":
        problems.append("storage.volumes: only with backend: kubernetes; elsewhere the file system is there already")
    if cluster.image and cluster.backend not in ("kubernetes", "skypilot", "ray-up"):
        problems.append(f"image: backend {cluster.backend} starts no containers (on Slurm: slurm.wrap or slurm.srun)")
    return problems


def _unused(cluster: ClusterFile, names: tuple[str, ...], why: str) -> list[str]:
    return [f"{name}: {why}" for name in names if name in cluster.model_fields_set]


def _local(cluster: ClusterFile) -> list[str]:
    return _unused(
        cluster, ("roles", "interface", "ports", "time_limit", "wait"),
        "backend local is this machine as it is, with a Ray of its own",
    )  # fmt: skip


def _ray(cluster: ClusterFile) -> list[str]:
    problems = _unused(
        cluster, ("interface", "ports", "setup", "time_limit", "environment"),
        "the nodes of an existing cluster are already up; set it where they are started",
    )  # fmt: skip
    if cluster.ray is None:
        problems.append("ray: missing; wanted ray.address, the dashboard of the cluster")
    for role, group in cluster.roles.groups():
        if extra := sorted(group.model_fields_set - {"labels"}):
            problems.append(f"roles.{role}.{extra[0]}: the nodes of an existing cluster are what they are; only labels")
    if cluster.storage.runs is None:
        problems.append("storage.runs: missing; wanted a folder that outlives the job and that every node sees")
    return problems


def _slurm(cluster: ClusterFile) -> list[str]:
    problems = []
    for role, group in cluster.roles.groups():
        if group.kubernetes.model_fields_set or group.shared_memory:
            problems.append(f"roles.{role}.shared_memory: Slurm nodes have the host's /dev/shm")
    if cluster.time_limit is not None and cluster.time_limit <= cluster.preemption.notice:
        problems.append(
            f"time_limit: {cluster.time_limit} s is not longer than preemption.notice = {cluster.preemption.notice} s"
        )
    if cluster.preemption.grace > cluster.preemption.notice:
        problems.append(
            f"preemption.grace: {cluster.preemption.grace} s to save do not fit into the notice of "
            f"{cluster.preemption.notice} s"
        )
    if "retries" in cluster.preemption.model_fields_set:
        problems.append("preemption.retries: only with backend: kubernetes")
    return problems


def _kubernetes(cluster: ClusterFile) -> list[str]:
    problems = _image(cluster) + _unused(cluster, ("setup", "interface", "ports"), "the pod's image and network decide")
    for role, group in cluster.roles.groups():
        if group.cpus is None or group.memory is None:
            key = "cpus" if group.cpus is None else "memory"
            problems.append(f"roles.{role}.{key}: missing; a pod must say what it needs")
        elif group.shared_memory is not None and group.shared_memory >= group.memory:
            problems.append(f"roles.{role}.shared_memory: counts against the pod's memory and must be smaller")
    if cluster.storage.runs is None:
        problems.append("storage.runs: missing; wanted a folder on one of storage.volumes")
    elif not any(cluster.storage.runs.is_relative_to(volume.path) for volume in cluster.storage.volumes):
        problems.append(
            f"storage.runs: {cluster.storage.runs} is on none of storage.volumes: it would die with the pod"
        )
    if not _DNS_NAME.match(cluster.kubernetes.namespace):
        problems.append(f"kubernetes.namespace: {cluster.kubernetes.namespace!r} is not a DNS label")
    elastic = [role for role, group in cluster.roles.groups() if group.elastic]
    queue = cluster.kubernetes.queue
    if elastic and queue is not None and queue.scheduler == "kueue":
        problems.append(
            f"roles.{elastic[0]}.max: Kueue admits RayJobs of fixed size only; use volcano, or no min and max"
        )
    if "notice" in cluster.preemption.model_fields_set or not cluster.preemption.requeue:
        key = "requeue" if not cluster.preemption.requeue else "notice"
        problems.append(f"preemption.{key}: only with backend: slurm; on Kubernetes set grace and retries")
    return problems


def _image(cluster: ClusterFile) -> list[str]:
    if cluster.image is None:
        return ["image: missing; wanted the image built from docker/Dockerfile, with its tag or digest"]
    tagged = ":" in cluster.image.rsplit("/", 1)[-1] and not cluster.image.endswith(":latest")
    if "@sha256:" not in cluster.image and not tagged:
        return [f"image: {cluster.image!r} needs a fixed tag or a digest: nodes that start later must get the same one"]
    return []


def _ssh(cluster: ClusterFile) -> list[str]:
    problems = []
    for role, group in cluster.roles.groups():
        if not group.hosts:
            problems.append(f"roles.{role}.hosts: missing; wanted the machines of this role")
        if group.memory or group.shared_memory:
            problems.append(f"roles.{role}.memory: the machines are what they are; leave it out")
    hosts = [host for _, group in cluster.roles.groups() for host in group.hosts]
    if doubled := sorted({host for host in hosts if hosts.count(host) > 1}):
        problems.append(f"roles: host {doubled[0]} is listed twice; a machine is one node, put roles on it with `on`")
    if cluster.time_limit is not None:
        problems.append("time_limit: nobody enforces it on plain hosts; leave it out")
    return problems


def _skypilot(cluster: ClusterFile) -> list[str]:
    problems = [] if cluster.cloud else ["cloud: missing; wanted cloud.provider"]
    shapes = {(group.gpus, group.instance, group.cpus, group.memory) for _, group in cluster.roles.groups()}
    if len(shapes) > 1:
        problems.append("roles: SkyPilot's nodes are all alike; every role needs the same gpus, cpus, memory, instance")
    if cluster.time_limit is not None:
        problems.append("time_limit: SkyPilot has none; use `sky autostop`")
    return problems


def _ray_up(cluster: ClusterFile) -> list[str]:
    if cluster.cloud is None:
        return ["cloud: missing; wanted cloud.provider"]
    if cluster.cloud.provider == "local" and len(cluster.roles.groups()) > 1:
        return ["roles: ray up on plain machines (provider local) has one node type only; use backend: ssh"]
    return []


# ---- does the recipe fit


def fit_problems(cluster: ClusterFile, recipe: Recipe) -> list[str]:
    """What the recipe wants beyond what the cluster file describes. Existing clusters are checked by the run itself."""
    if cluster.backend in ("local", "ray"):
        return []
    engines = recipe.rollout.workers * recipe.rollout.tensor_parallel
    gpus = {"learner": recipe.learner.ranks, "rollout": engines, "verifier": 0, "head": 0}
    cpus = {
        "learner": recipe.learner.ranks * recipe.learner.placement.cpus,
        "rollout": recipe.rollout.workers * recipe.rollout.placement.cpus,
        "verifier": recipe.verifiers.workers * recipe.verifiers.placement.cpus,
        "head": 0.0,
    }
    on_gpus = recipe.weights.backend == "nccl" or (
        recipe.weights.backend == "auto" and any(group.gpus for _, group in cluster.roles.groups())
    )
    problems = []
    for host, group in cluster.roles.groups():
        guests, nodes = cluster.roles.guests(host), max(group.count, group.max or 0)
        wanted = sum(gpus[role] for role in guests)
        shown = ", ".join(f"{role} {gpus[role]}" for role in guests if gpus[role])
        if on_gpus and wanted > nodes * group.gpus:
            problems.append(f"roles.{host}: {nodes} nodes x {group.gpus} GPUs, but the recipe wants {wanted} ({shown})")
        if on_gpus and "rollout" in guests and recipe.rollout.tensor_parallel > group.gpus:
            problems.append(
                f"roles.{host}.gpus: an engine (rollout.tensor_parallel = {recipe.rollout.tensor_parallel}) must fit "
                f"on a node of {group.gpus} GPUs"
            )
        asked = sum(cpus[role] for role in guests)
        if group.cpus is not None and asked > nodes * group.cpus:
            problems.append(f"roles.{host}: {nodes} nodes x {group.cpus} CPUs, but the recipe reserves {asked:g} there")
    return problems


def missing_secrets(cluster: ClusterFile, env: Mapping[str, str] = os.environ) -> list[str]:
    """Names whose value has to come from the submitter's environment, and does not."""
    if cluster.backend not in ("local", "slurm", "ssh"):
        return []  # they are in the nodes' environment, or in the scheduler's own store
    return [name for name in cluster.secrets if not env.get(name)]
