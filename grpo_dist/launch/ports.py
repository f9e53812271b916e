"""Which ports a Ray node uses, so that jobs and nodes that share a machine do not meet.

    (key, attempt) ─► a block of 16 service ports ─► tested by binding ─► the next block on a clash

Ray's defaults clash as soon as two clusters share a host, and two of them (44217, 44227) can only be moved by an
environment variable. Blocks lie between 12000 and 28000: above what services use, below what the kernel hands out to
outgoing connections (32768). Worker ports are left to the kernel unless a number is asked for (a firewall needs a
range): a port that the kernel gives is bound at once, a port from a list is probed, released and sometimes lost.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from grpo_dist.errors import GrpoDistError

FIRST, LAST = 12_000, 28_000  # half open
SERVICES = 16


@dataclass(frozen=True, slots=True)
class PortPlan:
    """The ports of one node. A node that is not the head leaves the first five unused."""

    gcs: int
    dashboard: int
    client: int
    autoscaler_metrics: int
    dashboard_metrics: int
    node_manager: int
    object_manager: int
    agent_http: int
    agent_grpc: int
    runtime_env: int
    metrics: int
    workers: tuple[int, int] | None  # first and last; None: the kernel chooses

    @property
    def services(self) -> tuple[int, ...]:
        return (
            self.gcs, self.dashboard, self.client, self.autoscaler_metrics, self.dashboard_metrics, self.node_manager,
            self.object_manager, self.agent_http, self.agent_grpc, self.runtime_env, self.metrics,
        )  # fmt: skip

    def arguments(self, *, head: bool) -> list[str]:
        """For `ray start`."""
        first, last = self.workers or (0, 0)
        both = [
            f"--node-manager-port={self.node_manager}", f"--object-manager-port={self.object_manager}",
            f"--dashboard-agent-listen-port={self.agent_http}", f"--dashboard-agent-grpc-port={self.agent_grpc}",
            f"--runtime-env-agent-port={self.runtime_env}", f"--metrics-export-port={self.metrics}",
            f"--min-worker-port={first}", f"--max-worker-port={last}",
        ]  # fmt: skip
        if not head:
            return both
        return [
            f"--port={self.gcs}", f"--dashboard-port={self.dashboard}", f"--ray-client-server-port={self.client}",
            *both,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """The two ports that no option moves."""
        return {
            "AUTOSCALER_METRIC_PORT": str(self.autoscaler_metrics),
            "DASHBOARD_METRIC_PORT": str(self.dashboard_metrics),
        }


def slots(worker_ports: int = 0) -> int:
    """How many blocks there are."""
    return (LAST - FIRST) // (SERVICES + worker_ports)


def block(key: int, attempt: int = 0, worker_ports: int = 0) -> PortPlan:
    """The ``attempt``-th choice of ``key``. Keys that differ modulo `slots` never share a port at the same attempt."""
    count = slots(worker_ports)
    if count < 1:
        raise ValueError(f"worker_ports must leave room for one block of {LAST - FIRST} ports, got {worker_ports}")
    stride = 307 if count % 307 else 311  # a prime that does not divide the count visits every slot
    base = FIRST + ((key + attempt * stride) % count) * (SERVICES + worker_ports)
    workers = (base + SERVICES, base + SERVICES + worker_ports - 1) if worker_ports else None
    p = range(base, base + 11)
    return PortPlan(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], workers)


def key_of(*parts: object) -> int:
    """A number from names (a job id and a node's place in the job), spread evenly over the slots."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:6])


def port_is_free(port: int, host: str = "0.0.0.0") -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free to listen on
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


def pick(key: int, worker_ports: int = 0, is_free: Callable[[int], bool] = port_is_free) -> PortPlan:
    """The first block of ``key`` whose ports are all free.

    Raises:
        GrpoDistError: none is.
    """
    taken: list[int] = []
    for attempt in range(slots(worker_ports)):
        plan = block(key, attempt, worker_ports)
        busy = [port for port in plan.services if not is_free(port)]
        if not busy:
            return plan
        taken += busy
    raise GrpoDistError(
        f"no block of {SERVICES} free ports between {FIRST} and {LAST}; in use among others: {taken[:8]}"
    )
