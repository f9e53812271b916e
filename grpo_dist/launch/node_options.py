"""The command line of a node runner (node.py), typed; what a scheduler tells by its variables is filled in."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_dist.errors import UserError


@dataclass
class NodeOptions:
    """The command line, typed. ``command`` is the head's."""

    folder: Path
    name: str
    role: str
    head: bool = False
    ray: bool = True
    expect: tuple[str, ...] = ()
    head_address: str | None = None
    interface: str | None = None
    cpus: float | None = None
    gpus: float | None = None
    object_store: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    token: Path | None = None
    wait: float = 600
    grace: float = 600
    port_key: str = ""
    gcs_port: int | None = None
    worker_ports: int = 0
    temp: Path | None = None
    command: tuple[str, ...] = ()


def role_at(roles: str, index: int) -> str:
    """The role of the node at ``index`` when ``roles`` is learner:2,rollout:4."""
    left = index
    for part in roles.split(","):
        role, _, count = part.partition(":")
        if left < int(count or 1):
            return role
        left -= int(count or 1)
    raise UserError(f"node {index} is one more than {roles} describes")


def _scheduler_index() -> int | None:
    for name in ("SLURM_PROCID", "SKYPILOT_NODE_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def _scheduler_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _scheduler_cpus() -> float | None:
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return float(granted) if granted.isdigit() else None


def parse(arguments: Sequence[str] | None = None) -> NodeOptions:
    parser = argparse.ArgumentParser(prog="grpo_dist.launch.node", description="Run one node of a cluster.")
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="folder of this attempt, on storage that every node shares")
    add("--name", default=_scheduler_name(), help="name of this node, unique in the cluster")
    add("--role", help="becomes the label grpo.dev/role")
    add("--roles", help="instead of --role: learner:2,rollout:4, of which --index picks; index 0 is the head")
    add("--index", type=int, default=_scheduler_index(), help="this node's place; by default the scheduler's")
    add("--head", action="store_true", help="this node is the head and runs COMMAND")
    add("--no-ray", action="store_true", help="run COMMAND only: it starts a Ray of its own")
    add("--expect", default="", help="head: names of all nodes, comma separated; waits for them")
    add("--head-address", help="others: HOST:PORT of the head, instead of reading cluster.json")
    add("--interface", help="network interface, address or network to use")
    add("--cpus", type=float, default=_scheduler_cpus(), help="by default what the scheduler granted, else all")
    add("--gpus", type=float)
    add("--object-store", type=int, help="bytes of Ray's object store")
    add("--label", action="append", default=[], help="more labels, key=value")
    add("--token", type=Path, help="token file; by default ray_token beside the folder")
    add("--wait", type=float, default=600, help="limit for the nodes to come together")
    add("--grace", type=float, default=600, help="seconds the run has to save when asked to stop")
    add("--port-key", default="", help="what the port block is derived from, such as the job id")
    add("--gcs-port", type=int, help="fixed port of the head")
    add("--worker-ports", type=int, default=0, help="size of a fixed range for workers; 0: any free port")
    add("--temp", type=Path, help="folder for Ray's session (short path)")
    add("command", nargs="*", help="head: the run, after --")
    one = parser.parse_args(arguments)
    if (one.role is None) == (one.roles is None):
        parser.error("wanted --role or --roles")
    if one.roles is not None:
        if one.index is None:
            parser.error("--roles needs --index")
        one.role, one.head = role_at(one.roles, one.index), one.index == 0
    if one.head and not one.command:
        parser.error("--head needs a COMMAND after --")
    return NodeOptions(
        folder=one.folder, name=one.name, role=one.role, head=one.head, ray=not one.no_ray,
        head_address=one.head_address,
        expect=tuple(filter(None, one.expect.split(","))), interface=one.interface, cpus=one.cpus, gpus=one.gpus,
        object_store=one.object_store, labels=dict(label.split("=", 1) for label in one.label), token=one.token,
        wait=one.wait, grace=one.grace, port_key=one.port_key, gcs_port=one.gcs_port, worker_ports=one.worker_ports,
        temp=one.temp, command=tuple(one.command),
    )  # fmt: skip
