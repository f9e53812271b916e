"""Files for the tools that make a cluster: a SkyPilot task with the run inside, and a `ray up` configuration.

They are rendered (`submit --dry-run`), not submitted: the cloud is reached by the tool, with its own credentials.
After `ray up`, runs go to the new cluster through backend: ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import yaml

from grpo_dist.errors import UserError
from grpo_dist.submit.cluster import ClusterFile, RoleNodes
from grpo_dist.submit.plan import Submission, shell
from grpo_dist.submit.records import JobState, Record

GIB = 1 << 30
SKY_PORT = 12_379  # SkyPilot's own Ray holds 6380 and 8266
TOKEN = "GRPO_RAY_TOKEN"
SECRETS = "~/.grpo_secrets.env"


class RenderedOnly:
    """A back end that only renders."""

    def __init__(self, name: str, command: str, text: Callable[[Submission], str]) -> None:
        self._name, self._command, self._text = name, command, text

    def render(self, submission: Submission) -> str:
        return self._text(submission)

    def _elsewhere(self) -> UserError:
        return UserError(
            f"backend {self._name} is rendered for its own tool: grpo-dist submit … --dry-run > grpo.yaml, then "
            f"{self._command}"
        )

    def submit(self, submission: Submission, say: Callable[[str], None]) -> Record:
        raise self._elsewhere()

    def state(self, record: Record) -> JobState:
        raise self._elsewhere()

    def follow(self, record: Record, *, role: str | None, rank: int, follow: bool) -> Iterator[str]:
        raise self._elsewhere()

    def progress(self, record: Record) -> dict[str, Any] | None:
        raise self._elsewhere()

    def stop(self, record: Record, *, now: bool, say: Callable[[str], None]) -> None:
        raise self._elsewhere()


def _dump(submission: Submission, document: dict[str, Any]) -> str:
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)
    return f"# {submission.header}. Edit that file, not this one.\n{text}"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _block)


# ---- SkyPilot


def skypilot(submission: Submission) -> str:
    """One task over equal nodes; roles by SKYPILOT_NODE_RANK, rank 0 is the head and runs the recipe."""
    cluster = submission.loaded.cluster
    assert cluster.cloud is not None
    groups = cluster.roles.groups()
    first = groups[0][1]
    resources: dict[str, Any] = {"infra": cluster.cloud.provider, "disk_size": cluster.cloud.disk // GIB}
    if cluster.cloud.region:
        resources["infra"] = f"{cluster.cloud.provider}/{cluster.cloud.region}"
    if first.gpus:
        resources["accelerators"] = f"{first.instance or 'H100'}:{first.gpus}"
    if first.cpus is not None:
        resources["cpus"] = f"{first.cpus}+"
    if first.memory is not None:
        resources["memory"] = f"{first.memory // GIB}+"
    if cluster.image:
        resources["image_id"] = f"docker:{cluster.image}"
    if cluster.cloud.spot:
        resources["use_spot"] = True
    return _dump(
        submission,
        {
            "name": submission.id,
            "resources": resources,
            "num_nodes": sum(group.count for _, group in groups),
            "envs": {"RAY_USAGE_STATS_ENABLED": "0", **cluster.environment},
            # sky launch --secret GRPO_RAY_TOKEN …: one token per run, for instance from `openssl rand -hex 32`
            "secrets": {TOKEN: None, **dict.fromkeys(cluster.secrets)},
            "file_mounts": {},
            "setup": "\n".join(["set -e", *cluster.setup, f"{cluster.python} -c 'import grpo_dist'"]) + "\n",
            "run": _sky_run(submission),
        },
    )


def _sky_run(submission: Submission) -> str:
    cluster = submission.loaded.cluster
    groups = cluster.roles.groups()
    roles = ",".join(f"{role}:{group.count}" for role, group in groups)
    folder = str(submission.launch)
    node = [
        cluster.python, "-m", "grpo_dist.launch.node", "--folder", f"{folder}/attempt-0", "--roles", roles,
        "--gpus", str(groups[0][1].gpus), "--gcs-port", str(cluster.ports.gcs or SKY_PORT), "--wait", str(cluster.wait),
        "--grace", str(cluster.preemption.grace), "--port-key", submission.id, "--token", f"{folder}/ray_token",
    ]  # fmt: skip
    if cluster.interface:
        node += ["--interface", cluster.interface]
    lines = [
        "set -u",
        "umask 077",
        f"mkdir -p {shell([f'{folder}/attempt-0'])}",
        "# Each node keeps a copy in a file: the value in an environment would show.",
        f'printf %s "${TOKEN}" > {shell([f"{folder}/ray_token"])}',
        f"unset {TOKEN}",
        f"cat > {shell([f'{folder}/recipe.yaml'])} << 'RECIPE'",
        submission.recipe_text().rstrip(),
        "RECIPE",
        'head="$(printf %s "$SKYPILOT_NODE_IPS" | head -n 1)"',
        'me="$(printf %s "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")"',
        'names="$(printf %s "$SKYPILOT_NODE_IPS" | paste -sd, -)"',
        'if [ "$SKYPILOT_NODE_RANK" = 0 ]; then address=(); else',
        f'  address=(--head-address "$head:{cluster.ports.gcs or SKY_PORT}"); fi',
        f'exec {shell(node)} --name "$me" --expect "$names" --interface "$me" "${{address[@]}}" \\',
        f"  -- {shell(submission.entry(f'{folder}/recipe.yaml'))}",
    ]
    if cluster.interface:
        lines[-2] = lines[-2].replace(' --interface "$me"', "")
    return "\n".join(lines) + "\n"


# ---- ray up


def ray_up(submission: Submission) -> str:
    """A cluster of role-labelled node types with the autoscaler; the recipe is submitted to it afterwards."""
    cluster = submission.loaded.cluster
    assert cluster.cloud is not None
    groups = cluster.roles.groups()
    types: dict[str, Any] = {}
    for number, (role, group) in enumerate(groups):
        at_start = group.min if group.min is not None else group.count
        is_head = number == 0
        types[role] = _node_type(cluster, role, group)
        types[role]["min_workers"] = at_start - is_head
        types[role]["max_workers"] = (group.max or group.count) - is_head
    provider: dict[str, Any] = {"type": cluster.cloud.provider}
    if cluster.cloud.region:
        provider["region"] = cluster.cloud.region
    document: dict[str, Any] = {
        "cluster_name": f"grpo-{cluster_name(submission)}",
        "max_workers": sum(kind["max_workers"] for kind in types.values()),
        "idle_timeout_minutes": 10,
        "provider": provider,
        "auth": {"ssh_user": cluster.cloud.ssh_user},
        # A token file made before `ray up`; Ray copies it to every node and keeps its mode.
        "file_mounts": {"~/.ray/auth_token": "~/.ray/auth_token"},
        "available_node_types": types,
        "head_node_type": groups[0][0],
        "setup_commands": [*cluster.setup, f"{cluster.python} -c 'import grpo_dist'"],
        "head_start_ray_commands": [_start(cluster, head=True)],
        "worker_start_ray_commands": [_start(cluster, head=False)],
    }
    if cluster.secrets:
        document["file_mounts"][SECRETS] = SECRETS  # NAME=value lines, mode 0600
    if cluster.image:
        shm = "--shm-size=16g --ulimit nofile=65536:65536"
        document["docker"] = {"image": cluster.image, "container_name": "grpo", "run_options": [shm]}
    return _dump(submission, document)


def cluster_name(submission: Submission) -> str:
    return submission.loaded.path.stem.replace("_", "-")


def _node_type(cluster: ClusterFile, role: str, group: RoleNodes) -> dict[str, Any]:
    assert cluster.cloud is not None
    node: dict[str, Any] = dict(cluster.cloud.node_config.get(role, {}))
    if group.instance:
        key = {"aws": "InstanceType", "gcp": "machineType", "azure": "azure_arm_parameters"}.get(cluster.cloud.provider)
        if key == "azure_arm_parameters":
            node[key] = {"vmSize": group.instance, **node.get(key, {})}
        elif key:
            node.setdefault(key, group.instance)
    resources: dict[str, int] = {}
    if group.cpus is not None:
        resources["CPU"] = group.cpus
    if group.gpus:
        resources["GPU"] = group.gpus
    if group.memory is not None:
        resources["memory"] = group.memory
    return {"node_config": node, "resources": resources, "labels": {"grpo.dev/role": role, **group.labels}}


def _start(cluster: ClusterFile, *, head: bool) -> str:
    """Ray's default commands leave authentication off and begin with `ray stop`, which ends every Ray of the user."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", **cluster.environment}
    exports = " ".join(f"{name}={shell([value])}" for name, value in variables.items())
    common = (
        "chmod 600 ~/.ray/auth_token; ulimit -n 65536; "
        f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.ray/auth_token {exports};"
    )
    if cluster.secrets:
        common += f" set -a; . {SECRETS}; set +a;"
    if head:
        options = "--head --port=6379 --dashboard-host=0.0.0.0 --autoscaling-config=~/ray_bootstrap_config.yaml"
        return f"{common} RAY_enable_autoscaler_v2=1 ray start {options}"
    return f"{common} ray start --address=$RAY_HEAD_IP:6379"
