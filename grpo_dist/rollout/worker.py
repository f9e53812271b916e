"""The Ray actor around one engine.

Two event loops, because Ray gives each concurrency group its own: requests come in on the default one, where the engine
lives; control calls come in on the ``control`` group, so a thousand waiting requests cannot hold them up, and are
forwarded to the engine's loop.

An engine whose processes died takes its actor with it, so that Ray reports the death: a live actor around a dead
engine would only be noticed by its silence.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import ray

from grpo_dist.config import TrainSampling
from grpo_dist.errors import GrpoDistError
from grpo_dist.rollout.engine import Engine, EngineSettings, SamplingSpec
from grpo_dist.types import GroupRequest, RolloutGroup

T = TypeVar("T")
WATCH_SECONDS = 0.2
DYING_SECONDS = 2.0  # from the first symptom of a dying engine to the news of its death
MAX_REQUESTS = 4096  # groups that may wait in one engine

control = ray.method(concurrency_group="control")


class RolloutWorker:
    """Build it with ``rollout_actor(**ray_options).remote(name, settings)``; before ``ready`` only ``ping`` answers."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self._engine = Engine(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None

    async def ready(self) -> dict[str, Any]:
        """Start the engine and say what it is. A second call only says it."""
        began = time.monotonic()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            os.environ["VLLM_HOST_IP"] = _node_ip()
            await self._engine.start()
            self._watch = self._loop.create_task(self._exit_with_engine())
        context = ray.get_runtime_context()
        return self._engine.describe() | {
            "name": self.name,
            "node": _node_ip(),
            "node_id": context.get_node_id(),
            "incarnation": context.get_actor_id(),
            "pid": os.getpid(),
            "start_seconds": time.monotonic() - began,
        }

    async def generate(
        self, request: GroupRequest, sampling: SamplingSpec | TrainSampling | dict[str, Any], n: int
    ) -> RolloutGroup:
        """The n completions of one group. Sample i is drawn with seed ``request.seed + i``."""
        if isinstance(sampling, TrainSampling):
            sampling = SamplingSpec.of(sampling)
        elif isinstance(sampling, dict):
            sampling = SamplingSpec(**sampling)
        began = time.monotonic()
        completions = await self._alive(self._engine.generate(request.prompt.token_ids, n, sampling, request.seed))
        return RolloutGroup(request, completions, time.monotonic() - began, self.name)

    @control
    async def ping(self) -> str:
        """Answers while the engine starts, generates or receives weights."""
        return self.name

    @control
    async def version(self) -> int:
        return self._engine.version

    @control
    async def pause(self) -> None:
        await self._forward(self._engine.pause())

    @control
    async def resume(self) -> float:
        return await self._forward(self._engine.resume())

    @control
    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        await self._forward(self._engine.join_group(init_info))

    @control
    async def start_weight_update(self) -> None:
        await self._forward(self._engine.start_update())

    @control
    async def update_weights(self, update_info: dict[str, Any]) -> None:
        await self._forward(self._engine.update(update_info))

    @control
    async def finish_weight_update(self, version: int) -> None:
        await self._forward(self._engine.finish_update(version))

    @control
    async def received_digests(self) -> list[dict[str, str]]:
        return await self._forward(self._engine.received_digests())

    @control
    async def checksums(self) -> list[dict[str, str]]:
        return await self._forward(self._engine.checksums())

    @control
    async def stop(self) -> None:
        """End the engine's processes; the actor itself is then killed by its owner."""
        if self._watch is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._watch.cancel)
        if self._loop is not None:
            await self._forward(self._engine.close())

    async def _forward(self, call: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            call.close()
            raise RuntimeError(f"{self.name} is not ready yet")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._alive(call), self._loop))

    async def _alive(self, call: Awaitable[T]) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            os._exit(1)
        except (ValueError, GrpoDistError):  # of ours: the engine was not asked, or answered
            raise
        except Exception:
            # A call that was under way when the engine died fails first, with an error that says nothing ("cancelled").
            await asyncio.sleep(DYING_SECONDS)  # _exit_with_engine gets its chance
            raise

    async def _exit_with_engine(self) -> None:
        while not self._engine.dead:
            await asyncio.sleep(WATCH_SECONDS)
        os._exit(1)


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def rollout_actor(**options: Any) -> Any:
    """The actor class, to be created with ``.remote(name, settings)``. ``options`` are Ray's: placement, resources."""
    remote: Any = ray.remote(concurrency_groups={"control": 64})(RolloutWorker)  # type: ignore[call-overload]
    # No restarts by Ray: a new engine must hold the current weights before it takes part: the fleet's business.
    return remote.options(max_concurrency=MAX_REQUESTS, max_restarts=0, **options)
