"""Workers that are replaced while the run goes on, because they hold nothing that cannot be had again.

    call ─► the member with the least in flight ─► answer
                 │ lost (died, or gave no answer in time)
                 ├─► ended and counted against the run's budget; a replacement starts (reconcile)
                 └─► the same call once more: with another member, or with the replacement when there is none

Each call gives one answer, so a sample is never scored twice in what trains. Verifiers and reward models live here;
engines and learner ranks do not (a new engine must first be given the current weights, a rank its shard).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpo_dist.errors import GrpoDistError, WorkerLost
from grpo_dist.fleet.pool import Pool
from grpo_dist.fleet.reconcile import Reconciler

TRIES = 3  # of one call; an answer that ends every worker it is given to must not end them all


class Restarts:
    """How many workers a run has replaced, and may."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0

    def take(self, lost: WorkerLost) -> None:
        """Raises WorkerLost when the budget is used up."""
        if self.count >= self.limit:
            why = f"{lost.why} (faults.restarts = {self.limit} replacements are used up)"
            raise WorkerLost(lost.role, lost.name, why)
        self.count += 1


class HealingPool:
    """A pool that its reconciler keeps at its wanted size."""

    def __init__(
        self, pool: Pool, reconciler: Reconciler, wanted: Callable[[], int], restarts: Restarts,
        event: Callable[..., None],
    ) -> None:  # fmt: skip
        self.pool, self._reconciler, self._wanted = pool, reconciler, wanted
        self._restarts, self._event = restarts, event
        self._mending: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, seconds: float) -> Any:
        """As Pool.call; a call whose worker was lost is made again, ``TRIES`` times in all.

        Raises:
            WorkerLost: every try lost its worker, the run's budget is used up, or no replacement could be started.
        """
        lost: WorkerLost | None = None
        for _ in range(TRIES):
            await self._someone()
            try:
                return await self.pool.call(method, *args, seconds=seconds)
            except WorkerLost as error:
                lost = error
                self._replace(error)
        assert lost is not None
        raise WorkerLost(lost.role, lost.name, f"{lost.why} ({TRIES} workers were lost over the same call)")

    async def reconcile(self) -> None:
        """Bring the pool to its wanted size. Raises what Reconciler.reconcile raises."""
        await self._reconciler.reconcile(self._wanted())

    async def close(self) -> None:
        """Start nothing more."""
        if self._mending is not None:
            self._mending.cancel()
            await asyncio.wait({self._mending})

    async def _someone(self) -> None:
        """Wait for a replacement when nobody lives. Raises WorkerLost when none could be started."""
        mending = self._mending
        if len(self.pool) or mending is None:
            return
        await asyncio.wait({mending})  # not awaited itself: a call that is cancelled must not end it
        if not len(self.pool) and not mending.cancelled() and (error := mending.exception()) is not None:
            raise WorkerLost(
                self.pool.role, "-", f"the last one was lost and could not be replaced: {error}"
            ) from error

    def _replace(self, lost: WorkerLost) -> None:
        member = self.pool.members.pop(lost.name, None)
        if member is None:
            return  # another call of the same worker has told
        member.kill()
        self._event(f"{lost.role}_lost", worker=lost.name, why=lost.why)
        self._restarts.take(lost)
        if self._mending is None or self._mending.done():
            self._mending = asyncio.ensure_future(self._mend())
            self._mending.add_done_callback(self._mended)

    async def _mend(self) -> None:
        while len(self.pool) < self._wanted():
            await self.reconcile()

    def _mended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), GrpoDistError) and len(self.pool):
            self._event("warning", text=f"a lost {self.pool.role} worker could not be replaced: {error}")
