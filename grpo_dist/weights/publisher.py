"""One publication, seen from the driver: every live engine ends up with the same new weights, or somebody is named.

    stage (learners) ─► pause all engines ─► connect, if membership changed ─► send ─► resume all engines

Pure order and bookkeeping: what is done to engines and learners comes in as async functions. Engines are resumed only
after all of them hold whole, verified weights. After a failure they stay paused, the group counts as gone, and the next
``publish`` connects and sends everything again, to whoever lives then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, TypeVar

from grpo_dist.errors import GrpoDistError, PublicationError, WorkerLost
from grpo_dist.types import WeightUpdate

T = TypeVar("T")


class Endpoint(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str: ...


class Report(Protocol):
    """What the publisher reads of the sender's ``SendReport``."""

    @property
    def tensors(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def digests_ok(self) -> bool | None: ...
    @property
    def digest(self) -> str | None: ...


class Publisher:
    def __init__(
        self,
        *,
        endpoints: Callable[[], Sequence[Endpoint]],
        stage: Callable[[int], Awaitable[object]],
        pause: Callable[[Endpoint], Awaitable[object]],
        connect: Callable[[Sequence[Endpoint]], Awaitable[object]],
        send: Callable[[int, bool], Awaitable[Report]],
        resume: Callable[[Endpoint], Awaitable[float]],
        verify: Literal["always", "first", "sampled", "never"] = "always",
        verify_every: int = 10,
        limit_seconds: float = 600.0,
    ) -> None:
        """``send(version, verify)`` compares digests when asked to; ``resume`` returns how long an engine was paused.

        ``limit_seconds`` bounds a whole publication; the functions bound themselves too, and know better names.
        """
        self._endpoints, self._stage, self._pause, self._resume = endpoints, stage, pause, resume
        self._connect, self._send = connect, send
        self._verify, self._verify_every, self._limit = verify, verify_every, limit_seconds
        self._members: frozenset[tuple[str, str]] | None = None  # of the group that stands
        self._published = 0
        self.version: int | None = None  # newest that every engine has

    async def publish(self, version: int) -> WeightUpdate:
        """Bring all live engines to ``version``. Raises WorkerLost or PublicationError; see the top of this file."""
        began = time.monotonic()
        deadline = began + self._limit
        await _within(self._stage(version), deadline, "the learners did not stage the weights in time")
        return await self._deliver(version, self._endpoints(), began, deadline)

    async def catch_up(self, engines: Sequence[Endpoint], version: int) -> WeightUpdate:
        """Bring late engines to the newest staged weights. The others go on; the next publish connects all."""
        began = time.monotonic()
        return await self._deliver(version, engines, began, began + self._limit)

    async def _deliver(self, version: int, engines: Sequence[Endpoint], began: float, deadline: float) -> WeightUpdate:
        if not engines:
            raise PublicationError(f"no engine to publish version {version} to")
        staged = time.monotonic()
        await _on_all(self._pause, engines, deadline, "pause")
        members = frozenset((e.name, e.incarnation) for e in engines)
        names = ", ".join(e.name for e in engines)
        sending = time.monotonic()
        standing, self._members = self._members, None  # a failure anywhere below means: connect again
        if members != standing:
            await _within(self._connect(engines), deadline, f"the weight group with {names} was not made in time")
        check = self._verifies()
        report = await _within(self._send(version, check), deadline, f"sending to {names} did not end in time")
        sent = time.monotonic()
        paused = await _on_all(self._resume, engines, deadline, "resume")
        self._members, self.version = members, version
        self._published += 1
        return WeightUpdate(
            version=version,
            tensors=report.tensors,
            bytes=report.bytes,
            engines=len(engines),
            seconds=time.monotonic() - began,
            gather_seconds=staged - began,
            send_seconds=sent - sending,
            pause_seconds=max(paused),
            checksum_ok=report.digests_ok,
            digest=report.digest,
        )

    def _verifies(self) -> bool:
        if self._verify == "sampled":
            return self._published % self._verify_every == 0
        return self._verify == "always" or (self._verify == "first" and self._published == 0)


async def _within(call: Awaitable[T], deadline: float, otherwise: str) -> T:
    try:
        return await asyncio.wait_for(call, max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise PublicationError(otherwise) from None


async def _on_all(
    call: Callable[[Endpoint], Awaitable[T]], engines: Sequence[Endpoint], deadline: float, verb: str
) -> list[T]:
    """On all engines at once. The error names the engine."""

    async def one(engine: Endpoint) -> T:
        try:
            return await _within(call(engine), deadline, f"{engine.name} did not {verb} in time")
        except GrpoDistError:
            raise
        except Exception as error:  # Ray's errors are not known on this floor
            raise WorkerLost("rollout", engine.name, f"{verb} failed: {error}") from error

    answers = await asyncio.gather(*(one(engine) for engine in engines), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
