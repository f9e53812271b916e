"""The three groups of workers of a run: engines, verifiers, learner ranks. Started together, sized independently.

    Fleet.start ─► one fit for all roles ─► learner ranks │ engines │ verifiers   (at the same time)
    generate(request) ─► the engine with the least in flight
    score(rollout)    ─► scoring.py: reward models and verifiers, replaced when they are lost
    publish(version)  ─► weights/publisher.py, over this fleet's engines and rank 0

A lost engine or rank ends the run with one sentence; replacing it in the live run is ``reconcile`` called again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import ray

from grpo_dist.config import PlacementSection, Recipe
from grpo_dist.fleet.cluster import Cluster
from grpo_dist.fleet.learners import LearnerGroup
from grpo_dist.fleet.placement import Bundle, living_nodes, wait_until_fits
from grpo_dist.fleet.pool import Member, Pool, gather_named
from grpo_dist.fleet.preflight import preflight
from grpo_dist.fleet.reconcile import Reconciler, RoleSpec, end_all
from grpo_dist.fleet.scoring import Scoring, reward_actors
from grpo_dist.learner.rank import LearnerActor, actor_environment
from grpo_dist.learner.spec import refuse_on_cpus, spec_for
from grpo_dist.rollout.engine import EngineSettings, SamplingSpec
from grpo_dist.rollout.worker import rollout_actor
from grpo_dist.types import GroupRequest, RolloutGroup, ScoredGroup, WeightUpdate
from grpo_dist.weights.publisher import Endpoint, Publisher
from grpo_dist.weights.sender import EngineEndpoint

ROLE_LABEL = "grpo.dev/role"  # what launchers put on the nodes of a role
ROLES = frozenset({"learner", "rollout", "verifier"})
END_SECONDS = 20.0

Event = Callable[..., None]


def on_gpus(recipe: Recipe) -> bool:
    """Whether this run's engines and ranks live on GPUs: as the recipe says, else as the cluster has them."""
    if recipe.weights.backend != "auto":
        return recipe.weights.backend == "nccl"
    return float(ray.cluster_resources().get("GPU", 0)) > 0  # type: ignore[no-untyped-call]


def bundles_of(recipe: Recipe, *, gpus: bool) -> dict[str, Bundle]:
    """What one worker of each role asks for. A role without labels of its own goes to the nodes labelled for it."""
    labelled = {node.labels.get(ROLE_LABEL) for node in living_nodes()}

    def bundle(role: str, placement: PlacementSection, count: float) -> Bundle:
        if not placement.labels and role in labelled:
            placement = placement.model_copy(update={"labels": {ROLE_LABEL: role}})
        return Bundle.of(role, placement, count)

    return {
        "learner": bundle("learner", recipe.learner.placement, 1 if gpus else 0),
        "rollout": bundle("rollout", recipe.rollout.placement, recipe.rollout.tensor_parallel if gpus else 0),
        "verifier": bundle("verifier", recipe.verifiers.placement, 0),
        "reward": bundle("reward", recipe.verifiers.reward_model.placement, recipe.verifiers.reward_model.gpus),
    }


def sizes_of(recipe: Recipe) -> dict[str, int]:
    return {
        "learner": recipe.learner.ranks,
        "rollout": recipe.rollout.workers,
        "verifier": recipe.verifiers.workers,
        "reward": reward_actors(recipe),
    }


Create = Callable[[str, dict[str, Any]], Any]  # (name, Ray options) -> actor


def _engines(recipe: Recipe, model: str, backend: Literal["nccl", "gloo"]) -> Create:
    device: Literal["cuda", "cpu"] = "cuda" if backend == "nccl" else "cpu"
    settings = EngineSettings(
        model=recipe.model.model_copy(update={"path": model}), rollout=recipe.rollout,
        context_tokens=recipe.longest_sequence, seed=recipe.run.seed, backend=backend, device=device,
    )  # fmt: skip

    def create(name: str, options: dict[str, Any]) -> Any:
        return rollout_actor(**options).remote(name, settings)

    return create


