"""Order and bookkeeping of a publication: who is asked what, when, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from grpo_dist.errors import PublicationError, WorkerLost
from grpo_dist.weights.publisher import Endpoint, Publisher


@dataclass(frozen=True)
class Engine:
    name: str
    incarnation: str = "1"


@dataclass(frozen=True)
class Report:
    tensors: int = 3
    bytes: int = 12
    digests_ok: bool | None = True
    digest: str | None = None


@dataclass
class World:
    """Plain functions that write down how they were called; ``broken`` names calls that fail or hang."""

    engines: list[Engine] = field(default_factory=lambda: [Engine("a"), Engine("b")])
    calls: list[str] = field(default_factory=list)
    broken: dict[str, Exception | None] = field(default_factory=dict)  # None hangs

    def publisher(self, **options: Any) -> Publisher:
        return Publisher(
            endpoints=lambda: list(self.engines), stage=self.stage, pause=self.pause, connect=self.connect,
            send=self.send, resume=self.resume, **options,
        )  # fmt: skip

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        if call in self.broken:
            error = self.broken[call]
            if error is None:
                await asyncio.sleep(60)
            else:
                raise error

    async def stage(self, version: int) -> None:
        await self._do(f"stage {version}")

    async def pause(self, engine: Endpoint) -> None:
        await self._do(f"pause {engine.name}")

    async def connect(self, engines: Sequence[Endpoint]) -> None:
        await self._do("connect " + "".join(e.name for e in engines))

    async def send(self, version: int, verify: bool) -> Report:
        await self._do(f"send {version}")
        return Report(digests_ok=True if verify else None)

    async def resume(self, engine: Endpoint) -> float:
        await self._do(f"resume {engine.name}")
        return {"a": 0.25, "b": 0.5}.get(engine.name, 0.0)


def test_everybody_is_paused_before_anything_is_sent_and_resumed_after() -> None:
    world = World()
    update = asyncio.run(world.publisher().publish(1))
    assert world.calls == ["stage 1", "pause a", "pause b", "connect ab", "send 1", "resume a", "resume b"]
    assert (update.version, update.engines, update.tensors, update.bytes) == (1, 2, 3, 12)
    assert update.pause_seconds == 0.5  # the engine that waited longest
    assert update.checksum_ok is True


def test_a_group_is_made_once_and_again_when_membership_changes() -> None:
    world = World()
    publisher = world.publisher()

    async def run() -> list[str]:
        await publisher.publish(0)
        await publisher.publish(1)
        world.engines.append(Engine("c"))
        await publisher.publish(2)
        world.engines[:] = [Engine("c")]
        await publisher.publish(3)
        world.engines[:] = [Engine("c", incarnation="2")]  # replaced under its old name
        await publisher.publish(4)
        return [c for c in world.calls if c.startswith("connect")]

    assert asyncio.run(run()) == ["connect ab", "connect abc", "connect c", "connect c"]
    assert publisher.version == 4


@pytest.mark.parametrize("failing", ["connect ab", "send 1"])
def test_nobody_resumes_after_a_failure_and_the_next_publication_connects_again(failing: str) -> None:
    world = World()
    publisher = world.publisher()
    world.broken[failing] = WorkerLost("rollout", "b", "died during update_weights")

    async def run() -> None:
        with pytest.raises(WorkerLost, match="rollout worker b was lost"):
            await publisher.publish(1)
        assert not any(c.startswith("resume") for c in world.calls)
        assert publisher.version is None
        world.broken.clear()
        world.calls.clear()
        world.engines[:] = [Engine("a")]
        await publisher.publish(1)

    asyncio.run(run())
    assert world.calls == ["stage 1", "pause a", "connect a", "send 1", "resume a"]


def test_a_failed_send_to_unchanged_members_still_connects_again() -> None:
    world = World()
    publisher = world.publisher()

    async def run() -> None:
        await publisher.publish(0)
        world.broken["send 1"] = PublicationError("1 tensors did not arrive")
        with pytest.raises(PublicationError, match="did not arrive"):
            await publisher.publish(1)
        world.broken.clear()
        await publisher.publish(1)

    asyncio.run(run())
    assert [c for c in world.calls if c.startswith("connect")] == ["connect ab", "connect ab"]


@pytest.mark.parametrize(
    ("hanging", "message"),
    [
        ("stage 1", "the learners did not stage the weights in time"),
        ("pause b", "b did not pause in time"),
        ("connect ab", "the weight group with a, b was not made in time"),
        ("send 1", "sending to a, b did not end in time"),
        ("resume a", "a did not resume in time"),
    ],
)
def test_every_wait_ends_and_says_for_whom(hanging: str, message: str) -> None:
    world = World(broken={hanging: None})
    with pytest.raises(PublicationError, match=message):
        asyncio.run(world.publisher(limit_seconds=0.05).publish(1))


def test_an_unknown_error_of_an_engine_becomes_its_loss() -> None:
    world = World(broken={"pause b": RuntimeError("socket gone")})
    with pytest.raises(WorkerLost, match="rollout worker b was lost: pause failed: socket gone"):
        asyncio.run(world.publisher().publish(1))


def test_no_engine_is_an_error() -> None:
    with pytest.raises(PublicationError, match="no engine to publish version 1 to"):
        asyncio.run(World(engines=[]).publisher().publish(1))


@pytest.mark.parametrize(
    ("verify", "checked"),
    [("always", [0, 1, 2, 3, 4]), ("first", [0]), ("sampled", [0, 3]), ("never", [])],
)
def test_which_publications_are_verified(verify: Any, checked: list[int]) -> None:
    publisher = World().publisher(verify=verify, verify_every=3)

    async def run() -> list[int]:
        return [v for v in range(5) if (await publisher.publish(v)).checksum_ok]

    assert asyncio.run(run()) == checked


def test_late_engines_catch_up_alone_and_join_the_next_group() -> None:
    world = World()
    publisher = world.publisher()

    async def run() -> None:
        await publisher.publish(5)
        late = Engine("c")
        world.calls.clear()
        update = await publisher.catch_up([late], 5)
        assert (update.version, update.engines) == (5, 1)
        world.engines.append(late)
        await publisher.publish(6)

    asyncio.run(run())
    assert world.calls[:4] == ["pause c", "connect c", "send 5", "resume c"]
    assert "connect abc" in world.calls
