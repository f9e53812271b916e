"""Sends staged weights to the engines. Lives in the process of learner rank 0; other ranks never build one.

    connect(engines):  ping all ─► new group on a new port (generation + 1)
    send(staged):      start ─► update on all engines while this rank broadcasts ─► finish(version) ─► compare digests

Everything that can block runs on a daemon thread; whoever calls waits with a limit, and the error names the engine that
died, refused or did not answer. After a failure the group is closed: connect again, then send everything again. Pausing
and resuming engines is the publisher's business.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from grpo_dist.errors import PublicationError, WorkerLost
from grpo_dist.types import TensorInfo
from grpo_dist.weights.digest import combined_digest
from grpo_dist.weights.lane import Lane, aside
from grpo_dist.weights.plugin import register

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine as the sender sees it. ``incarnation`` tells a replaced engine from the one before it of that name."""

    name: str
    handle: Any  # Ray actor handle of a RolloutWorker
    world_size: int = 1  # ranks of the engine: each receives
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class SendReport:
    version: int
    tensors: int
    bytes: int
    engines: int
    seconds: float
    digests_ok: bool | None  # None: not verified this time; a mismatch raises
    digest: str | None = None  # of all tensors, when verified: equal weights have equal digests


class Staged(Protocol):
    """What the sender needs of ``weights/source.py``'s StagedWeights."""

    @property
    def infos(self) -> tuple[TensorInfo, ...]: ...
    @property
    def tensors(self) -> dict[str, torch.Tensor]: ...
    def digest(self, name: str) -> str: ...


class EngineClient:
    """vLLM's ``VLLMWeightSyncClient`` over Ray actors: each call goes to all engines, has a limit and names who failed.

    vLLM's own Ray client gives every engine the same rank and waits without a limit.
    """

    def __init__(self, endpoints: Sequence[EngineEndpoint], seconds: float) -> None:
        self.endpoints = tuple(endpoints)
        self.deadline = time.monotonic() + seconds
        self.version = -1  # given to finish_weight_update: the trainer engines call it without one
        self.digest = False
        self.failure: Exception | None = None  # of an engine; the broadcast that breaks after it is a symptom
        self.on_failure: Callable[[], None] = lambda: None  # releases a broadcast that waits for the failed engine
        self._waiting: set[str] = set()

    def set_limit(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    @property
    def waiting(self) -> list[str]:
        """Engines that have not answered the call under way."""
        return sorted(self._waiting)

    def ping(self) -> None:
        self._all("ping", lambda _: ())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets, offset = {}, 1  # rank 0 is the sender
        for endpoint in self.endpoints:
            offsets[endpoint.name] = offset
            offset += endpoint.world_size
        self._all("init_weight_transfer_engine", lambda e: (init_info | {"rank_offset": offsets[e.name]},))

    def start_weight_update(self) -> None:
        self._all("start_weight_update", lambda _: ())

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", lambda _: (update_info | {"digest": self.digest},))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", lambda _: (self.version,))

    def received_digests(self) -> dict[str, list[dict[str, str]]]:
        return self._all("received_digests", lambda _: ())

    def _all(self, method: str, arguments: Callable[[EngineEndpoint], tuple[Any, ...]]) -> dict[str, Any]:
        """Call every engine and wait for all. After the first failure the others get a moment to say theirs."""
        refs = {getattr(e.handle, method).remote(*arguments(e)): e.name for e in self.endpoints}
        self._waiting = set(refs.values())
        answers: dict[str, Any] = {}
        failures: list[tuple[str, Exception]] = []
        pending, deadline = list(refs), self.deadline
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            name = refs[ready[0]]
            self._waiting.discard(name)
            try:
                answers[name] = ray.get(ready[0])
            except (RayActorError, RayTaskError) as error:
                failures.append((name, error))
                self.on_failure()
                deadline = min(deadline, time.monotonic() + 5)
        if failures:
            self.failure = _failure(method, failures)
        elif pending:
            self.failure = PublicationError(f"{', '.join(self.waiting)} did not answer {method} in time")
        if self.failure is not None:
            raise self.failure
        return answers


def _failure(method: str, failures: Sequence[tuple[str, Exception]]) -> Exception:
    """The cause first: a dead engine breaks the connection of the others, whose complaints are symptoms."""
    for name, error in failures:
        if isinstance(error, RayActorError):
            return WorkerLost("rollout", name, f"died during {method}")
    told = [f"{name}: {_cause(error)}" for name, error in failures]
    symptoms = ("Connection closed", "Connection reset", "weights cannot be received")
    told.sort(key=lambda text: any(symptom in text for symptom in symptoms))
    return PublicationError(f"{method} failed on {'; '.join(told)}")


def _cause(error: Exception) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return str(cause).strip().splitlines()[-1] if str(cause).strip() else type(cause).__name__


