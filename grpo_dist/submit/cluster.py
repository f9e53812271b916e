"""The cluster file, typed: which machines, which roles on them, and how to get them. One shape for every back end.

    backend: local | ray | slurm | kubernetes | ssh       `submit` runs the recipe there
    backend: skypilot | ray-up                            rendered (`--dry-run`) for the tools that make a cluster
    roles:   head, learner, rollout, verifier             each with nodes of its own, or `on` those of another role

What a back end cannot do is refused (cluster_rules.py), with its reason: an accepted key works. Secrets appear by name.
Left out: growing a running job (`scale`). `min` and `max` bound what a cluster's autoscaler may do.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from grpo_dist.config import NonNegative, Positive, Section

Role = Literal["head", "learner", "rollout", "verifier"]
ROLES: tuple[Role, ...] = ("head", "learner", "rollout", "verifier")
Backend = Literal["local", "ray", "slurm", "kubernetes", "ssh", "skypilot", "ray-up"]
ROLE_LABEL = "grpo.dev/role"

_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(value: Any) -> int:
    """Bytes from 64Gi, 500G or a plain number."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]i?)?B?", str(value).strip())
    if not found or isinstance(value, bool | float):
        raise ValueError(f"wanted a size such as 64Gi, found {value!r}")
    return int(found[1]) * _UNITS[found[2] or ""]


def parse_seconds(value: Any) -> int:
    """Seconds from 90s, 30m, 24h, 2d or a plain number."""
    found = re.fullmatch(r"(\d+)\s*([smhd]?)", str(value).strip())
    if not found or isinstance(value, bool | float):
        raise ValueError(f"wanted a time such as 90s, 30m, 24h or 2d, found {value!r}")
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Seconds = Annotated[int, BeforeValidator(parse_seconds), Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=63)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class RoleSlurm(Section):
    """What only Slurm knows of a role's nodes."""

    partition: str | None = Field(None, description="Other partition than the job's.")
    constraint: str | None = Field(None, description="Node features.")
    options: tuple[str, ...] = Field((), description="More sbatch options of this component, e.g. --gres=gpu:h100:8.")


class RoleKubernetes(Section):
    """What only Kubernetes knows of a role's pods."""

    node_selector: dict[str, str] = Field({}, description="Labels the Kubernetes node must have.")
    tolerations: tuple[dict[str, Any], ...] = Field((), description="Taints the pods tolerate.")
    annotations: dict[str, str] = Field({}, description="Annotations of the pods.")


class RoleNodes(Section):
    """The machines of one role."""

    on: Role | None = Field(None, description="Live on the nodes of this other role instead of own ones.")
    nodes: Positive = Field(1, description="Nodes at the start.")
    min: NonNegative | None = Field(None, description="Least nodes; with max: an autoscaler may go down to it.")
    max: Positive | None = Field(None, description="Most nodes an autoscaler may start.")
    gpus: NonNegative = Field(0, description="GPUs of a node.")
    gpu_memory: Size | None = Field(None, description="Memory of one GPU, e.g. 79Gi: for `grpo-dist plan` only.")
    cpus: Positive | None = Field(None, description="CPU cores of a node that Ray may hand out.")
    memory: Size | None = Field(None, description="Memory of a node, e.g. 500Gi.")
    shared_memory: Size | None = Field(None, description="/dev/shm of a pod; by default a third of its memory.")
    object_store: Size | None = Field(None, description="Ray's object store of a node.")
    labels: dict[str, str] = Field({}, description="More Ray labels; with backend ray: the labels to look for.")
    hosts: tuple[str, ...] = Field((), description="ssh: the machines of this role; nodes follows from it.")
    instance: str | None = Field(None, description="ray-up: instance type; skypilot: GPU name, e.g. H100.")
    slurm: RoleSlurm = Field(RoleSlurm(), description="Slurm only.")
    kubernetes: RoleKubernetes = Field(RoleKubernetes(), description="Kubernetes only.")

    @model_validator(mode="after")
    def _whole(self) -> RoleNodes:
        if self.on is not None and (extra := sorted(self.model_fields_set - {"on"})):
            raise ValueError(f"{extra[0]} does not go with on: {self.on}; the nodes are described there")
        if self.hosts and "nodes" in self.model_fields_set and self.nodes != len(self.hosts):
            raise ValueError(f"nodes is {self.nodes}, but hosts has {len(self.hosts)}; leave nodes out")
        low = self.min if self.min is not None else self.count
        high = self.max if self.max is not None else self.count
        if not low <= self.count <= high:
            raise ValueError(f"nodes must lie between min and max, got min {low}, nodes {self.count}, max {high}")
        return self

    @property
    def count(self) -> int:
        return len(self.hosts) or self.nodes

    @property
    def elastic(self) -> bool:
        return (self.min is not None and self.min != self.count) or (self.max is not None and self.max != self.count)


