"""Who says what completions are worth: reward-model actors first, where the recipe has any, then verifier actors.

    group ─► items ─► reward models (one pool per model) ─► what they said, attached ─► verifiers ─► one verdict each

Both kinds of workers are replaced when they are lost (healing.py). A failure of a reward model on a text masks that
sample and says why; it never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from grpo_dist.config import Recipe
from grpo_dist.fleet.healing import HealingPool, Restarts
from grpo_dist.fleet.placement import Bundle
from grpo_dist.fleet.pool import Member, Pool
from grpo_dist.fleet.reconcile import Reconciler, RoleSpec
from grpo_dist.types import RolloutGroup, ScoredGroup
from grpo_dist.verifiers.reward_model import RewardModelOptions, reward_models
from grpo_dist.verifiers.reward_scorer import Rewards, Said
from grpo_dist.verifiers.reward_worker import RewardWorker
from grpo_dist.verifiers.worker import VerifierWorker, items_of

_CONCURRENCY = 1000  # calls of one actor that wait; the window of groups in flight is the real bound


def reward_actors(recipe: Recipe) -> int:
    """How many actors the recipe's reward models need."""
    return recipe.verifiers.reward_model.workers * len(reward_models(recipe.verifiers.use))


class Scoring:
    """The verifier pool and the pools of reward models of one run."""

    def __init__(self, recipe: Recipe, bundles: dict[str, Bundle], event: Callable[..., None], *, wanted: int) -> None:
        """
        Args:
            bundles: what one ``verifier`` and one ``reward`` worker ask for.
            wanted: verifier workers; 0 starts neither them nor reward models.
        """
        self.recipe, self._event, self._bundles = recipe, event, bundles
        self.wanted = {"verifier": wanted}
        self.restarts = Restarts(recipe.faults.restarts)
        self.verifiers = self._pool("verifier", "verifier", _verifier_actor(recipe))
        self._rewards: dict[str, HealingPool] = {}
        self._attach = Rewards(recipe.verifiers.use, self._ask)
        for number, (path, options) in enumerate(self._attach.models.items()):
            name = f"reward-{number}"  # workers: reward-0-0, reward-0-1, …
            self.wanted[name] = recipe.verifiers.reward_model.workers if wanted else 0
            self._rewards[path] = self._pool("reward", name, _reward_actor(recipe, options))

    def _pool(self, role: str, name: str, create: Callable[[str, dict[str, Any]], Any]) -> HealingPool:
        limits, pool = self.recipe.faults, Pool(role)
        spec = RoleSpec(role, self._bundles[role], create, limits.start_seconds, limits.placement_seconds, prefix=name)
        reconciler = Reconciler(spec, pool, self._event)
        return HealingPool(pool, reconciler, lambda: self.wanted[name], self.restarts, self._event)

    def starts(self) -> dict[str, Any]:
        """The calls that bring every pool to its wanted size, by name."""
        pools = {"verifier": self.verifiers} | {f"reward {path}": pool for path, pool in self._rewards.items()}
        return {name: pool.reconcile() for name, pool in pools.items()}

    async def score(self, rollout: RolloutGroup) -> ScoredGroup:
        """Every completion judged once. Raises WorkerLost when workers are lost beyond what may be replaced."""
        items = await self._attach.attach(items_of(rollout))
        verdicts = await self.verifiers.call("score", items, seconds=self.recipe.faults.verify_seconds)
        return ScoredGroup(rollout, tuple(verdicts))

    async def _ask(self, path: str, texts: Sequence[str]) -> Sequence[Said]:
        if not texts:
            return []
        said: list[Said] = await self._rewards[path].call(
            "score", texts, seconds=self.recipe.verifiers.reward_model.seconds
        )
        return said

    def members(self) -> list[Member]:
        return [member for pool in self._pools() for member in pool.pool.members.values()]

    async def close(self) -> list[Member]:
        """Replace nothing more; the members, which are the caller's to end."""
        for pool in self._pools():
            await pool.close()
        members = self.members()
        for pool in self._pools():
            pool.pool.members.clear()
        return members

    def _pools(self) -> list[HealingPool]:
        return [self.verifiers, *self._rewards.values()]


def _verifier_actor(recipe: Recipe) -> Callable[[str, dict[str, Any]], Any]:
    actor = ray.remote(VerifierWorker)
    environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}}  # Ray shows it every GPU otherwise

    def create(name: str, options: dict[str, Any]) -> Any:
        return actor.options(runtime_env=environment, max_restarts=0, max_concurrency=_CONCURRENCY, **options).remote(
            recipe.verifiers
        )

    return create


def _reward_actor(recipe: Recipe, options: RewardModelOptions) -> Callable[[str, dict[str, Any]], Any]:
    actor = ray.remote(RewardWorker)
    section = recipe.verifiers.reward_model
    threads = str(max(1, int(section.placement.cpus)))
    hidden = {} if section.gpus else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {"env_vars": {"OMP_NUM_THREADS": threads} | hidden}

    def create(name: str, ray_options: dict[str, Any]) -> Any:
        return actor.options(
            runtime_env=environment, max_restarts=0, max_concurrency=_CONCURRENCY, **ray_options
        ).remote(options, "cuda" if section.gpus else "cpu")

    return create
