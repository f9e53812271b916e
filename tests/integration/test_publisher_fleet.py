"""The publisher over real engines whose number changes, and pushes that fail in the middle.

An engine that dies, hangs or refuses is named within the limit; the others are usable after the next publication, and a
half-written engine never generates.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from grpo_dist.errors import PublicationError, WorkerLost
from grpo_dist.rollout.engine import SamplingSpec
from grpo_dist.types import WeightUpdate
from grpo_dist.weights.publisher import Publisher
from tests.integration.engines import (
    SenderProbe,
    Worker,
    changed,
    load,
    request,
    settings,
    start_workers,
    state_of,
    worst_error,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SPEC = SamplingSpec(max_tokens=40)
EXACT = 1e-5
LIMIT = 10.0
MIDDLE = "model.layers.1.self_attn.k_proj.weight"  # q of this layer has been sent, v has not


class Bench:
    """Engines that come and go, one sender, one publisher; ``model`` is what the next publication holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, load(folder)
        self.workers: dict[str, Worker] = {}
        self.lost: dict[str, Worker] = {}
        self.sender = SenderProbe.options(num_cpus=1).remote(send_seconds=LIMIT, connect_seconds=30.0)
        self.publisher = Publisher(
            endpoints=lambda: [w.endpoint for w in self.workers.values()],
            stage=lambda _: asyncio.sleep(0),
            pause=lambda e: self.call(e.name, "pause"),
            resume=lambda e: self.call(e.name, "resume"),
            connect=self.connect,
            send=self.send,
            limit_seconds=60,
        )
        self.connects = 0

    def start(self, *names: str) -> None:
        self.workers |= start_workers({name: settings(self.folder) for name in names})

    def call(self, name: str, method: str) -> Any:
        return asyncio.wrap_future(getattr(self.workers[name].actor, method).remote().future())

    async def connect(self, endpoints: Sequence[Any]) -> None:
        self.connects += 1
        await self.sender.connect.remote(endpoints)

    async def send(self, version: int, verify: bool) -> Any:
        return await self.sender.send.remote(state_of(self.model), version, verify)

    def publish(self, version: int) -> WeightUpdate:
        async def run() -> WeightUpdate:
            return await self.publisher.publish(version)

        return asyncio.run(run())

    def assert_all_hold(self, version: int) -> None:
        groups = {name: w.generate(request(1, seed=5), SPEC) for name, w in self.workers.items()}
        assert {w.call("version") for w in self.workers.values()} == {version}
        assert max(worst_error(g, {version: self.model}) for g in groups.values()) < EXACT
        assert len({g.completions for g in groups.values()}) == 1  # the same tokens on every engine

    def interrupted(self, version: int, pid: int, number: int) -> Exception:
        """A push during which process ``pid`` gets a signal; what the sender says. Engines stay paused."""
        for worker in self.workers.values():
            worker.call("pause")
        began = time.monotonic()
        with pytest.raises((WorkerLost, PublicationError)) as caught:
            ray.get(
                self.sender.send_and_signal.remote(state_of(self.model), version, MIDDLE, pid, number),
                timeout=LIMIT + 30,
            )
        assert time.monotonic() - began < LIMIT + 30
        return caught.value


@pytest.fixture(scope="module")
def bench(ray_cluster: None, tiny_model: Path) -> Iterator[Bench]:
    bench = Bench(tiny_model)
    yield bench
    for worker in bench.workers.values():
        worker.end()
    ray.kill(bench.sender)


