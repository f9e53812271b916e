"""Weight transfer over Gloo: the CPU counterpart of vLLM's ``nccl`` engine, in the same two classes.

Rank 0 of the group is learner rank 0, the others are engine ranks. The group is a ``ProcessGroupGloo`` over a TCP store
that the sender binds on a free port; it has nothing to do with anybody's default group. One broadcast per tensor, raw
bytes, in the order of the metadata; while one tensor is loaded the next is on the wire.

A member that dies closes its sockets and the others fail at once. A member that hangs is noticed by the time limit
of the operation, which Gloo can not be made to shorten afterwards.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore, Work
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from grpo_dist.weights.lane import aside
from grpo_dist.weights.receiver import CheckedReload


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """What an engine needs to join. Its ranks are ``rank_offset + (rank inside the engine)``."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    connect_seconds: float  # for the whole group to meet
    timeout_seconds: float  # of one broadcast


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    digest: bool = False  # keep a digest of each tensor as received


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = "gloo"

    master_address: str
    world_size: int
    connect_seconds: float
    timeout_seconds: float


class GlooGroup:
    """One group generation: broadcast from rank 0. ``close`` closes the sockets, which is what peers notice."""

    def __init__(self, store: TCPStore, rank: int, world_size: int, address: str, timeout_seconds: float) -> None:
        gloo: Any = ProcessGroupGloo  # its stubs lack half of it
        options = gloo._Options()
        # The interface that faces the peers; by default Gloo takes what the host name resolves to, often 127.0.0.1.
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_seconds)
        self._store: TCPStore | None = store
        self._group: Any = gloo(store, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> Work:
        """Send (rank 0) or receive ``tensor`` (contiguous, any dtype). Wait for the returned work before using it."""
        if self._group is None:
            raise RuntimeError("the weight group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work: Work = self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options)
        return work

    def close(self) -> None:
        self._group = None
        self._store = None


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the interface that leads to ``host``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: only picks the route
        return str(probe.getsockname()[0])


class GlooWeightTransferEngine(CheckedReload, WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """In each vLLM worker: receives what the sender broadcasts and loads it."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = TCPStore(
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            is_master=False,
            timeout=timedelta(seconds=init_info.connect_seconds),
        )
        address = address_towards(init_info.master_address, init_info.master_port)
        self._group = GlooGroup(store, rank, init_info.world_size, address, init_info.timeout_seconds)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:  # the base class ends in torch.accelerator.synchronize(), which needs an accelerator
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.shutdown()  # closed sockets release the sender and, through it, the other engines
            raise

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("weights cannot be received: no group was joined, or an update failed")
        self.expect(update_info.names, update_info.dtype_names, update_info.shapes)
        waiting: tuple[str, torch.Tensor, Work] | None = None
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            buffer = torch.empty(shape, dtype=getattr(torch, dtype))
            arriving = (name, buffer, self._group.broadcast(buffer))
            if waiting is not None:
                self._take(waiting, update_info.digest)
            waiting = arriving
        if waiting is not None:
            self._take(waiting, update_info.digest)

    def _take(self, waiting: tuple[str, torch.Tensor, Work], digest: bool) -> None:
        name, buffer, work = waiting
        work.wait()
        self.load([(name, buffer)], digest=digest)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """In the process of learner rank 0: opens the group and sends. Other learner ranks never build one."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, group: GlooGroup | None = None) -> None:
        super().__init__(client=client, source=source, is_sender=True)
        self._group = group

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("gloo weight transfer needs a WeightSource")
        connect, limit = init_info.connect_seconds, init_info.timeout_seconds
        store = TCPStore(
            init_info.master_address,
            0,  # a free port, bound by ourselves: nobody can take it in between
            init_info.world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=connect),
        )
        worker_info = GlooInitInfo(init_info.master_address, store.port, 1, init_info.world_size, connect, limit)
        # Engines block until the whole group has met, so they are asked on another thread.
        answer = aside("gloo-init", client.init_weight_transfer_engine, asdict(worker_info))
        try:
            group = GlooGroup(store, 0, init_info.world_size, init_info.master_address, limit)
        except RuntimeError:
            answer.result()  # says which engine did not join, and why
            raise
        answer.result()
        return cls(client=client, source=source, group=group)

    def send_weights(self) -> None:
        if self._group is None or self.source is None:
            raise RuntimeError("weights cannot be sent: the group is closed")
        metadata = self.source.metadata()
        update = GlooUpdateInfo(
            names=[m.name for m in metadata],
            dtype_names=[str(m.dtype).removeprefix("torch.") for m in metadata],
            shapes=[list(m.shape) for m in metadata],
        )
        self.client.start_weight_update()
        answer = aside("gloo-update", self.client.update_weights, asdict(update))
        try:
            self._broadcast(self._group)
        except RuntimeError:
            self.shutdown()  # releases the engines that still wait for a tensor
            answer.result()  # the engine's own error says more than "connection closed"
            raise
        answer.result()
        self.client.finish_weight_update()

    def _broadcast(self, group: GlooGroup) -> None:
        assert self.source is not None
        for (name, tensor), meta in zip(self.source, self.source.metadata(), strict=True):
            if (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, meta.shape):
                raise RuntimeError(
                    f"staged tensor {name} {tensor.dtype}{list(tensor.shape)} does not match its metadata "
                    f"{meta.name} {meta.dtype}{list(meta.shape)}"
                )
            group.broadcast(tensor.contiguous()).wait()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
