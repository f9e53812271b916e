"""Workers of one role that can each do the same job, and the one way to wait for a worker.

    pool.call("generate", request)  ->  the member with the least in flight  ->  answer, or a named WorkerLost

Which members exist is decided in ``reconcile.py``; a pool only hands out work.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from grpo_dist.errors import GrpoDistError, WorkerLost
from grpo_dist.fleet.placement import Reservation

PEERS_SECONDS = 3.0


@dataclass(slots=True)
class Member:
    """One living worker. ``info`` is what its ``ready()`` said of it."""

    role: str
    name: str
    actor: ActorHandle[Any]
    reservation: Reservation | None = None
    info: dict[str, Any] = field(default_factory=dict)
    in_flight: int = 0

    async def call(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Call a method of the worker and wait at most ``seconds``.

        Raises:
            WorkerLost: the worker died, or did not answer in time.
            Exception: whatever the method raised, as its own type.
        """
        self.in_flight += 1
        try:
            return await answer(getattr(self.actor, method).remote(*args, **kwargs), self, method, seconds)
        finally:
            self.in_flight -= 1

    def kill(self) -> None:
        """End the worker now and give its resources back. Ray ends the worker's whole process group."""
        ray.kill(self.actor)
        if self.reservation is not None:
            self.reservation.free()
            self.reservation = None


async def answer(ref: ray.ObjectRef[Any], member: Member, doing: str, seconds: float) -> Any:
    """The value of ``ref``, with Ray's errors turned into this package's."""
    future = asyncio.wrap_future(ref.future())
    done, _ = await asyncio.wait({future}, timeout=seconds)
    if not done:
        future.cancel()
        raise WorkerLost(member.role, member.name, f"no answer to {doing} within {seconds:g} s")
    try:
        return future.result()
    except RayActorError as error:
        raise WorkerLost(member.role, member.name, f"died during {doing}: {_ending(error)}") from None
    except RayTaskError as error:
        if isinstance(error.cause, GrpoDistError):
            raise error.cause from None
        raise


def _ending(error: Exception) -> str:
    """How the process ended, out of the page that Ray writes about it."""
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes| The process receives|$)", text)
    return (detail.group(1) if detail else text)[:200].rstrip(
        ". "
    ) + " (the worker's own output is in Ray's log folder)"


class Pool:
    """The living members of one role."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self.members)

    async def call(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Give one call to the member with the least in flight (the oldest of equals).

        Raises:
            WorkerLost: no member lives, or the chosen one was lost.
        """
        if not self.members:
            raise WorkerLost(self.role, "-", f"no {self.role} worker is alive to do {method}")
        member = min(self.members.values(), key=lambda m: m.in_flight)
        return await member.call(method, *args, seconds=seconds, **kwargs)

    async def all(self, method: str, *args: Any, seconds: float) -> dict[str, Any]:
        """Call every member at once; the answers by member name. The first failure is raised after all have ended."""
        return await gather_named(
            {name: m.call(method, *args, seconds=seconds) for name, m in self.members.items()},
        )


async def gather_named(calls: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """The results by name, or the most telling error: a lost worker before what its peers say of it.

    After the first error the others get a moment to say theirs, then they are cancelled: peers of a worker that died in
    a collective would never answer.
    """
    tasks = {name: asyncio.ensure_future(call) for name, call in calls.items()}
    try:
        _, waiting = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        if waiting:
            await asyncio.wait(waiting, timeout=PEERS_SECONDS)
    finally:
        for task in tasks.values():
            task.cancel()
    results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    errors = [r for r in results if isinstance(r, BaseException) and not isinstance(r, asyncio.CancelledError)]
    if errors:
        raise min(errors, key=_telling)
    return dict(zip(calls, results, strict=True))


def _telling(error: BaseException) -> int:
    if isinstance(error, WorkerLost):
        return 1 if "no answer" in error.why else 0
    return 2 if isinstance(error, GrpoDistError) else 3