def test_the_first_publication_must_hold_every_layer(bench: Bench) -> None:
    """Nothing to compare with yet: the engine itself says which layers stayed without weights."""
    bench.start("a", "b", "c")
    for left_out, said in (
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj"),
        ("model.norm.weight", "model.norm"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
    ):
        ray.get(bench.sender.connect.remote([bench.workers["a"].endpoint]), timeout=60)
        bench.workers["a"].call("pause")
        state = {name: tensor for name, tensor in state_of(bench.model).items() if name != left_out}
        with pytest.raises(
            PublicationError, match=rf"1 layers without all their weights: {said} \(\d+ of \d+ elements"
        ):
            ray.get(bench.sender.send.remote(state, 1), timeout=60)
        with pytest.raises(PublicationError, match="cannot resume"):
            bench.workers["a"].call("resume")


def test_two_engines_three_engines_one_engine(bench: Bench) -> None:
    version = 10
    for names in (["a", "b"], ["a", "b", "c"], ["c"], ["a", "b", "c"]):
        if "c" in names and "c" not in bench.workers:
            bench.start("c")
        everybody = dict(bench.workers)
        bench.workers = {name: everybody[name] for name in names}
        before = bench.connects
        for again in (False, True):
            version += 1
            bench.model = changed(bench.model, version, size=0.1)
            update = bench.publish(version)
            assert (update.engines, update.checksum_ok, update.version) == (len(names), True, version)
            assert bench.connects == before + 1  # at the first of the two only
            bench.assert_all_hold(version)
            assert again or update.tensors == len(state_of(bench.model))
        bench.workers = everybody


def test_a_late_engine_catches_up_while_the_others_generate(bench: Bench) -> None:
    version = bench.publisher.version
    assert version is not None
    late = bench.workers["c"]
    refs = [
        bench.workers["a"].actor.generate.remote(request(i, seed=16 * i), SamplingSpec(max_tokens=300), 8)
        for i in range(4)
    ]

    async def run() -> WeightUpdate:
        return await bench.publisher.catch_up([late.endpoint], version)

    assert asyncio.run(run()).engines == 1
    bench.assert_all_hold(version)
    spans = {s.version for g in ray.get(refs, timeout=120) for c in g.completions for s in c.versions}
    assert spans == {version}
    bench.publish(version + 1)
    bench.assert_all_hold(version + 1)


def test_an_engine_that_hangs_is_named_within_the_limit(bench: Bench) -> None:
    bench.publish(30)
    (process,) = bench.workers["b"].processes("VLLM::Worker")
    error = bench.interrupted(31, process.pid, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGCONT)
    assert "b" in str(error).split(" did not ")[0].split(", ")
    for worker in bench.workers.values():
        with pytest.raises(PublicationError, match="cannot resume"):
            worker.call("resume")
    bench.model = changed(bench.model, 32)
    bench.publisher._members = None  # what a failed publish leaves behind; this push went past the publisher
    bench.publish(32)
    bench.assert_all_hold(32)


@pytest.mark.parametrize("victim", ["the engine's worker process", "the actor"])
def test_a_killed_engine_is_named_and_the_others_go_on(bench: Bench, victim: str) -> None:
    """In the middle of a push, with a layer of which one matrix has arrived: the survivors are half-written then."""
    name = "b" if victim == "the actor" else "c"
    bench.publisher._members = None
    bench.publish(40)
    killed = bench.workers[name]
    pid = killed.info["pid"] if victim == "the actor" else killed.processes("VLLM::Worker")[0].pid
    error = bench.interrupted(41, pid, signal.SIGKILL)
    assert isinstance(error, WorkerLost)
    assert error.name == name
    bench.lost[name] = bench.workers.pop(name)
    for worker in bench.workers.values():
        with pytest.raises(PublicationError, match="cannot resume"):
            worker.call("resume")
    bench.model = changed(bench.model, 42)
    update = bench.publish(42)
    assert update.engines == len(bench.workers)
    bench.assert_all_hold(42)


def test_a_dead_engine_in_a_new_group_is_named_at_once(bench: Bench) -> None:
    """Only one engine lives by now; a member that is not there must not hold up the rendezvous."""
    (alive,) = bench.workers.values()
    with pytest.raises(WorkerLost, match="rollout worker b was lost: died during ping"):
        ray.get(bench.sender.connect.remote([alive.endpoint, bench.lost["b"].endpoint]), timeout=30)
    bench.publisher._members = None
    bench.publish(50)
    bench.assert_all_hold(50)