class Fleet:
    """Living workers of one run. Made by ``Fleet.start``."""

    def __init__(self, recipe: Recipe, event: Event, roles: frozenset[str]) -> None:
        self.recipe, self._event = recipe, event
        roles = roles | {"reward"} if "verifier" in roles else roles
        self.wanted = {role: size if role in roles else 0 for role, size in sizes_of(recipe).items()}
        self.rollouts = Pool("rollout")
        self.scoring: Scoring
        self.learner: LearnerGroup
        self._engines: Reconciler
        self._publisher: Publisher
        self._sampling = SamplingSpec.of(recipe.rollout.sampling)
        self._eval_sampling = SamplingSpec.of(recipe.evaluate.sampling, recipe.rollout.sampling)

    @classmethod
    async def start(
        cls, recipe: Recipe, model: str, here: Cluster, *, event: Event, tell: Callable[[str], None],
        roles: frozenset[str] = ROLES,
    ) -> Fleet:  # fmt: skip
        """Start the workers of the given roles, all at once; ends what was started when one of them fails.

        Raises:
            UserError: the recipe needs GPUs; or the cluster has no room: says what was wanted and what each node has.
            GrpoDistError: nodes do not reach each other (several nodes only).
            WorkerLost: a worker did not become ready within faults.start_seconds.
        """
        gpus = on_gpus(recipe)
        if not gpus and "learner" in roles:
            refuse_on_cpus(recipe.model)
        bundles, limits = bundles_of(recipe, gpus=gpus), recipe.faults
        fleet = cls(recipe, event, roles)
        wanted = [bundle for role, bundle in bundles.items() for _ in range(fleet.wanted[role])]
        await wait_until_fits(wanted, seconds=0 if here.started_here else limits.placement_seconds, tell=tell)
        backend: Literal["nccl", "gloo"] = "nccl" if gpus else "gloo"
        if "learner" in roles and limits.preflight_seconds and len(living_nodes()) > 1:
            await preflight(bundles, fleet.wanted, backend=backend, limits=limits, tell=tell)
        create = _engines(recipe, model, backend)
        spec = RoleSpec("rollout", bundles["rollout"], create, limits.start_seconds, limits.placement_seconds)
        fleet._engines = Reconciler(spec, fleet.rollouts, event)
        fleet.scoring = Scoring(recipe, bundles, event, wanted=fleet.wanted["verifier"])
        try:
            starts: dict[str, Any] = {"engines": fleet.reconcile(), **fleet.scoring.starts()}
            if "learner" in roles:
                starts["learner"] = fleet._start_learner(bundles["learner"], model, backend)
            await gather_named(starts)
        except BaseException:
            await fleet.end(seconds=0)
            raise
        if "learner" in roles:
            fleet._publisher = fleet._make_publisher()
        return fleet

    async def reconcile(self) -> None:
        """Make the engines agree with ``wanted``."""
        await self._engines.reconcile(self.wanted["rollout"])

    async def _start_learner(self, bundle: Bundle, model: str, backend: Literal["nccl", "gloo"]) -> None:
        recipe = self.recipe

        def setup(rank: int, host: str, port: int) -> Any:
            return spec_for(recipe, path=model, rank=rank, host=host, port=port, backend=backend)

        environment = actor_environment(
            "cuda" if backend == "nccl" else "cpu", recipe.learner.threads or max(1, int(recipe.learner.placement.cpus))
        )

        def create(rank: int, options: dict[str, Any]) -> Any:
            return LearnerActor.options(runtime_env={"env_vars": environment}, max_restarts=0, **options).remote()

        self.learner = await LearnerGroup.start(bundle, recipe.learner.ranks, create, setup, recipe.faults)
        for rank in self.learner.ranks:
            self._event(
                "learner_started", worker=rank.name, **{k: rank.info[k] for k in ("node", "pid") if k in rank.info}
            )

    # --- the functions that the pipeline and the evaluation are given ------------------------------------------------

    async def generate(self, request: GroupRequest) -> RolloutGroup:
        return await self._generate(request, self._sampling, self.recipe.rollout.group_size)

    async def generate_eval(self, request: GroupRequest) -> RolloutGroup:
        return await self._generate(request, self._eval_sampling, self.recipe.evaluate.sampling.samples)

    async def _generate(self, request: GroupRequest, sampling: SamplingSpec, n: int) -> RolloutGroup:
        return await self.rollouts.call("generate", request, sampling, n, seconds=self.recipe.faults.rollout_seconds)

    async def score(self, rollout: RolloutGroup) -> ScoredGroup:
        return await self.scoring.score(rollout)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, version: int) -> WeightUpdate:
        """The learner's weights to every engine, as ``version``."""
        return await self._publisher.publish(version)

    def _make_publisher(self) -> Publisher:
        limit = self.recipe.faults.publish_seconds

        async def pause(engine: Endpoint) -> None:
            await self.rollouts.members[engine.name].call("pause", seconds=limit)

        async def resume(engine: Endpoint) -> float:
            return await self.rollouts.members[engine.name].call("resume", seconds=limit)

        return Publisher(
            endpoints=self.endpoints, stage=self.learner.stage, pause=pause, connect=self.learner.connect,
            send=self.learner.send, resume=resume, verify=self.recipe.weights.verify,
            verify_every=self.recipe.weights.verify_every, limit_seconds=limit,
        )  # fmt: skip

    async def checksums(self) -> dict[str, Any]:
        """Each engine's own checksums of what it holds, by engine. On CPU packed linear layers are not in them."""
        return await self.rollouts.all("checksums", seconds=self.recipe.faults.publish_seconds)

    def effective_sampling(self) -> str:
        """What the engines really sample training rollouts with, as they said it themselves."""
        info = next(iter(self.rollouts.members.values())).info
        ignored = info["generation_config_ignored"]
        return ", ".join(f"{key} {value}" for key, value in info["sampling"].items()) + (
            f"; the model folder's generation_config asks for {ignored}, which is not used" if ignored else ""
        )

    def isolation(self) -> str | None:
        """How the verifiers keep programs apart from the machine; None when no verifier runs any."""
        levels = {m.info.get("isolation") for m in self.scoring.members()} - {None}
        return ", ".join(sorted(map(str, levels))) or None

    def endpoints(self) -> list[EngineEndpoint]:
        return [
            EngineEndpoint(m.name, m.actor, m.info["world_size"], m.info["incarnation"])
            for m in self.rollouts.members.values()
        ]

    def sizes(self) -> dict[str, float]:
        """fleet/* of a step."""
        return {
            "fleet/rollout_live": float(len(self.rollouts)),
            "fleet/rollout_wanted": float(self.wanted["rollout"]),
            "fleet/verifier_live": float(len(self.scoring.verifiers.pool)),
            "fleet/learner_ranks": float(self.learner.size),
            "fleet/restarts": float(self.scoring.restarts.count),
        }

    async def end(self, *, seconds: float = END_SECONDS) -> None:
        """Ask every worker to stop, wait a bounded time, then end it. No process of the run is left."""
        scoring = await self.scoring.close() if hasattr(self, "scoring") else []
        pools: list[Member] = [*self.rollouts.members.values(), *scoring]
        self.rollouts.members.clear()
        ends = [end_all(pools, seconds=seconds)]
        if hasattr(self, "learner"):
            ends.append(self.learner.end(seconds=seconds))
        await asyncio.gather(*ends)
