"""What KubeRay's operator refuses beyond its definitions (validation.go of v1.7.0), checked offline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CRDS = Path("/work/shared/kuberay-crds/v1.7.0")
_DNS_1035 = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


def strict_schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a definition's v1, unknown keys refused, keys with a default not required."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load((CRDS / f"ray.io_{kind}.yaml").read_text(), Loader=loader)
    (v1,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    schema: dict[str, Any] = _strict(v1["schema"]["openAPIV3Schema"])
    return schema


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    out = {key: _strict(value) for key, value in node.items() if key not in ("nullable", "format", "default")}
    if out.get("x-kubernetes-int-or-string"):
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    properties = node.get("properties")
    if isinstance(properties, dict) and "type" in node:
        if not node.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in node:
            out["additionalProperties"] = False
        if "required" in node:
            out["required"] = [key for key in node["required"] if "default" not in properties.get(key, {})]
    return out


def operator_problems(rayjob: dict[str, Any]) -> Iterator[str]:
    spec, name = rayjob["spec"], rayjob["metadata"]["name"]
    cluster = spec["rayClusterSpec"]
    if len(name) > 47 or not _DNS_1035.match(name):
        yield f"name {name!r}"
    if spec.get("ttlSecondsAfterFinished", 0) > 0 and not spec.get("shutdownAfterJobFinishes"):
        yield "ttl without shutdown"
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "suspend without shutdown"
    if spec.get("backoffLimit", 0) > 0 and (
        "clusterSelector" in spec or spec.get("submissionMode") == "InteractiveMode"
    ):
        yield "backoffLimit with clusterSelector or InteractiveMode"
    if spec.get("submissionMode") == "SidecarMode":
        for key in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
            if key in spec:
                yield f"SidecarMode with {key}"
        if cluster["headGroupSpec"]["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "SidecarMode: head restartPolicy"
    for key in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if key in spec and spec[key] <= 0:
            yield key
    yield from _cluster_problems(cluster)


def _cluster_problems(cluster: dict[str, Any]) -> Iterator[str]:
    version = tuple(int(part) for part in str(cluster.get("rayVersion", "0")).split(".")[:2])
    auth = cluster.get("authOptions", {})
    if auth.get("mode") == "token" and version < (2, 52):
        yield "token needs rayVersion >= 2.52"
    if auth.get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth does not go with RayJob"
    autoscaling = cluster.get("enableInTreeAutoscaling", False)
    v2 = cluster.get("autoscalerOptions", {}).get("version") == "v2"
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    names = [group.get("groupName") for group in groups[1:]]
    if len(set(names)) != len(names):
        yield "group name twice"
    for group in groups:
        start = group.get("rayStartParams", {})
        if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & set(start):
            yield "resources in rayStartParams and in the group"
        if "labels" in start:
            yield "labels in rayStartParams"
        if any(key.startswith("ray.io/") for key in group.get("labels", {})):
            yield "a ray.io/ label of one's own"
        if v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "autoscaler v2: restartPolicy"
    for group in groups[1:]:
        low, high, want = group.get("minReplicas"), group.get("maxReplicas"), group.get("replicas")
        if low is None or high is None or low > high:
            yield f"{group['groupName']}: min {low} max {high}"
        elif want is not None and not low <= want <= high:
            yield f"{group['groupName']}: replicas {want} not in {low}..{high}"
        if group.get("idleTimeoutSeconds") is not None and not (autoscaling and v2):
            yield "idleTimeoutSeconds without autoscaler v2"
