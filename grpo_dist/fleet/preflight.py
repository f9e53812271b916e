"""Can the workers of this run talk to each other at all? Asked where they will live, before any model loads.

    a probe per learner rank and per engine, placed as the workers will be
      ─► who reaches whom (plain connections) ─► learner ranks: all-reduce ─► rank 0 to the engines: broadcast

A firewall or a wrong interface costs a minute here instead of a hang after the models have loaded. Every step has a
limit and names who did not answer, or whom it does not reach. Only for clusters of more than one node.
Left out: bandwidth floors (the numbers are told, nobody judges them), and vLLM's own NCCL wrapper.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError

from grpo_dist.config import FaultsSection
from grpo_dist.errors import GrpoDistError
from grpo_dist.fleet.placement import Bundle, Reservation
from grpo_dist.learner.rank import actor_environment, node_address, use_node_interface

BYTES = 32 << 20  # of one timed collective
REACH_SECONDS = 5.0  # for a connection between two nodes
COMPARED = ("grpo-dist", "ray", "torch", "transformers")  # packages that must not differ between nodes


class Probe:
    """Stands where a worker will stand. Its methods run in a Ray actor, one at a time."""

    def facts(self) -> dict[str, Any]:
        """Who this is, and where it can be called. What takes long to load is loaded here, before clocks run."""
        use_node_interface()
        import torch.distributed  # noqa: F401

        self._listening = socket.create_server(("", 0))
        threading.Thread(target=self._answer, daemon=True).start()
        return {
            "host": socket.gethostname(), "ip": node_address(), "port": self._listening.getsockname()[1],
            "free_ports": _free_ports(2), "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "versions": {name: version(name) for name in COMPARED},
        }  # fmt: skip

    def reach(self, others: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Name -> why, for every one that does not answer."""
        failed = {}
        for name, place in others.items():
            try:
                socket.create_connection(place, timeout=REACH_SECONDS).close()
            except OSError as error:
                failed[name] = str(error)
        return failed

    def collective(self, kind: Literal["all-reduce", "broadcast"], group: Group) -> float:
        """Joins the group, does one checked collective and leaves; bytes per second."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        device = torch.device("cuda:0" if group.backend == "nccl" else "cpu")
        dist.init_process_group(
            group.backend, init_method=f"tcp://{group.host}:{group.port}", rank=group.rank, world_size=group.world,
            timeout=timedelta(seconds=group.seconds),
        )  # fmt: skip
        pattern = torch.arange(BYTES // 4, device=device, dtype=torch.int32)

        def once() -> float:
            mine = kind == "all-reduce" or group.rank == 0
            value = pattern.clone() if mine else torch.zeros_like(pattern)
            began = time.monotonic()
            if kind == "all-reduce":
                dist.all_reduce(value)
            else:
                dist.broadcast(value, 0)
            if group.backend == "nccl":
                torch.cuda.synchronize()
            seconds = time.monotonic() - began
            wanted = pattern * group.world if kind == "all-reduce" else pattern  # wraps around as the sum does
            if not torch.equal(value, wanted):
                raise GrpoDistError(f"the {kind} gave other numbers than were sent")
            return seconds

        once()  # makes the connections
        seconds = once()
        dist.destroy_process_group()
        return BYTES / seconds

    def _answer(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            connection.close()


def _free_ports(count: int) -> list[int]:
    found = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in found]
    for one in found:
        one.close()
    return ports


@dataclass(frozen=True, slots=True)
class Group:
    """One member's view of a process group."""

    backend: str
    host: str
    port: int
    rank: int
    world: int
    seconds: float


@dataclass(slots=True)
class Place:
    """A probe as the driver sees it."""

    name: str
    actor: Any
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f"{self.facts['host']}, {self.facts['ip']}" if self.facts else "place unknown"
        return f"{self.name} ({where})"


