"""The learner ranks as one value on the driver: started together, called together, lost together.

    start(R) ─► reservation of R bundles ─► R actors ─► rank 0 names address and port ─► setup on all ─► ready
    update(batches) ─► rank r's share of each to rank r ─► every rank's statistics, merged exactly

ZeRO-3 keeps one copy of every shard, so the loss of one rank ends the group: the survivors wait in a collective that
can never finish and are killed. The driver is the failure detector: actor death from Ray, and a limit per update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from grpo_dist.config import FaultsSection
from grpo_dist.fleet.placement import Bundle, Reservation
from grpo_dist.fleet.pool import Member, gather_named
from grpo_dist.fleet.reconcile import end_all
from grpo_dist.metrics import Stats, merge_stats
from grpo_dist.types import TrainBatch

CreateRank = Callable[[int, dict[str, Any]], ActorHandle[Any]]  # (rank, Ray options) -> actor
Setup = Callable[[int, str, int], Any]  # (rank, rank 0's host, rank 0's port) -> the argument of LearnerRank.setup


class LearnerGroup:
    """R living ranks that hold one policy."""

    def __init__(self, ranks: Sequence[Member], reservation: Reservation, limits: FaultsSection) -> None:
        self.ranks, self._reservation, self._limits = tuple(ranks), reservation, limits

    @classmethod
    async def start(
        cls, bundle: Bundle, size: int, create: CreateRank, setup: Setup, limits: FaultsSection
    ) -> LearnerGroup:
        """Start ``size`` ranks and load the model on all of them.

        Raises:
            UserError: the cluster did not grant the resources.
            WorkerLost: a rank died or was not ready within faults.start_seconds.
        """
        # One group for all: ranks talk in every layer, so they are packed onto as few nodes as possible.
        reservation = Reservation([bundle] * size, "PACK")
        await reservation.granted(limits.placement_seconds)
        ranks = [Member("learner", f"learner-{r}", create(r, reservation.options(r))) for r in range(size)]
        group = cls(ranks, reservation, limits)
        try:
            host, port = await ranks[0].call("address", seconds=limits.start_seconds)
            infos = await group._all("setup", limits.start_seconds, [(setup(r, host, port),) for r in range(size)])
        except BaseException:
            group.kill()
            raise
        for member, info in zip(ranks, infos, strict=True):
            member.info = info or {}
        return group

    @property
    def size(self) -> int:
        return len(self.ranks)

    async def update(self, batches: Sequence[TrainBatch]) -> Stats:
        """One optimizer update per batch on every rank; the merged statistics. Ends the group when a rank fails."""
        if wrong := [batch.ranks for batch in batches if batch.ranks != self.size]:
            raise ValueError(f"a batch has shards for {wrong[0]} ranks, the group {self.size}")
        shares = [(tuple(batch.of_rank(r) for batch in batches),) for r in range(self.size)]
        return merge_stats(await self._all("update", self._limits.learn_seconds * len(batches), shares))

    async def stage(self, version: int) -> None:
        """Gather the weights into rank 0's staging, a layer at a time, all ranks in lockstep."""
        await self._all("stage", self._limits.publish_seconds, [(version,)] * self.size)

    async def connect(self, endpoints: Sequence[Any]) -> None:
        """Make rank 0 the sender of a new transfer group with these engines."""
        limit = self._limits.publish_seconds
        # Below the driver's own limit: the sender knows which engine did not answer, the driver only rank 0.
        await self.ranks[0].call(
            "connect", endpoints, connect_seconds=min(120.0, 0.2 * limit), send_seconds=0.6 * limit, seconds=limit
        )

    async def send(self, version: int, verify: bool) -> Any:
        """Send what is staged from rank 0 to the connected engines; with ``verify`` a digest per tensor is compared."""
        return await self.ranks[0].call("send", version, verify, seconds=self._limits.publish_seconds)

    async def save(self, folder: Path) -> None:
        await self._all("save", self._limits.save_seconds, [(folder,)] * self.size)

    async def load(self, folder: Path) -> None:
        await self._all("load", self._limits.start_seconds, [(folder,)] * self.size)

    async def export(self, folder: Path) -> None:
        await self._all("export", self._limits.save_seconds, [(folder,)] * self.size)

    async def end(self, *, seconds: float) -> None:
        await end_all(self.ranks, seconds=seconds)
        self._reservation.free()

    def kill(self) -> None:
        for member in self.ranks:
            member.kill()
        self._reservation.free()

    async def _all(self, method: str, seconds: float, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        pairs = zip(self.ranks, args, strict=True)
        answers = await gather_named({m.name: m.call(method, *a, seconds=seconds, **kwargs) for m, a in pairs})
        return list(answers.values())