class WeightSender:
    def __init__(self, backend: str, *, connect_seconds: float = 120.0, send_seconds: float = 600.0) -> None:
        """``backend`` is 'gloo' or 'nccl'. The limits are for a whole connect and a whole send."""
        self.backend = backend
        self.generation = 0
        self._connect_seconds, self._send_seconds = connect_seconds, send_seconds
        self._source = _Source("cuda" if backend == "nccl" else "cpu")
        self._client: EngineClient | None = None
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._lane: Lane | None = None
        self._lock = threading.Lock()

    def connect(self, endpoints: Sequence[EngineEndpoint], host: str) -> int:
        """New group with exactly these engines, on a new port of ``host``, this node's address. Returns its generation.

        Raises WorkerLost or PublicationError that names the engine.
        """
        if len({e.name for e in endpoints}) != len(endpoints) or not endpoints:
            raise ValueError(f"engines must be at least one, with different names, got {[e.name for e in endpoints]}")
        with self._lock:
            self.close()
            client = EngineClient(endpoints, self._connect_seconds)
            self._lane = Lane(f"publish-{self.generation}")
            opening = self._lane.submit(self._open, client, host)
            self._engine = self._await(opening, client, self._connect_seconds, "join the weight group")
            client.on_failure = self._engine.shutdown
            self._client = client
            self.generation += 1
            return self.generation

    def send(self, staged: Staged, version: int, *, verify: bool = True) -> SendReport:
        """One publication to every connected engine. Engines must be paused.

        Raises WorkerLost or PublicationError; then no engine may resume before another send succeeded.
        """
        with self._lock:
            if self._engine is None or self._client is None or self._lane is None:
                raise PublicationError("no weight group: connect first")
            began = time.monotonic()
            client, self._client.version, self._client.digest = self._client, version, verify
            client.set_limit(self._send_seconds)
            self._source.staged = staged
            digesting = aside("digest", _digests, staged) if verify else None  # while the bytes are on their way
            wanted: dict[str, str] = {}
            try:
                sending = self._lane.submit(self._engine.send_weights)
                self._await(sending, client, self._send_seconds, "take the new weights")
                if digesting is not None:
                    wanted = digesting.result(self._send_seconds)
                    self._compare(wanted, client.received_digests())
            except Exception as error:
                self.close()
                raise (client.failure or error) from error
            finally:
                self._source.staged = None
            sizes = [t.numel() * t.element_size() for t in staged.tensors.values()]
            seconds = time.monotonic() - began
            return SendReport(
                version, len(sizes), sum(sizes), len(client.endpoints), seconds,
                digests_ok=True if verify else None, digest=combined_digest(wanted) if verify else None,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the group; engines notice by their sockets. A send that hangs is left behind on its daemon thread."""
        engine, lane = self._engine, self._lane
        self._engine = self._client = self._lane = None
        if engine is not None:
            engine.shutdown()
        if lane is not None:
            lane.close()

    def _open(self, client: EngineClient, host: str) -> TrainerWeightTransferEngine[Any]:
        """On the lane: vLLM's trainer engine for this backend, with its group."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the learner uses nothing that vLLM warns about
        client.ping()  # a member that is not there would hold up all others in the rendezvous
        register()
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        world = 1 + sum(e.world_size for e in client.endpoints)
        info: Any
        if self.backend == "gloo":
            from grpo_dist.weights.gloo import GlooTrainerInitInfo

            info = GlooTrainerInitInfo(
                master_address=host, world_size=world, timeout_seconds=self._send_seconds, rank=0,
                connect_seconds=self._connect_seconds,
            )  # fmt: skip
        else:
            from grpo_dist.weights.nccl import nccl_init_info

            info = nccl_init_info(host, _free_port(), world)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source.as_weight_source())

    def _await(self, future: Future[Any], client: EngineClient, seconds: float, what: str) -> Any:
        try:
            return future.result(seconds + 5)  # the client's own limit, which names the engine, comes first
        except FutureTimeout as error:
            if future.done():  # raised by the call itself
                raise PublicationError(f"engines did not {what}: {error}") from error
            self.close()
            who = ", ".join(client.waiting) or "learner rank 0 (its broadcast did not return)"
            raise PublicationError(f"{who} did not {what} within {seconds:.0f} s") from None

    @staticmethod
    def _compare(wanted: dict[str, str], received: dict[str, list[dict[str, str]]]) -> None:
        for engine, ranks in received.items():
            for rank, digests in enumerate(ranks):
                wrong = sorted(name for name in wanted.keys() | digests.keys() if wanted.get(name) != digests.get(name))
                if wrong:
                    raise PublicationError(
                        f"{len(wrong)} tensors did not arrive on {engine} (rank {rank}) as they were sent: "
                        f"{', '.join(wrong[:5])}"
                    )


class _Source:
    """The source that a group is opened with; what it yields is swapped at each publication."""

    def __init__(self, device: str) -> None:
        self.device = device  # NCCL sends from the GPU, Gloo from host memory, where the staging is
        self.staged: Staged | None = None

    def as_weight_source(self) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        outer = self

        class StagedSource(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                assert outer.staged is not None
                return [ParamMeta(i.name, getattr(torch, i.dtype), i.shape) for i in outer.staged.infos]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                assert outer.staged is not None
                for info in outer.staged.infos:
                    yield info.name, outer.staged.tensors[info.name].to(outer.device)

        return StagedSource()


def _digests(staged: Staged) -> dict[str, str]:
    return {info.name: staged.digest(info.name) for info in staged.infos}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