async def preflight(
    bundles: Mapping[str, Bundle], sizes: Mapping[str, int], *, backend: Literal["nccl", "gloo"],
    limits: FaultsSection, tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Raises GrpoDistError, naming who is missing or does not reach whom, when a step fails or takes too long."""
    learners, engines = sizes["learner"], sizes["rollout"]
    seconds = limits.preflight_seconds
    held = [Reservation([bundles["learner"]] * learners, "PACK")]
    held += [Reservation([bundles["rollout"]], "PACK") for _ in range(engines)]
    environment = actor_environment("cuda" if backend == "nccl" else "cpu")
    probes: list[Place] = []

    def probe(name: str, reservation: Reservation, index: int) -> Place:
        options = reservation.options(index)
        actor = ray.remote(Probe).options(runtime_env={"env_vars": environment}, max_restarts=0, **options).remote()
        return Place(name, actor)

    try:
        for reservation in held:
            await reservation.granted(limits.placement_seconds)
        probes += [probe(f"learner-{rank}", held[0], rank) for rank in range(learners)]
        probes += [probe(f"rollout-{number}", one, 0) for number, one in enumerate(held[1:])]
        tell(f"preflight: {learners} learner ranks and {engines} engines, before models load")
        facts = await _ask(probes, "facts", [()] * len(probes), "starting a probe", limits.start_seconds)
        for one, said in zip(probes, facts, strict=True):
            one.facts = said
        if differing := version_problems(probes):
            raise GrpoDistError("preflight: nodes have different versions\n" + "\n".join(differing))
        if len({one.facts["ip"] for one in probes}) == 1:
            return  # all of them found room on one node
        await _reach(probes, seconds)
        ranks, receivers = probes[:learners], [probes[0], *probes[learners:]]
        speeds = [
            f"{kind} {min(rates) / 1e9:.2g} GB/s"
            for number, (kind, members) in enumerate((("all-reduce", ranks), ("broadcast", receivers)))
            if len(members) > 1
            for rates in [await _collective(kind, members, number, backend, seconds)]
        ]
        nodes = sorted({str(one.facts["ip"]) for one in probes})
        tell(f"preflight: {len(nodes)} nodes talk to each other over {backend}: {', '.join(speeds)}")
    finally:
        for one in probes:
            ray.kill(one.actor)
        for reservation in held:
            reservation.free()


async def among(probes: Sequence[Place], *, backend: Literal["nccl", "gloo"], seconds: float) -> str:
    """Every probe to every other, and an all-reduce over all of them: for probes that somebody else has placed.

    Returns:
        One sentence. Raises GrpoDistError as `preflight` does.
    """
    facts = await _ask(probes, "facts", [()] * len(probes), "starting a probe", seconds)
    for one, said in zip(probes, facts, strict=True):
        one.facts = said
    await _reach(probes, seconds)
    rates = await _collective("all-reduce", probes, 0, backend, seconds)
    return f"{len(probes)} nodes reach each other; all-reduce over {backend} {min(rates) / 1e9:.2g} GB/s"


def version_problems(probes: Sequence[Place]) -> list[str]:
    """One line per probe whose packages differ from the first one's."""
    first = probes[0]
    lines = []
    for one in probes[1:]:
        pairs = [(k, first.facts["versions"][k], one.facts["versions"][k]) for k in COMPARED]
        if wrong := [f"{k} {theirs}, not {ours}" for k, ours, theirs in pairs if ours != theirs]:
            lines.append(f"  {one}: {'; '.join(wrong)} as {first}")
    return lines


def reach_problems(probes: Sequence[Place], found: Sequence[Mapping[str, str]]) -> list[str]:
    """One line per direction that does not work; a probe that nobody reaches gets one line in all."""
    by_name = {one.name: one for one in probes}
    cut_off = [
        name
        for name in by_name
        if all(name in said for one, said in zip(probes, found, strict=True) if one.name != name)
    ]
    lines = [f"  nobody reaches {by_name[name]}" for name in cut_off]
    for one, said in zip(probes, found, strict=True):
        lines += [f"  {one} does not reach {by_name[name]}: {why}" for name, why in said.items() if name not in cut_off]
    return lines


async def _reach(probes: Sequence[Place], seconds: float) -> None:
    places = {one.name: (one.facts["ip"], one.facts["port"]) for one in probes}
    calls = [({name: place for name, place in places.items() if name != one.name},) for one in probes]
    found = await _ask(probes, "reach", calls, "connecting to the others", seconds + REACH_SECONDS * len(probes))
    if lines := reach_problems(probes, found):
        raise GrpoDistError("preflight: nodes do not reach each other\n" + "\n".join(lines) + f"\n{ADVICE}")


async def _collective(kind: str, members: Sequence[Place], number: int, backend: str, seconds: float) -> list[float]:
    host, port = members[0].facts["ip"], members[0].facts["free_ports"][number]
    # The group's own limit is the shorter one: a member can say what it waited for.
    groups = [Group(backend, host, port, rank, len(members), 0.7 * seconds) for rank in range(len(members))]
    doing = f"{'an' if kind == 'all-reduce' else 'a'} {kind} over {backend}"
    return await _ask(members, "collective", [(kind, group) for group in groups], doing, seconds)


ADVICE = (
    "  look at: a firewall between these addresses (all ports must be open), `interface` in the cluster file, and "
    "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME in the nodes' environment"
)


async def _ask(
    probes: Sequence[Place], method: str, calls: Sequence[tuple[Any, ...]], doing: str, seconds: float
) -> list[Any]:
    """Every probe's answer, within the limit.

    Raises:
        GrpoDistError: who failed and why, who did not answer.
    """
    refs = [getattr(one.actor, method).remote(*words) for one, words in zip(probes, calls, strict=True)]
    futures = [asyncio.wrap_future(ref.future()) for ref in refs]
    await asyncio.wait(futures, timeout=seconds)
    lines, answers = [], []
    for one, future in zip(probes, futures, strict=True):
        if not future.done():
            future.cancel()
            lines.append(f"  {one}: no answer within {seconds:g} s{_through(one)}")
        elif error := future.exception():
            lines.append(f"  {one}: {_last_line(error)}{_through(one)}")
        else:
            answers.append(future.result())
    if lines:
        raise GrpoDistError(f"preflight: {doing} failed\n" + "\n".join(lines) + f"\n{ADVICE}")
    return answers


def _through(one: Place) -> str:
    name = one.facts.get("interface")
    return f" (GLOO_SOCKET_IFNAME={name})" if name else ""


def _last_line(error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return "its process died"
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().splitlines()[-1][:300] if str(cause).strip() else type(cause).__name__