class RolesSection(Section):
    """Who runs where. A role that is not given lives on the head."""

    head: RoleNodes = Field(RoleNodes(), description="Ray's head and the driver.")
    learner: RoleNodes = Field(RoleNodes(on="head"), description="ZeRO-3 ranks.")
    rollout: RoleNodes = Field(RoleNodes(on="head"), description="vLLM engines.")
    verifier: RoleNodes = Field(RoleNodes(on="head"), description="Verifiers.")

    @model_validator(mode="after")
    def _hosts(self) -> RolesSection:
        if self.head.on is None and (self.head.count != 1 or self.head.elastic):
            raise ValueError(f"head.nodes must be 1, got {self.head.count}; put further nodes into another role")
        for role in ROLES:
            seen: list[Role] = [role]
            while (host := self.of(seen[-1]).on) is not None:
                if host in seen:
                    raise ValueError(f"{role}.on leads to no nodes: {' on '.join([*seen, host])}")
                seen.append(host)
        return self

    def of(self, role: Role) -> RoleNodes:
        found: RoleNodes = getattr(self, role)
        return found

    def host_of(self, role: Role) -> Role:
        """The role on whose nodes this one lives; its name is the label of the nodes."""
        while (host := self.of(role).on) is not None:
            role = host
        return role

    def groups(self) -> list[tuple[Role, RoleNodes]]:
        """Roles with nodes of their own; the first node of the first one is the head."""
        own = [role for role in ROLES if self.of(role).on is None]
        own.sort(key=lambda role: role != self.host_of("head"))
        return [(role, self.of(role)) for role in own]

    def guests(self, host: Role) -> list[Role]:
        """Roles that live on these nodes, the host itself included."""
        return [role for role in ROLES if self.host_of(role) == host]


class PortsSection(Section):
    workers: NonNegative = Field(0, description="Size of a fixed port range for workers; 0: any free port.")
    gcs: Positive | None = Field(None, le=65535, description="Fixed port of the head; by default from the job's block.")


class VolumeClaim(Section):
    claim: str = Field(description="PersistentVolumeClaim, ReadWriteMany when roles span nodes.")
    path: PurePosixPath = Field(description="Where it is mounted in every pod.")


class StorageSection(Section):
    runs: PurePosixPath | None = Field(None, description="Folder of run folders as the nodes see it; replaces run.out.")
    volumes: tuple[VolumeClaim, ...] = Field((), description="Kubernetes: claims to mount.")

    @field_validator("runs")
    @classmethod
    def _absolute(cls, value: PurePosixPath | None) -> PurePosixPath | None:
        if value is not None and not value.is_absolute():
            raise ValueError(f"runs must be an absolute path on shared storage, got {value}")
        return value


class PreemptionSection(Section):
    requeue: bool = Field(True, description="A run that ends with 85 (saved) is queued again and resumes.")
    notice: Seconds = Field(300, description="Time before the limit at which the run is told to save.")
    grace: Seconds = Field(240, description="Time a run has to save when it is asked to stop.")
    retries: NonNegative = Field(3, description="Kubernetes: new clusters after a failed or preempted one.")


class RaySection(Section):
    """An existing cluster, reached through its dashboard."""

    address: str = Field(description="The dashboard, http://HOST:8265, directly or through a tunnel.")
    token: str | None = Field(None, description="File with its token; else RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.")
    authentication: Literal["token", "none"] = Field("token", description="'none' only for a cluster that has none.")
    working_dir: str | None = Field(None, description="Folder that is sent along (data, verifiers).")
    excludes: tuple[str, ...] = Field((), description="Patterns of files that are not sent.")
    upload_limit: Size = Field(100 << 20, description="Largest upload; the dashboard refuses more than 100Mi.")

    @field_validator("address")
    @classmethod
    def _url(cls, value: str) -> str:
        if not re.match(r"^https?://[^/\s]+$", value.rstrip("/")):
            raise ValueError(f"address must be the dashboard's http://HOST:PORT, got {value!r}")
        return value.rstrip("/")


class SlurmSection(Section):
    partition: str | None = Field(None, description="Partition.")
    account: str | None = Field(None, description="Account.")
    qos: str | None = Field(None, description="Quality of service.")
    reservation: str | None = Field(None, description="Reservation.")
    exclusive: bool = Field(True, description="Whole nodes. False: ports and Ray keep clear of neighbours.")
    options: tuple[str, ...] = Field((), description="More sbatch options, e.g. --mail-type=END.")
    srun: tuple[str, ...] = Field((), description="More srun options, e.g. --container-image=….")
    wrap: tuple[str, ...] = Field((), description="Before each node's command, e.g. [apptainer, exec, --nv, a.sif].")


