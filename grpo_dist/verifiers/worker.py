"""The verifier worker: a Ray actor around one pool of judging processes.

    ray.remote(num_cpus=…)(VerifierWorker).remote(recipe.verifiers)

Every method is a coroutine, so calls of many groups share the pool and a slow group holds up none of the others. The
actor itself never runs a verifier: its children do, under a clock and a memory limit (pool.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from grpo_dist.config import VerifiersSection
from grpo_dist.types import RolloutGroup, ScoredGroup, Verdict, VerifyItem
from grpo_dist.verifiers.pool import VerifierPool
from grpo_dist.verifiers.sandbox import strongest


class VerifierWorker:
    """One actor of the verifier pool.

    Args:
        section: the recipe's ``verifiers``.
    """

    def __init__(self, section: VerifiersSection) -> None:
        self.section = section
        self.pool: VerifierPool | None = None

    async def ready(self) -> dict[str, Any]:
        """Brings up the judging processes. Raises RecipeError if the verifiers cannot be built."""
        if self.pool is None:
            section = self.section
            self.pool = VerifierPool(section.use, timeout=section.timeout, children=section.children)
        await self.pool.start()
        runs_code = any(use.name == "code" for use in self.section.use)
        return {
            "node": _node_address(),
            "pid": os.getpid(),
            "verifiers": [use.label or use.name for use in self.section.use],
            "isolation": strongest().level if runs_code else None,
        }

    async def score(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in order; never raises for what an item does."""
        if self.pool is None:
            await self.ready()
        assert self.pool is not None
        return await self.pool.score(items)

    async def score_group(self, group: RolloutGroup) -> ScoredGroup:
        return ScoredGroup(group, tuple(await self.score(items_of(group))))

    async def counts(self) -> dict[str, Any]:
        """Since the start: verdicts, timeouts, deaths, started children, the slowest (seconds, item id)."""
        if self.pool is None:
            return {}
        counts = self.pool.counts
        return {
            "verdicts": counts.verdicts, "timeouts": counts.timeouts, "deaths": counts.deaths,
            "started": counts.started, "slowest": list(counts.slowest), "children": self.pool.pids,
        }  # fmt: skip

    async def ping(self) -> int:
        return os.getpid()

    async def stop(self) -> None:
        if self.pool is not None:
            await self.pool.close()
            self.pool = None


def _node_address() -> str:
    import ray  # an actor has it loaded; scoring without Ray does not need it

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def items_of(group: RolloutGroup) -> list[VerifyItem]:
    """What a verifier sees of each completion of a group."""
    prompt = group.prompt
    return [
        VerifyItem(
            id=f"{prompt.id}/{index}",
            prompt=prompt.text,
            completion=completion.text,
            finish_reason=completion.finish_reason,
            answer=prompt.answer,
            tokens=len(completion.token_ids),
            verifier=prompt.verifier,
            extra=prompt.extra,
        )
        for index, completion in enumerate(group.completions)
    ]
