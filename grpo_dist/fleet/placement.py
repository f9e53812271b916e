"""Where workers go: what a role asks of the cluster, whether the cluster has it, and the reservation itself.

    bundles of every worker ─► first-fit over the nodes' free resources ─► placement groups
                                      │ does not fit
                                      └─► one message: wanted, available by node (never a silent wait)

Ray lets an unsatisfiable placement group wait for ever without a word, so the fit is computed here first. On a cluster
that may grow (one that was joined, not started here) the fit is tried again until the limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_dist.config import PlacementSection
from grpo_dist.errors import UserError

Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one worker needs on one node."""

    role: str
    resources: tuple[tuple[str, float], ...]
    labels: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, role: str, placement: PlacementSection, gpus: float = 0) -> Bundle:
        resources = {"CPU": placement.cpus, **placement.resources} | ({"GPU": float(gpus)} if gpus else {})
        return cls(role, tuple(sorted(resources.items())), tuple(sorted(placement.labels.items())))


@dataclass(frozen=True, slots=True)
class Node:
    """A living node and what is free on it."""

    name: str
    free: Resources
    labels: dict[str, str]


def first_misfit(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> Bundle | None:
    """The first bundle that finds no node when all are placed first-fit, largest first; None when all fit."""
    free = [dict(node.free) for node in nodes]
    by_size = sorted(bundles, key=lambda b: sorted(b.resources, key=lambda r: -r[1]), reverse=True)
    for bundle in sorted(by_size, key=lambda b: -sum(v for k, v in b.resources if k == "GPU")):
        for node, left in zip(nodes, free, strict=True):
            labelled = all(node.labels.get(k) == v for k, v in bundle.labels)
            if labelled and all(left.get(k, 0.0) + 1e-6 >= v for k, v in bundle.resources):
                for k, v in bundle.resources:
                    left[k] -= v
                break
        else:
            return bundle
    return None


def describe_misfit(bundles: Sequence[Bundle], nodes: Sequence[Node], misfit: Bundle) -> str:
    """Wanted and available, in one message."""

    def amounts(pairs: Sequence[tuple[str, float]]) -> str:
        return ", ".join(f"{v:g} {k}" for k, v in pairs) or "nothing"

    wanted: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        wanted.setdefault(bundle.role, []).append(bundle)
    lines = [f"the cluster cannot hold this run: no node has room for one more {misfit.role} worker"]
    for role, members in wanted.items():
        labels = "".join(f" on nodes labelled {k}={v}" for k, v in members[0].labels)
        lines.append(f"  wanted     {role}: {len(members)} x ({amounts(members[0].resources)}){labels}")
    for node in nodes:
        shown = [(k, v) for k, v in sorted(node.free.items()) if not k.startswith(("node:", "memory", "object_store"))]
        labels = "".join(f" {k}={v}" for k, v in sorted(node.labels.items()) if not k.startswith("ray.io/"))
        lines.append(f"  available  {node.name}: {amounts(shown)}{labels}")
    if not nodes:
        lines.append("  available  no living node")
    return "\n".join(lines)


def living_nodes() -> list[Node]:
    """Living nodes with their free resources, from Ray's tables."""
    free: dict[str, Resources] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            name=n["NodeManagerAddress"],
            free=free.get(n["NodeID"], {}),
            labels={str(k): str(v) for k, v in (n.get("Labels") or {}).items()},
        )
        for n in ray.nodes()  # type: ignore[no-untyped-call]
        if n["Alive"]
    ]


async def wait_until_fits(bundles: Sequence[Bundle], *, seconds: float, tell: Callable[[str], None]) -> None:
    """Return once every bundle fits.

    Raises:
        UserError: it does not within ``seconds`` (0: look once); says what was wanted and what each node has.
    """
    deadline = time.monotonic() + seconds
    told = False
    while (misfit := first_misfit(bundles, nodes := living_nodes())) is not None:
        message = describe_misfit(bundles, nodes, misfit)
        if time.monotonic() >= deadline:
            raise UserError(message + (f"\n  waited {seconds:g} s for more nodes" if seconds else ""))
        if not told:
            tell(f"{message}\n  waiting up to {seconds:g} s for more nodes")
            told = True
        await asyncio.sleep(1)


class Reservation:
    """One placement group: bundles that are granted together or not at all."""

    def __init__(self, bundles: Sequence[Bundle], strategy: str) -> None:
        self.bundles = tuple(bundles)
        selectors = [dict(b.labels) for b in bundles]
        self.group: PlacementGroup = placement_group(
            [dict(b.resources) for b in bundles],
            strategy=strategy,
            bundle_label_selector=selectors if any(selectors) else None,
        )

    async def granted(self, seconds: float) -> None:
        """Wait for the grant.

        Raises:
            UserError: not granted within ``seconds`` although the resources looked free.
        """
        ready = self.group.ready()
        try:
            await asyncio.wait_for(asyncio.wrap_future(ready.future()), seconds)
        except asyncio.CancelledError:
            self.free()
            raise
        except TimeoutError:
            nodes = living_nodes()
            self.free()
            raise UserError(
                f"Ray did not grant {len(self.bundles)} {self.bundles[0].role} bundle(s) within {seconds:g} s\n"
                + describe_misfit(self.bundles, nodes, self.bundles[0])
            ) from None

    def options(self, index: int) -> dict[str, Any]:
        """Ray actor options that put an actor into bundle ``index`` with all of its resources."""
        resources = dict(self.bundles[index].resources)
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
            ),
        }

    def free(self) -> None:
        remove_placement_group(self.group)