class QueueSection(Section):
    scheduler: Literal["kueue", "volcano", "kai"] = Field(description="Who admits the pods of a run together.")
    name: str = Field(description="Queue.")


class KubernetesSection(Section):
    namespace: str = Field("default", description="Namespace.")
    context: str | None = Field(None, description="kubectl context.")
    secret: str = Field("grpo-secrets", description="Secret object with one entry per name in `secrets`.")
    service_account: str | None = Field(None, description="Of the pods.")
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = Field("IfNotPresent", description="Of the image.")
    pull_secrets: tuple[str, ...] = Field((), description="Registry credentials (Secret objects).")
    queue: QueueSection | None = Field(None, description="Gang scheduling.")
    keep: Seconds = Field(600, description="How long the finished cluster stays for a look.")
    gpu_resource: str = Field("nvidia.com/gpu", description="Name of the GPU resource.")
    run_as: NonNegative = Field(1000, description="User of the containers, not root.")

    @field_validator("run_as")
    @classmethod
    def _not_root(cls, value: int) -> int:
        if value == 0:
            raise ValueError("run_as must not be 0: the images run without root")
        return value


class SshSection(Section):
    user: str | None = Field(None, description="Login name; by default ssh's own.")
    port: Positive | None = Field(None, le=65535, description="Port; by default ssh's own.")
    options: tuple[str, ...] = Field((), description="More ssh options, e.g. -o StrictHostKeyChecking=accept-new.")
    working_dir: str | None = Field(None, description="Folder on the hosts to start in; by default as here.")


class CloudSection(Section):
    """For the tools that make a cluster: SkyPilot and `ray up`."""

    provider: str = Field(description="aws, gcp, azure, lambda, kubernetes, … (ray-up: aws, gcp, azure or local).")
    region: str | None = Field(None, description="Region.")
    spot: bool = Field(False, description="Preemptible machines.")
    disk: Size = Field(200 << 30, description="Disk of a node.")
    ssh_user: str = Field("ubuntu", description="ray-up: login name on the machines.")
    node_config: dict[str, dict[str, Any]] = Field({}, description="ray-up: role -> node_config, passed on.")


_OWN: dict[str, tuple[str, ...]] = {
    "ray": ("ray",), "slurm": ("slurm",), "kubernetes": ("kubernetes",), "ssh": ("ssh",), "local": (),
    "skypilot": ("cloud",), "ray-up": ("cloud",),
}  # fmt: skip


class ClusterFile(Section):
    """Machines for a run. `grpo-dist submit RECIPE --cluster FILE`."""

    backend: Backend = Field(description="Who provides the machines.")
    description: str = Field("", description="One line for people.")
    roles: RolesSection = Field(RolesSection(), description="Which role runs on which nodes.")
    image: str | None = Field(None, description="Container image with a fixed tag or digest.")
    python: str = Field("python", description="Interpreter on the nodes that has grpo_dist.")
    setup: tuple[str, ...] = Field((), description="Shell lines before anything runs on a node, e.g. module load cuda.")
    interface: str | None = Field(None, description="Interface, address or network between the nodes.")
    ports: PortsSection = Field(PortsSection(), description="Ports of Ray.")
    storage: StorageSection = Field(StorageSection(), description="Where runs are kept.")
    environment: dict[Variable, str] = Field({}, description="Environment of every node; no secrets.")
    secrets: tuple[Variable, ...] = Field((), description="Names of variables that must be set, e.g. WANDB_API_KEY.")
    time_limit: Seconds | None = Field(None, description="Longest run, e.g. 24h.")
    wait: Seconds = Field(600, description="How long the nodes may take to come together.")
    preemption: PreemptionSection = Field(PreemptionSection(), description="Losing the machines, with a warning.")
    ray: RaySection | None = Field(None, description="backend: ray.")
    slurm: SlurmSection = Field(SlurmSection(), description="backend: slurm.")
    kubernetes: KubernetesSection = Field(KubernetesSection(), description="backend: kubernetes.")
    ssh: SshSection = Field(SshSection(), description="backend: ssh.")
    cloud: CloudSection | None = Field(None, description="backend: skypilot or ray-up.")

    def sections_of_other_backends(self) -> list[str]:
        sections = {name for names in _OWN.values() for name in names}
        return sorted((sections & self.model_fields_set) - set(_OWN[self.backend]))
