"""A KubeRay RayJob for a submission: the recipe in a ConfigMap, a worker group per role, one token per run.

    head pod      Ray's head, driver and submitter (SidecarMode); carries no training unless roles live on the head
    group/role    pods labelled grpo.dev/role, with GPUs, /dev/shm in memory, storage claims, a drain before they go

What the operator does not do is set here: time to save before a pod ends (preStop asks the run, grace period), /dev/shm
in memory. A retry (backoffLimit) builds a new cluster; the run resumes from its checkpoint on the claim.
Left out: scaling a live RayJob by editing it (the operator ignores edits of its cluster); Redis for the head's state.
"""

from __future__ import annotations

from typing import Any

import yaml

from grpo_dist.submit.cluster import ClusterFile, Role, RoleNodes
from grpo_dist.submit.plan import Submission, ray_version, shell

RECIPE_FOLDER = "/etc/grpo"
SLACK = 30  # seconds of the grace period left for Ray itself after the run has saved
_QUEUE_LABEL = {"kueue": "kueue.x-k8s.io/queue-name", "volcano": "volcano.sh/queue-name", "kai": "kai.scheduler/queue"}


def manifests(submission: Submission) -> list[dict[str, Any]]:
    """Everything that is applied, in order."""
    return [_config_map(submission), _ray_job(submission)]


def render(submission: Submission) -> str:
    documents = "---\n".join(
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120) for document in manifests(submission)
    )
    return f"# {submission.header}. Edit that file, not this one.\n{documents}"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # every pod is written out: kubectl diff and people read it


def _str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _str)


def _metadata(submission: Submission) -> dict[str, Any]:
    cluster = submission.loaded.cluster
    labels = {"app.kubernetes.io/managed-by": "grpo-dist", "grpo.dev/submission": submission.id}
    if cluster.kubernetes.queue is not None:
        labels[_QUEUE_LABEL[cluster.kubernetes.queue.scheduler]] = cluster.kubernetes.queue.name
    return {
        "name": submission.id,
        "namespace": cluster.kubernetes.namespace,
        "labels": labels,
        "annotations": {"grpo.dev/cluster-file-hash": submission.loaded.hash},
    }


def _config_map(submission: Submission) -> dict[str, Any]:
    metadata = _metadata(submission)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "labels": {k: v for k, v in metadata["labels"].items() if "queue" not in k}},
        "data": {"recipe.yaml": submission.recipe_text()},
    }


def _ray_job(submission: Submission) -> dict[str, Any]:
    cluster = submission.loaded.cluster
    spec: dict[str, Any] = {
        "entrypoint": shell(submission.entry(f"{RECIPE_FOLDER}/recipe.yaml")),
        "submissionMode": "SidecarMode",  # a submitter pod of its own can lose its connection to a long run
        "backoffLimit": cluster.preemption.retries,
        "preRunningDeadlineSeconds": cluster.wait,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": cluster.kubernetes.keep,
        "metadata": {"grpo_kind": "train", "grpo_run": submission.run, "grpo_submission": submission.id},
        "runtimeEnvYAML": yaml.safe_dump({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(cluster.preemption.grace)}}),
        "rayClusterSpec": _ray_cluster(submission),
    }
    if cluster.time_limit is not None:
        spec["activeDeadlineSeconds"] = cluster.time_limit
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(submission), "spec": spec}


def _ray_cluster(submission: Submission) -> dict[str, Any]:
    cluster = submission.loaded.cluster
    (head_role, head), *others = cluster.roles.groups()
    spec: dict[str, Any] = {
        "rayVersion": ray_version(),
        "authOptions": {"mode": "token"},  # the operator makes a token for this cluster alone, and hands it to the pods
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            "resources": _ray_resources(head),
            "labels": {"grpo.dev/role": head_role, **head.labels},
            "template": _pod(submission, head_role, head, is_head=True),
        },
    }
    groups = [(role, group, group.count) for role, group in others]
    if head.count > 1:  # the head is the first node of its role; the others are ordinary pods
        groups.insert(0, (head_role, head, head.count - 1))
    spec["workerGroupSpecs"] = [_worker_group(submission, role, group, count) for role, group, count in groups]
    if any(group.elastic for _, group in cluster.roles.groups()):
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": 600}
    return spec


