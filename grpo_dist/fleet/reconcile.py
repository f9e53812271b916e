"""What is wanted against what lives: one mechanism for the first start, a lost worker and a change of size.

    Wanted(rollout=N, verifier=M)  ─┐
                                    ├─► difference ─► start the missing, end the surplus ─► they agree
    pools of living members        ─┘

A started worker joins its pool only when ``admit`` is through with it (an engine takes part after it holds the current
weights). The learner ranks are one indivisible group (ZeRO-3 has one copy of every shard), see ``learners.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.actor import ActorHandle

from grpo_dist.fleet.placement import Bundle, Reservation
from grpo_dist.fleet.pool import Member, Pool, gather_named


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """How a worker of a role comes into being."""

    role: str
    bundle: Bundle
    create: Callable[[str, dict[str, Any]], ActorHandle[Any]]  # (name, Ray options) -> actor
    start_seconds: float
    placement_seconds: float
    admit: Callable[[Member], Awaitable[None]] | None = None
    prefix: str | None = None  # of workers' names; by default the role


@dataclass(frozen=True, slots=True)
class Difference:
    """What must happen for a pool to have the wanted size."""

    start: tuple[str, ...]  # names of workers to start
    end: tuple[str, ...]  # names of workers to end


def difference(role: str, wanted: int, live: Sequence[str], started: int) -> Difference:
    """Pure: names for the missing workers (never a used name again), or the youngest of the surplus.

    ``started`` counts every worker of the role ever started, so that a replacement is told apart from its predecessor.
    """
    missing = max(0, wanted - len(live))
    surplus = max(0, len(live) - wanted)
    return Difference(
        start=tuple(f"{role}-{started + i}" for i in range(missing)),
        end=tuple(live[len(live) - surplus :]),
    )


class Reconciler:
    """Brings one pool to its wanted size."""

    def __init__(self, spec: RoleSpec, pool: Pool, event: Callable[..., None]) -> None:
        self.spec, self.pool, self._event = spec, pool, event
        self._started = 0
        self._turn = asyncio.Lock()

    async def reconcile(self, wanted: int) -> None:
        """Start what is missing, all at once, and end the surplus. One call at a time.

        Raises:
            WorkerLost: a worker did not become ready; everything that this call had started is ended again.
            UserError: the cluster did not grant its resources.
        """
        async with self._turn:
            await self._reconcile(wanted)

    async def _reconcile(self, wanted: int) -> None:
        todo = difference(self.spec.prefix or self.spec.role, wanted, list(self.pool.members), self._started)
        self._started += len(todo.start)
        for name in todo.end:
            self.pool.members.pop(name).kill()
            self._event(f"{_noun(self.spec.role)}_ended", worker=name)
        born: list[Member] = []
        try:
            await gather_named({name: self._start(name, born) for name in todo.start})
        except BaseException:
            for member in born:
                self.pool.members.pop(member.name, None)
                member.kill()
            raise

    async def _start(self, name: str, born: list[Member]) -> None:
        spec = self.spec
        reservation = Reservation([spec.bundle], "PACK")
        await reservation.granted(spec.placement_seconds)
        member = Member(spec.role, name, spec.create(name, reservation.options(0)), reservation)
        born.append(member)
        member.info = await member.call("ready", seconds=spec.start_seconds)
        if spec.admit is not None:
            await spec.admit(member)
        self.pool.members[name] = member
        self._event(f"{_noun(spec.role)}_started", worker=name, **_public(member.info))


def _noun(role: str) -> str:
    return "engine" if role == "rollout" else role


def _public(info: dict[str, Any]) -> dict[str, Any]:
    return {k: info[k] for k in ("node", "pid", "world_size") if k in info}


async def end_all(members: Sequence[Member], *, seconds: float) -> None:
    """Ask each worker to stop, wait a bounded time, then end whatever is left."""
    await asyncio.gather(*(m.call("stop", seconds=seconds) for m in members), return_exceptions=True)
    for member in members:
        member.kill()
