"""The bounded window of rollouts: how far generation may run ahead of learning.

    submit group i ──► generate ──► score ──► ready[i]          (each group on its own, any order of arrival)
    take(n)        ◄── the next n groups in SUBMISSION order
    release(n)     ──► n slots free ──► the next n groups are submitted
    replace(n)     ──► the same for groups that do not train: as many more are submitted in their stead

At most ``slots = (k + 1) x groups_per_step`` groups are submitted and not released. The driver releases a step's groups
only after the weights of that step are published, so a group that is trained in step s was submitted no earlier than
version s - 1 - k: the lag is bounded by k. Submission order is what makes this true; with completion order a slow
group could wait for ever while younger ones are trained.

A group that is dropped frees its slot at once: what is left in the window is trained no later than it was going to be.

Which group has which prompt and seed is a pure function of its id, given as ``request``; where groups are generated and
scored is unknown here: both are injected async functions. Ids of prompts that rest are passed over for good;
``decided`` and ``resting`` say which, so that a resumed run asks for the same groups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_dist.types import GroupRequest, RolloutGroup, ScoredGroup

Request = Callable[[int], GroupRequest]
Generate = Callable[[GroupRequest], Awaitable[RolloutGroup]]
Score = Callable[[RolloutGroup], Awaitable[ScoredGroup]]


@dataclass(frozen=True, slots=True)
class WindowStatus:
    """Groups in each stage right now, for the display and for messages of time-outs."""

    generating: int
    scoring: int
    ready: int
    taken: int


@dataclass(slots=True)
class WindowTimes:
    """Seconds since the last ``times()``: what ``take`` waited for, and how long engines had work."""

    rollout_wait: float = 0.0
    verify_wait: float = 0.0
    generating: float = 0.0  # at least one group was being generated


@dataclass(slots=True)
class _Group:
    task: asyncio.Task[ScoredGroup] | None
    stage: str = "generating"
    result: ScoredGroup | None = field(default=None)
    generated_at: float = 0.0  # monotonic; 0 until then


class RolloutPipeline:
    """Groups in flight, in submission order. One event loop owns it; it is not thread-safe."""

    def __init__(
        self,
        request: Request,
        generate: Generate,
        score: Score,
        *,
        slots: int,
        first: int = 0,
        most: int | None = None,
        buffered: Iterable[ScoredGroup] = (),
        rests: Callable[[int], bool] | None = None,
        decided: int = 0,
        resting: Iterable[int] = (),
    ) -> None:
        """Args:
            slots: groups that may be submitted and not released.
            first: the first group id not yet trained.
            most: how many groups may be submitted in all.
            buffered: groups finished by a former process: they take their slots without being sampled again.
            rests: whether a group id is passed over; asked once, when its turn comes.
            decided, resting: what a former process decided of the ids below ``decided``.

        Raises:
            ValueError: no slots, or a buffered group outside the window.
        """
        if slots < 1:
            raise ValueError(f"the rollout window needs at least one slot, got {slots}")
        self._request, self._generate, self._score = request, generate, score
        self._slots, self._next, self._left = slots, first, most
        self._rests, self._decided = rests, decided
        self._resting = {i for i in resting if i >= first}
        self._taken = 0
        self._window: dict[int, _Group] = {}
        self._failure: asyncio.Future[None] | None = None
        self._times = WindowTimes()
        self._generating = 0
        self._generating_since = 0.0
        self._buffered = {group.group_id: group for group in buffered}
        if outside := [i for i in self._buffered if not self._in_first_window(i)]:
            raise ValueError(f"buffered groups {outside} lie outside the window of {slots} groups from {first}")

    def start(self) -> None:
        """Fill the window. Call inside the event loop, after the first publication."""
        self._failure = asyncio.get_running_loop().create_future()
        self._fill()

    @property
    def next_group(self) -> int:
        """The first group id that has not been handed out by ``take``, nor passed over before that."""
        return next(iter(self._window), self._next)

    @property
    def decided(self) -> int:
        """Of every group id below it is settled whether it is sampled."""
        return max(self._next, self._decided)

    def resting(self, first: int) -> tuple[int, ...]:
        """The ids from ``first`` on that are passed over; those below are done and forgotten."""
        self._resting = {i for i in self._resting if i >= first}
        return tuple(sorted(self._resting))

    @property
    def status(self) -> WindowStatus:
        stages = [group.stage for group in self._window.values()]
        return WindowStatus(stages.count("generating"), stages.count("scoring"), stages.count("ready"), self._taken)

    async def take(self, n: int) -> list[ScoredGroup]:
        """The next ``n`` groups in submission order, waiting for them.

        Raises whatever a generation or a scoring raised, as soon as any group in the window fails.
        """
        assert self._failure is not None, "take() before start()"
        if n > self._slots - self._taken:
            raise ValueError(f"take({n}) with {self._slots} slots, {self._taken} of them taken and not released")
        groups = []
        for _ in range(n):
            if (group_id := next(iter(self._window), None)) is None:
                raise ValueError(f"no group is left to take: {self._next} was the first that was never submitted")
            groups.append(await self._finished(self._window[group_id]))
            del self._window[group_id]
            self._taken += 1
        return groups

    def release(self, n: int) -> None:
        """Give back the slots of ``n`` taken groups and submit as many new ones."""
        if n > self._taken:
            raise ValueError(f"release({n}) of {self._taken} taken groups")
        self._taken -= n
        self._fill()

    def replace(self, n: int) -> None:
        """``n`` taken groups will not train: give back their slots and submit as many beyond what was planned."""
        if self._left is not None:
            self._left += n
        self.release(n)

    def finished(self) -> tuple[ScoredGroup, ...]:
        """Groups that are scored and not yet taken, in submission order: part of a checkpoint."""
        return tuple(g.result for _, g in sorted(self._window.items()) if g.result is not None)

    def times(self) -> WindowTimes:
        """Where the time went since the last call."""
        now = time.monotonic()
        times, self._times = self._times, WindowTimes()
        if self._generating:
            times.generating += now - self._generating_since
            self._generating_since = now
        return times

    async def close(self) -> None:
        """Cancel what is in flight and wait until it has ended."""
        tasks = [g.task for g in self._window.values() if g.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._window.clear()
        if self._failure is not None:
            self._failure.cancel()

    async def __aenter__(self) -> RolloutPipeline:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _finished(self, group: _Group) -> ScoredGroup:
        if group.result is not None:
            return group.result
        assert group.task is not None
        assert self._failure is not None
        began = time.monotonic()
        waited_for: set[asyncio.Future[Any]] = {group.task, self._failure}
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        ended = time.monotonic()
        generated = min(max(group.generated_at or ended, began), ended)
        self._times.rollout_wait += generated - began
        self._times.verify_wait += ended - generated
        if self._failure.done():
            self._failure.result()  # raises the first cause, of whichever group
        return group.task.result()

    def _fill(self) -> None:
        while len(self._window) + self._taken < self._slots and (self._left is None or self._left > 0):
            group_id = self._next_id()
            if self._left is not None:
                self._left -= 1
            if (done := self._buffered.pop(group_id, None)) is not None:
                self._window[group_id] = _Group(task=None, stage="ready", result=done)
                continue
            group = self._window[group_id] = _Group(task=None)
            group.task = asyncio.create_task(self._run(group_id, group), name=f"group-{group_id}")

    def _next_id(self) -> int:
        """The next id that does not rest."""
        while True:
            group_id = self._next
            self._next += 1
            if group_id >= self._decided and self._rests is not None and self._rests(group_id):
                self._resting.add(group_id)
            elif group_id not in self._resting:
                return group_id

    def _in_first_window(self, group_id: int) -> bool:
        passed_over = sum(i < group_id for i in self._resting)
        return self._next <= group_id < self._next + self._slots + passed_over and group_id not in self._resting

    async def _run(self, group_id: int, group: _Group) -> ScoredGroup:
        try:
            self._engines(+1)
            try:
                rollout = await self._generate(self._request(group_id))
            finally:
                self._engines(-1)
            group.stage, group.generated_at = "scoring", time.monotonic()
            group.result = await self._score(rollout)
        except Exception as error:
            # Kept for take(), which raises it: a task's exception would otherwise be seen only in its turn.
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
                self._failure.exception()  # marks it as retrieved; the run may end before take() looks
            raise
        group.stage = "ready"
        return group.result

    def _engines(self, change: int) -> None:
        now = time.monotonic()
        if self._generating == 0:
            self._generating_since = now
        self._generating += change
        if self._generating == 0:
            self._times.generating += now - self._generating_since