def _worker_group(submission: Submission, role: Role, group: RoleNodes, count: int) -> dict[str, Any]:
    return {
        "groupName": role,
        "replicas": count,
        "minReplicas": group.min if group.min is not None else count,
        "maxReplicas": group.max if group.max is not None else count,
        "rayStartParams": {},
        "resources": _ray_resources(group),
        "labels": {"grpo.dev/role": role, **group.labels},
        "template": _pod(submission, role, group, is_head=False),
    }


def _ray_resources(group: RoleNodes) -> dict[str, str]:
    """What Ray may hand out, said once, here: not also in rayStartParams."""
    resources = {"CPU": str(group.cpus), "memory": str(group.memory)}
    return resources | ({"GPU": str(group.gpus)} if group.gpus else {})


def _pod(submission: Submission, role: Role, group: RoleNodes, *, is_head: bool) -> dict[str, Any]:
    cluster = submission.loaded.cluster
    kubernetes = cluster.kubernetes
    grace = cluster.preemption.grace + SLACK
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # a new pod, not an old one with half a state
        "terminationGracePeriodSeconds": grace + SLACK,
        "securityContext": {"runAsNonRoot": True, "runAsUser": kubernetes.run_as, "fsGroup": kubernetes.run_as},
        "containers": [_container(submission, group, is_head=is_head)],
        "volumes": _volumes(cluster, submission, group),
    }
    if kubernetes.service_account:
        spec["serviceAccountName"] = kubernetes.service_account
    if kubernetes.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.pull_secrets]
    if group.kubernetes.node_selector:
        spec["nodeSelector"] = dict(group.kubernetes.node_selector)
    if group.kubernetes.tolerations:
        spec["tolerations"] = [dict(one) for one in group.kubernetes.tolerations]
    metadata: dict[str, Any] = {"labels": {"grpo.dev/submission": submission.id, "grpo.dev/role": role}}
    if group.kubernetes.annotations:
        metadata["annotations"] = dict(group.kubernetes.annotations)
    return {"metadata": metadata, "spec": spec}


def _container(submission: Submission, group: RoleNodes, *, is_head: bool) -> dict[str, Any]:
    cluster = submission.loaded.cluster
    amounts = {"cpu": str(group.cpus), "memory": str(group.memory)}
    if group.gpus:
        amounts[cluster.kubernetes.gpu_resource] = str(group.gpus)
    container: dict[str, Any] = {
        "name": "ray-head" if is_head else "ray-worker",
        "image": cluster.image,
        "imagePullPolicy": cluster.kubernetes.pull_policy,
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "env": _environment(cluster),
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
            {"name": "dshm", "mountPath": "/dev/shm"},
            *({"name": v.claim, "mountPath": str(v.path)} for v in cluster.storage.volumes),
        ],
    }
    if is_head:
        save = [
            cluster.python, "-m", "grpo_dist.launch.driver", "--marks", str(submission.launch), "--signal", "USR1",
            "--wait", str(cluster.preemption.grace),
        ]  # fmt: skip
        container["lifecycle"] = {"preStop": {"exec": {"command": save}}}
    return container


def _environment(cluster: ClusterFile) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        {"name": "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "value": "0"},
        {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": str(cluster.preemption.grace)},
        *({"name": name, "value": value} for name, value in cluster.environment.items()),
    ]
    for name in cluster.secrets:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": cluster.kubernetes.secret, "key": name}}})
    return env


def _volumes(cluster: ClusterFile, submission: Submission, group: RoleNodes) -> list[dict[str, Any]]:
    assert group.memory is not None
    shared = group.shared_memory or group.memory // 3
    return [
        {"name": "recipe", "configMap": {"name": submission.id}},
        # Ray's object store, NCCL and vLLM need more than a container's 64 MB; it counts against the pod's memory.
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": str(shared)}},
        *({"name": v.claim, "persistentVolumeClaim": {"claimName": v.claim}} for v in cluster.storage.volumes),
    ]
